"""Fixtures of the CPU kernel tests, for the study whose kernels are among them."""

from ops.conftest import tier  # noqa: F401
