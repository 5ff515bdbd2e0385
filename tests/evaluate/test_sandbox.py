"""The sandbox runs honest programs and stops the others."""

import time

import pytest
from messages import raises

from kvbits.errors import DataError
from kvbits.evaluate.tasks.sandbox import namespaces, run_program

FAST = {"seconds": 5}


def test_a_program_that_ends_well_passes():
    out = run_program("import math, collections, typing, re, heapq\nassert math.gcd(12, 18) == 6", **FAST)
    assert out.passed and out.reason == "" and {"limits", "audit hook"} <= set(out.isolation)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 1 == 2, 'no'", "AssertionError: no"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import os; os._exit(0)", "ended by itself"),
        ("import numpy", "ModuleNotFoundError"),
    ],
)
def test_a_program_that_does_not_fails_with_its_reason(program, reason):
    out = run_program(program, **FAST)
    assert not out.passed and reason in out.reason


def test_guessing_how_passing_is_said_does_not_pass():
    out = run_program(
        "import os\nfor fd in range(3, 10):\n    try: os.write(fd, b'passed 0')\n    except OSError: pass\nos._exit(0)",
        **FAST,
    )
    assert not out.passed


@pytest.mark.parametrize(
    "program",
    [
        "import socket; socket.socket().connect(('127.0.0.1', 9))",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.system('true')",
        "import os; os.fork()",
        "import ctypes; ctypes.CDLL(None)",
        "import os; os.kill(1, 0)",
    ],
)
def test_network_programs_and_foreign_code_are_refused(program):
    out = run_program(program, **FAST)
    assert not out.passed and (
        "refused" in out.reason
        or "ImportError" in out.reason
        or "PermissionError" in out.reason
        or "URLError" in out.reason
    ), out.reason


def test_files_only_in_its_own_folder(tmp_path):
    target = tmp_path / "x"
    target.write_text("here")
    for program in (
        f"open({str(target)!r}, 'w')",
        f"import os; os.remove({str(target)!r})",
        f"import os; os.open({str(target)!r}, os.O_WRONLY)",
        f"import os; os.rename({str(target)!r}, 'y')",
        f"import pathlib; pathlib.Path({str(target)!r}).write_text('')",
        f"import os; os.symlink({str(tmp_path)!r}, 'l'); open('l/x', 'w')",
        f"import os; os.truncate({str(target)!r}, 0)",
    ):
        out = run_program(program, **FAST)
        assert not out.passed and "refused" in out.reason, (program, out.reason)
    assert target.read_text() == "here"
    assert run_program(
        "open('mine.txt', 'w').write('x' * 100)\nassert len(open('mine.txt').read()) == 100", **FAST
    ).passed
    assert not run_program("open('big', 'w').write('x' * 3_000_000)", **FAST).passed


def test_time_and_memory_have_limits():
    began = time.monotonic()
    for program in ("while True: pass", "import time; time.sleep(60)"):
        assert not run_program(program, seconds=1).passed
    assert time.monotonic() - began < 30
    out = run_program("x = bytearray(3 << 30)", **FAST)
    assert not out.passed and "MemoryError" in out.reason
    with raises(DataError, "seconds=0", 1):
        run_program("", seconds=0)


def test_the_parents_environment_and_folder_stay_outside(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_PARENT", "1")
    assert run_program(
        "import os\nassert 'SECRET_OF_THE_PARENT' not in os.environ\nassert os.listdir('.') == ['program.py']", **FAST
    ).passed


@pytest.mark.skipif(not namespaces(), reason="this kernel allows no namespaces")
def test_a_namespace_has_no_network():
    assert "no network" in run_program("pass", **FAST).isolation
