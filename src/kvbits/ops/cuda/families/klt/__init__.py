"""Banded integer codes, of keys in a basis."""
