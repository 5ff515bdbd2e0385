"""Trials of GPU kernels: patches that apply to this tree, and a script that outlives the failing ones."""

from __future__ import annotations

import sys

import compare_trials_gpu
import pytest
from run_files import read


@pytest.mark.parametrize("patch", sorted((compare_trials_gpu.HERE / "trials").glob("*.patch")), ids=lambda p: p.stem)
def test_every_trial_applies_to_this_tree(patch, tmp_path):
    compare_trials_gpu.copy_with(patch, tmp_path / "tree")


def test_a_trial_that_fails_is_reported_and_the_next_one_runs(tmp_path, monkeypatch):
    patches = [tmp_path / name for name in ("first.patch", "second.patch")]
    for patch in patches:
        patch.write_text("--- a/src/kvbits/none.py\n+++ b/src/kvbits/none.py\n@@ -1 +1 @@\n-x\n+y\n")
    out = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["compare_trials_gpu.py", *map(str, patches), "--out", str(out)])
    compare_trials_gpu.main()
    failures = read(out)["failures"]
    assert [row["trial"] for row in failures] == ["first", "second"]
    assert all("none.py" in row["reason"] for row in failures)
