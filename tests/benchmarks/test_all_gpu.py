"""The one command of a GPU machine: what it runs, what it skips, what it does when something fails or time runs out.

No GPU is needed: its machine is a fake one with a clock of its own; the commands of its parts are parsed by the
benchmarks themselves.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import runpy
import sys
from pathlib import Path

import all_gpu
import pytest
import run_files
from messages import mentions

from kvbits import runs
from kvbits.cli.common import Command

ROOT = Path(__file__).parents[2]
GPU = {"name": "NVIDIA Fake", "count": 1, "driver": "1"}


class Fake(all_gpu.Machine):
    """Every part takes 100 s and ends well, but for those of `codes`; packages of `absent` are not there."""

    def __init__(self, name="a", commit="c0ffee", dirty=False, boot="boot a", gpu=GPU, codes=None, absent=()):
        super().__init__(environment={"PATH": "/bin"}, boot=boot)
        self.now, self.codes, self.absent, self.ran, self.seen = 0.0, codes or {}, absent, [], []
        run = {field: None for field in runs.FIELDS} | {
            "id": name,
            "session": name,
            "utc": f"2026-01-01T00:00:{len(name):02d}Z",
        }
        self.one = run | {"commit": commit, "dirty": dirty, "gpu": gpu, "facts": {}}
        self.clock, self.record = lambda: self.now, lambda: self.one

    def run(self, argv, environment, limit, log):
        if log.name.startswith("warm_"):
            return 0
        name = log.stem
        self.ran.append(name)
        self.seen.append((name, list(argv), dict(environment), limit))
        log.write_text(f"output of {name}\n")
        took = 100.0
        self.now += min(took, limit)
        return self.codes.get(name, 0) if took <= limit else None

    def missing(self, needs):
        return next((n for n in needs if n in self.absent), None)


@pytest.fixture
def command(tmp_path, capsys):
    def run(machine, *argv):
        code = all_gpu.main([*argv, "--out", str(tmp_path / "out"), "--logs", str(tmp_path / "logs")], machine)
        return code, capsys.readouterr().out

    return run


def test_a_second_command_goes_on_where_the_first_ran_out_of_time(command):
    first = Fake("first")
    code, said = command(first, "--only", "decode", "generate", "close", "--limit", "5")
    assert code == 3 and first.ran == ["decode", "close"] and mentions(said, "220 s", "200 s")
    second = Fake("second")
    assert command(second, "--only", "decode", "generate", "close")[0] == 0
    assert second.ran == ["generate"]
    third = Fake("third")
    code, said = command(third, "--only", "decode", "generate", "close")
    assert code == 0 and not third.ran and said.count("done before") == 6


def test_a_part_that_does_not_fit_lets_shorter_ones_run(command):
    machine = Fake()
    code, _ = command(machine, "--only", "generate", "close", "--limit", "3")
    assert code == 3 and machine.ran == ["close"], "generate is expected to take longer than 3 minutes, close 50 s"


def test_another_commit_or_another_gpu_runs_everything_again(command):
    command(Fake("first"), "--only", "close")
    for other in (
        Fake("second", commit="other"),
        Fake("third", gpu=GPU | {"name": "NVIDIA Other"}),
        Fake("fourth", dirty=True),
    ):
        command(other, "--only", "close")
        assert other.ran == ["close"]


def test_what_fails_is_said_and_the_others_run(command):
    machine = Fake(codes={"decode": 1})
    code, said = command(machine, "--only", "decode", "close")
    assert code == 1 and machine.ran == ["decode", "close"]
    assert "exit code 1" in said and "output of decode" in said
    for machine, more, ran in (
        (Fake("same"), (), []),
        (Fake("again"), ("--retry",), ["decode"]),
        (Fake("other", boot="boot b", commit="other"), (), ["decode", "close"]),
    ):
        code, said = command(machine, "--only", "decode", "close", *more)
        assert machine.ran == ran and code == ("--retry" in said) == (not ran), (
            "only what failed runs again, and only when asked"
        )


def test_a_limit_kills_a_part(command, monkeypatch):
    monkeypatch.setattr(
        all_gpu, "parts", lambda environment: [all_gpu.Part("slow", "", ("-c", "pass"), "x.json", 10, 20)]
    )
    code, said = command(Fake())
    assert code == 1 and mentions(said, "slow", "limit")


def test_a_package_that_is_absent_leaves_its_parts_out(command):
    machine = Fake(absent=("vllm",))
    code, said = command(machine, "--only", "serve-*", "close")
    assert code == 0 and machine.ran == ["close"] and "no vllm" in said


def test_ratios_are_of_one_session(command):
    serve = ("--only", "serve-bf16", "serve-fp8")
    machine = Fake("first", codes={"serve-fp8": None})
    command(machine, *serve)
    same = Fake("second")
    assert command(same, *serve)[0] == 0 and same.ran == ["serve-fp8"], "the same machine goes on"
    assert {e["KVBITS_SESSION"] for _, _, e, _ in machine.seen + same.seen} == {"first"}
    assert not command(Fake("third", boot="boot b"), *serve)[0] and not Fake("third").ran
    other = Fake("fourth", boot="boot b")
    command(other, *serve, "serve-nvfp4")
    assert other.ran == [
        "serve-bf16",
        "serve-nvfp4",
    ], "another machine measures what the new ratio is over, and nothing else again"


def test_children_know_commit_and_session_and_only_vllm_sees_its_packages(command):
    machine = Fake("first")
    machine.environment |= {"KVBITS_VLLM_SITE": "/packages", "KVBITS_PEERS_SITE": "/peers"}
    command(machine, "--only", "close", "serve-bf16")
    by_name = {name: environment for name, _, environment, _ in machine.seen}
    assert {e["KVBITS_COMMIT"] for e in by_name.values()} == {"c0ffee"}
    paths = {name: e["PYTHONPATH"] for name, e in by_name.items()}
    assert paths["serve-bf16"].startswith("/packages:") and "/peers" not in paths["serve-bf16"]
    assert paths["close"].startswith("/peers:") and "/packages" not in paths["close"]


def test_the_list_says_how_long_parts_took(command):
    command(Fake("first"), "--only", "close")
    code, said = command(Fake("second", commit="other", gpu=None), "--list", "--only", "close", "small")
    lines = said.splitlines()
    assert (
        code == 0 and lines[1].split()[:3] == ["close", "100", "s"] and "(90 s)" in lines[2] and "2 parts" in lines[-1]
    )


def test_steps_are_taken_apart_beside_bf16_and_in_a_file_of_their_own(command):
    machine = Fake("first")
    assert command(machine, "--only", "serve-*-profile")[0] == 0
    assert machine.ran == [
        f"serve-{d}-profile" for d in ("bf16", "kvbits_int8_centered", "kvbits_int4", "kvbits_klt4", "kvbits_klt2")
    ]
    assert all("--profile" in argv and argv[-1].endswith("/profile_vllm.json") for _, argv, *_ in machine.seen), (
        "its rows are not those of the documents' tables"
    )
    other = Fake("second", boot="boot b")
    command(other, "--only", "serve-bf16-profile", "serve-kvbits_klt4-profile", "serve-fp8")
    assert other.ran == ["serve-fp8"]


def test_without_a_gpu_nothing_runs(command):
    machine = Fake(gpu=None)
    assert command(machine)[0] == 2 and not machine.ran


def test_an_unknown_part_is_refused(command, capsys):
    with pytest.raises(SystemExit) as raised:
        command(Fake(), "--only", "decod")
    assert raised.value.code == 2 and mentions(capsys.readouterr().err, "decod", "tests", "decode")


def test_the_state_is_a_file_of_runs(command, tmp_path):
    command(Fake("first"), "--only", "close")
    state = run_files.read(tmp_path / "out" / "all_gpu.json")
    assert [r["part"] for r in state["rows"] if not r["part"].startswith("warm")] == ["close"] and state["runs"][
        "first"
    ]["facts"] == {"boot": "boot a"}


def test_results_of_another_machine_are_added(tmp_path, capsys):
    source, out = tmp_path / "from", tmp_path / "to"
    (source / "eval").mkdir(parents=True)
    (source / "eval" / "raw.json").write_text('{"scheme": "raw"}')
    record = {field: None for field in runs.FIELDS}
    for folder, name in ((source, "new"), (out, "old")):
        folder.mkdir(exist_ok=True)
        (folder / "a.json").write_text(
            json.dumps({"runs": {name: record | {"id": name}}, "rows": [{"run": name, "us": 1}]})
        )
    for _ in range(2):  # the second time changes nothing
        assert all_gpu.main(["--take", str(source), "--out", str(out)], Fake()) == 0
    assert [r["run"] for r in run_files.read(out / "a.json")["rows"]] == ["old", "new"]
    assert json.loads((out / "eval" / "raw.json").read_text()) == {"scheme": "raw"}


def test_the_machine_kills_what_takes_too_long(tmp_path):
    machine, log = all_gpu.Machine(), tmp_path / "log"
    assert machine.run(["-c", "print('here')"], machine.environment, 60, log) == 0 and log.read_text() == "here\n"
    assert machine.run(["-c", "raise SystemExit(7)"], machine.environment, 60, log) == 7
    assert machine.run(["-c", "import time; time.sleep(60)"], machine.environment, 0.5, log) is None


def commands(models=None):
    """Every command that all_gpu.py may run: (name of the part or the compilation, argv after "python")."""
    environment = {"KVBITS_TEXTS": "/texts", "KVBITS_DATA": "/data"} | (
        {"KVBITS_MODELS": str(models)} if models else {}
    )
    every = [(p.name, p.argv) for p in all_gpu.parts(environment)]
    every += [(f"warm {w.name}", w.argv) for w in all_gpu.warms()]
    return [(name, tuple(a.format(out="out", shared="out", disk="disk") for a in argv)) for name, argv in every]


class Parsed(Exception):
    """Raised in place of the work that follows the arguments of a script."""


def parsed(argv, monkeypatch):
    """The options of a command, read by the program that it names; nothing is measured.

    Returns:
        Name -> value.

    Raises:
        SystemExit: the program does not take the arguments.
    """
    with monkeypatch.context() as patched:
        if argv[0] == "-m":
            app = importlib.import_module({"kvbits": "kvbits.cli", "studies": "studies.__main__"}[argv[1]]).app

            def invoke(self, context):
                raise Parsed(context.params)

            patched.setattr(Command, "invoke", invoke)
            run = functools.partial(app, [*argv[2:]])
        else:
            parse = argparse.ArgumentParser.parse_args

            def parse_args(self, *args, **options):
                raise Parsed(vars(parse(self, *args, **options)))

            script = ROOT / argv[0]
            patched.setattr(argparse.ArgumentParser, "parse_args", parse_args)
            patched.setattr(sys, "argv", [str(script), *argv[1:]])
            patched.setattr(sys, "path", [str(script.parent), *sys.path])
            run = functools.partial(runpy.run_path, str(script), run_name="__main__")
        with pytest.raises(Parsed) as found:
            run()
    return found.value.args[0]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in ("one", all_gpu.POINTS_MODEL):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text("{}")
    return folder


PROGRAMS = sorted({argv[1] if argv[0] == "-m" else argv[0] for _, argv in commands()} | {"kvbits"})


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_takes_the_commands(program, models, monkeypatch):
    mine = [(name, argv) for name, argv in commands(models) if program in argv[:2]]
    assert mine
    for name, argv in mine:
        options = parsed(argv, monkeypatch)
        writes = options.get("out") is not None and Path(options["out"]).parts[0] == "out"
        assert writes != name.startswith("warm"), f"{name}: what compiles writes no result, what measures does"


def test_a_command_that_is_gone_is_seen(monkeypatch):
    for argv in (
        ("-m", "kvbits", "bench", "paper", "--out", "out/paper.json"),
        ("-m", "studies", "papers"),
        ("benchmarks/bench_store.py", "--where", "disk", "--cold"),
    ):
        with pytest.raises(SystemExit) as raised:
            parsed(argv, monkeypatch)
        assert raised.value.code == 2


def test_presets_and_dtypes_exist():
    from kvbits import schemes

    assert set(all_gpu.PRESETS) | set(all_gpu.GENERATED) - {"stock_flash", "fa3"} <= schemes.PRESETS.keys()
    names = [name for name, _ in commands()]
    assert len(names) == len(set(names))


def test_models_are_found_small_ones_first(tmp_path):
    for name, size in (("large", 100), ("small", 10)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("x" * size)
    (tmp_path / "middle.gguf").write_text("x" * 50)
    found = [p.name for p in all_gpu.parts({"KVBITS_MODELS": str(tmp_path)}) if p.name.startswith("accuracy")]
    assert found == ["accuracy-small", "accuracy-middle", "accuracy-large"]


def test_what_the_decode_benchmark_reads_of_a_cache_is_there():
    """It runs on a GPU alone: a name that moved would be seen there, and late."""
    import dataclasses

    from kvbits.cache.paged_cache import PagedCache
    from kvbits.ops.cuda import decode

    assert {"numbers", "attention"} <= {f.name for f in dataclasses.fields(decode._Group)}
    assert all(
        hasattr(PagedCache, name)
        for name in ("append", "crop", "step", "decoding", "led_by_host", "store_of", "seq_lens", "batch_size")
    )
