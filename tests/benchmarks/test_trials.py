"""Trials of GPU kernels: patches that apply to this tree, and a script that outlives the failing ones."""

from __future__ import annotations

import re
import subprocess
import sys

import compare_trials_gpu
import pytest
from run_files import read


@pytest.mark.parametrize("patch", sorted((compare_trials_gpu.HERE / "trials").glob("*.patch")), ids=lambda p: p.stem)
def test_a_trial_applies_to_this_tree_as_git_would(patch, tmp_path):
    patched = compare_trials_gpu.copy_with(patch, tmp_path / "patched")
    nothing = tmp_path / "nothing.patch"
    nothing.write_text("")
    by_git = compare_trials_gpu.copy_with(nothing, tmp_path / "by_git")
    subprocess.run(["git", "apply", str(patch)], cwd=by_git, check=True)
    changed = re.findall(r"^\+\+\+ b/(.+)$", patch.read_text(), flags=re.MULTILINE)
    assert changed
    for name in changed:
        assert (patched / name).read_text() == (by_git / name).read_text()
        assert (patched / name).read_text() != (compare_trials_gpu.HERE.parent / name).read_text()


def test_a_trial_that_fails_is_reported_and_the_next_one_runs(tmp_path, monkeypatch):
    patches = [tmp_path / name for name in ("first.patch", "second.patch")]
    for patch in patches:
        patch.write_text("--- a/src/kvbits/errors.py\n+++ b/src/kvbits/errors.py\n@@ -1 +1 @@\n-no such line\n+y\n")
    out = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["compare_trials_gpu.py", *map(str, patches), "--out", str(out)])
    compare_trials_gpu.main()
    failures = read(out)["failures"]
    assert [row["trial"] for row in failures] == ["first", "second"]
    assert all("errors.py" in row["reason"] for row in failures)
