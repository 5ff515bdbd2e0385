"""Everything that the documents print of one GPU, in one command: each part in a process of its own, the most important
first, at one commit.

    python benchmarks/all_gpu.py [--only NAME ..] [--skip NAME ..] [--limit MINUTES] [--out benchmarks/results/<gpu>]
    python benchmarks/all_gpu.py --list                  what it would run, what of it is done at this commit, and how
                                                         long each part took last time
    python benchmarks/all_gpu.py --take DIR --out ..     adds the rows that another machine wrote to DIR

Before anything is timed, kernels are compiled by several processes at once, into the caches on disk; timings run alone.
A part that fails, takes longer than its limit or needs a package that is not there leaves the others alone. A part is
skipped where all_gpu.json in the folder of results says that it was done at this commit on this kind of GPU, so a
command that was stopped continues where it was; a part whose rows make ratios with those of another process ("serve-..",
over "serve-bf16") counts as done only where both were measured in one session, on one machine. With --limit a part
begins only if it ended within the time that is left when it last ran.

Accuracy does not depend on what else runs. Parts named points-*, tails-*, accuracy-* and long-* may run in several
commands on one GPU, each with an --out of its own, fastest through NVIDIA's MPS (nvidia-cuda-mps-control -d).

    KVBITS_COMMIT      the commit, where there is no .git
    KVBITS_VLLM_SITE   a folder of packages that only the parts of vLLM see; KVBITS_PEERS_SITE: only the others, such as
                       FlashAttention-3 and FlashInfer
    KVBITS_MODELS      a folder of models (docs/results/evaluation.md): accuracy is measured on those of it
    KVBITS_TEXTS       a folder with wiki.test.raw and wiki.valid.tokens: evaluated and calibrated on; the shipped novel
                       if not given
    KVBITS_DATA        a folder with gsm8k/test.jsonl, gsm8k/train.jsonl, humaneval/HumanEval.jsonl and
                       books/2600-0.txt: chains and tasks with right answers need it
    KVBITS_DISK        a folder on a disk for the store's files; the folder of temporary files if not given

Exit code: 0 all done, 1 something failed, 2 bad arguments or no GPU, 3 time ran out before the last part.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import run_files

ROOT = Path(__file__).resolve().parents[1]
STATE = "all_gpu.json"
PRESETS = ("raw", "int8_centered", "int4", "kivi4", "klt4", "klt3", "klt2")
GENERATED = ("stock_flash", "fa3", "raw", "int8_centered", "kivi4", "klt4", "klt2")
SERVED = {
    "bf16": 112,
    "kvbits_int8_centered": 208,
    "kvbits_klt4": 368,
    "kvbits_klt3": 464,
    "kvbits_klt2": 624,
    "fp8": 224,
}
"""dtype -> the largest batch of 8,192 tokens each that could fit an H200, a multiple of 16."""
STOCK = ("int8_per_token_head", "turboquant_4bit_nc", "turboquant_k8v4", "int4_per_token_head", "nvfp4")
"""vLLM's own dtypes of few bits, beside fp8."""
LOADED = ("bf16", "fp8", "kvbits_int8_centered", "kvbits_klt4", "kvbits_klt3", "kvbits_klt2")
"""Dtypes that serve requests as they come and long chats."""
PROFILED = ("bf16", "kvbits_int8_centered", "kvbits_int4", "kvbits_klt4", "kvbits_klt2")
"""Dtypes whose steps are taken apart."""
AT_ONCE = 14
"""Processes that compile together."""
SHAPES = "--shapes 48x8192 256x1024 48x512"
"""Sequences and tokens of vLLM's steps."""
POINTS_MODEL = "qwen2.5-coder-1.5b-instruct"
"""The model of docs/results/points.md."""
JUDGED = "int8_centered,kivi4,klt4,klt3,klt2"
"""Presets whose answers are judged."""
PROBLEMS = {
    "gsm8k": "gsm8k/test.jsonl",
    "gsm8k_train": "gsm8k/train.jsonl",
    "humaneval": "humaneval/HumanEval.jsonl",
}
"""Name of --data -> file below KVBITS_DATA."""
LEAST = 15
"""Seconds: less time than this starts nothing."""


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        argv: after "python"; {out} is the folder of results, {shared} the one above it, of results that no card changes,
            {disk} that of the environment.
        writes: files of the folder of results that it adds to.
        seconds: what it is expected to take where no run says so; `limit`: when it is killed.
        needs: modules.
        beside: the part that its ratios are over, measured in the same session.
    """

    name: str
    what: str
    argv: tuple[str, ...]
    writes: str
    seconds: int
    limit: int
    needs: tuple[str, ...] = ()
    beside: str | None = None

    @property
    def vllm(self) -> bool:
        return "vllm" in self.needs


@dataclass(frozen=True)
class Warm:
    """A process that compiles what parts need; `parts`: their names."""

    name: str
    argv: tuple[str, ...]
    parts: tuple[str, ...]
    needs: tuple[str, ...] = ()

    @property
    def vllm(self) -> bool:
        return "vllm" in self.needs


def bench(command: str, out: str | None = None) -> tuple[str, ...]:
    """Return the arguments of a benchmark: `command` is its name and options, separated by spaces."""
    script, *options = command.split()
    return (f"benchmarks/{script}.py", *options, *(("--out", f"{{out}}/{out}") if out else ()))


def part(name: str, what: str, command: str, out: str, seconds: int, limit: int) -> Part:
    """Make a part that times something outside vLLM; `command` is as in `bench`."""
    return Part(name, what, bench(command, out=out), out, seconds, limit)


def serving(
    what: str,
    suffix: str,
    commands: Mapping[str, str],
    seconds: int,
    limit: int,
    writes: str = "serve_vllm.json",
) -> list[Part]:
    """Make a part for each dtype that is timed through vLLM, beside the one of bf16."""
    return [
        Part(
            f"serve-{dtype}{suffix}",
            f"{what} through vLLM: {dtype}",
            bench(f"bench_serve_vllm {command} --kv-cache-dtype {dtype}", out=writes),
            writes,
            seconds,
            limit,
            ("vllm",),
            f"serve-bf16{suffix}",
        )
        for dtype, command in commands.items()
    ]


def parts(environment: Mapping[str, str]) -> list[Part]:
    """Return all of them: what README prints first, then kernels and Transformers, accuracy, vLLM, and answers."""
    return [*of_readme(), *in_one_process(), *accuracy(environment), *through_vllm(), *points(environment)]


def of_readme() -> list[Part]:
    """Return the tests, attention, tokens through Transformers, and vLLM's largest batches and steps."""
    presets, generated = " ".join(PRESETS), " ".join(GENERATED)
    tests = ("tests/run_gpu.py", "--out", "{out}/gpu_tests.json", "--", "-n", "14")
    largest = {d: f"decode --largest 8192 --max-batch {batch}" for d, batch in SERVED.items()}
    steps = dict.fromkeys(SERVED, f"decode --prefill {SHAPES}")
    return [
        Part("tests", "the tests that need a GPU", tests, "gpu_tests.json", 300, 570),
        part(
            "decode",
            "attention of README's presets in whole caches, beside cuDNN, FlashAttention-3 and FlashInfer",
            f"bench_decode_gpu {presets}",
            "attend_decode.json",
            200,
            450,
        ),
        part(
            "generate",
            "tokens through Transformers: the stock cache, 16 bits in a graph, presets in graphs",
            f"bench_generate_gpu {generated} --eager-rows int8_centered --shapes 0 2",
            "generate.json",
            220,
            450,
        ),
        *serving("the largest batch", "-largest", largest, 60, 200),
        *serving("step times behind prompts", "", steps, 90, 200),
    ]


def in_one_process() -> list[Part]:
    """Return what else is timed on kernels and through Transformers."""
    store = "bench_store --model llama-8b --prompt 16384 --chunk 4096 --stock --device cuda --threads 8"
    places = (("disk", "disk, cold and warm", "{disk}"), ("ram", "RAM disk", "/dev/shm"))
    paper = ("-m", "studies", "paper", "--out", "{out}/paper.json")
    return [
        part("close", "quantizing whole pages, and storing tokens", "bench_close_gpu", "close_pages.json", 120, 300),
        part(
            "chunks", "many queries over packed history", "bench_attend_gpu --prefill", "attend_prefill.json", 70, 180
        ),
        part("small", "where 16 bits are as fast", "bench_attend_gpu --small", "attend_small.json", 90, 200),
        *(
            part(
                f"store-{name}",
                f"a stored prompt of 16,384 tokens of an 8B model, from a {place}",
                f"{store} --schemes int8_centered,int4 --where {folder}/kvbits_store",
                "store.json",
                60,
                180,
            )
            for name, place, folder in places
        ),
        part("tiers", "tiers", "bench_attend_gpu --tiers", "attend_tiers.json", 45, 150),
        part(
            "prompts",
            "prompts through Transformers in chunks of 2,048 tokens",
            "bench_generate_gpu stock int8_centered kivi4 klt4 --prefill --shapes 0 --chunk 2048",
            "generate.json",
            70,
            200,
        ),
        part(
            "turns",
            "generate() from a prompt of 2,048 tokens",
            "bench_generate_gpu stock_flash int8_centered kivi4 --generate --modes eager graph"
            " --eager-rows int8_centered",
            "generate.json",
            80,
            200,
        ),
        part(
            "compiled",
            "a token's pass compiled and captured",
            "bench_generate_gpu fa3 int8_centered --modes compiled_graph --shapes 0 --filled",
            "generate.json",
            120,
            300,
        ),
        part(
            "decode-others",
            "attention of other presets in whole caches",
            "bench_decode_gpu int8 fp8 int8k_int4v kivi2 nuq4-1% --shapes 0 1 5",
            "attend_decode.json",
            90,
            240,
        ),
        Part("paper", "the INT8 paper's study", paper, "paper.json", 150, 400),
    ]


def through_vllm() -> list[Part]:
    """Return what else is timed through vLLM."""
    each = dict.fromkeys
    served = [d for d in SERVED if d != "fp8"]
    turns = "turns --users 16 32 64 128 --seconds 60"
    return [
        *serving(
            "a step with vLLM's default compilation",
            "-compiled",
            each(SERVED, "decode --prefill --shapes 48x8192 --compile"),
            90,
            240,
        ),
        *serving("time to first token", "-prompts", each(served, "prefill --prompts 8192 65536"), 60, 150),
        *serving("step times", "", each(STOCK, "decode --prefill --shapes 48x8192 48x512"), 75, 180),
        *serving(
            "what a step's time goes to",
            "-profile",
            each(PROFILED, f"decode {SHAPES} --profile"),
            60,
            150,
            "profile_vllm.json",
        ),
        *serving(
            "the highest rate within P99 limits",
            "-goodput",
            each(LOADED, "goodput --seconds 60 --within 0.15 --minutes 7"),
            330,
            600,
        ),
        *serving("long chats with prefix caching", "-turns", each(LOADED, turns), 400, 700),
    ]


def models(environment: Mapping[str, str]) -> dict[str, Path]:
    """Return name -> folder or file of the models that there are, small ones first."""
    folder = Path(environment.get("KVBITS_MODELS") or "/nonexistent")
    found = [p for p in folder.glob("*") if p.suffix == ".gguf" or (p / "config.json").is_file()]
    return {p.name.removesuffix(".gguf"): p for p in sorted(found, key=_nbytes)}


def _nbytes(model: Path) -> int:
    return sum(p.stat().st_size for p in ([model] if model.is_file() else model.iterdir()))


def evaluation(model: Path, options: str, folder: str, *files: str) -> tuple[str, ...]:
    """Return the arguments of `kvbits eval` on the GPU. `files`: options whose values may hold spaces."""
    return (
        "-m",
        "kvbits",
        "eval",
        str(model),
        "--device",
        "cuda",
        *options.split(),
        *files,
        "--out",
        folder,
    )


def accuracy(environment: Mapping[str, str]) -> list[Part]:
    """Return KL on each model: in chunks and token by token at 1,024 tokens, in a window of 8,192, and with equal tails.

    The long windows are in float16, whose rounding is an eighth of bfloat16's, and calibrated on the shipped novel. They
    take half a thousand passes a cache.
    """
    texts = environment.get("KVBITS_TEXTS")
    text = ("--text", f"{texts}/wiki.test.raw") if texts else ()
    both = (*text, "--calibration-text", f"{texts}/wiki.valid.tokens") if texts else ()
    schemes = f"--schemes {','.join(PRESETS)}"
    short = (
        f"--dtype bfloat16 {schemes} --tasks fidelity,decode --windows 4 --length 1024 --context 1024 --new-tokens 128"
    )
    tails = ("--device", "cuda", "--length", "8192", "--windows", "2")
    long = f"--dtype float16 {schemes} --windows 1 --length 8192"
    found = models(environment).items()
    return [
        *(
            Part(
                f"accuracy-{name}",
                f"{name}: KL in chunks of 16 and token by token, read packed on this GPU",
                evaluation(model, short, "{out}/eval", *both),
                f"eval/{name}",
                200,
                450,
            )
            for name, model in found
        ),
        *(
            Part(
                f"long-{name}",
                f"{name}: KL in a window of 8,192 tokens",
                evaluation(model, long, "{out}/eval-8192", *text),
                f"eval-8192/{name}-float16",
                260,
                500,
            )
            for name, model in found
        ),
        *(
            Part(
                f"tails-{name}",
                f"{name}: KL of formats and of other engines' recipes with 0, 128 and 512 raw newest tokens",
                ("benchmarks/study_tails.py", str(model), *tails, *text, "--out", f"{{shared}}/tails/{name}.json"),
                f"../tails/{name}.json",
                300,
                600,
            )
            for name, model in found
        ),
    ]


def points(environment: Mapping[str, str]) -> list[Part]:
    """Return the chains and the tasks with right answers of docs/results/points.md, on the model `POINTS_MODEL`.

    A chain is written token by token before it is read, so 16,384 tokens take minutes for any number of chains.
    """
    model, data = models(environment).get(POINTS_MODEL), environment.get("KVBITS_DATA")
    if model is None or data is None:
        return []
    book = ("--text", f"{data}/books/2600-0.txt")
    problems = [word for name, file in PROBLEMS.items() for word in ("--data", f"{name}={data}/{file}")]

    def judged(name: str, options: str, folder: str, seconds: int, *files: str) -> Part:
        argv = evaluation(model, f"--dtype float16 --schemes {JUDGED} {options}", f"{{shared}}/length/{folder}", *files)
        return Part(f"points-{name}", f"{POINTS_MODEL}: {name}", argv, f"../length/{folder}", seconds, 2 * seconds)

    chains = "--tasks replay --length 16384 --windows 32 --batch-size 32"
    ruler = "--tasks ruler --chunk 512"
    asked = ((4096, 4), (8192, 10), (16384, 10), (32000, 3))
    return [
        judged("tracking", "--tasks tracking --contexts 512,2048,8192 --repeats 50 --batch-size 50", "tracking", 600),
        judged(
            "copying",
            "--tasks copying --contexts 240,1000,4000,8000,16000,30000 --new-tokens 256 --repeats 42 --batch-size 42",
            "copying",
            600,
        ),
        *(
            judged(f"ruler-{n}", f"{ruler} --contexts {n} --repeats {repeats}", f"ruler-{n}", 300, *book)
            for n, repeats in asked
        ),
        judged("answers", "--tasks gsm8k,humaneval --batch-size 264", "answers", 500, *problems),
        judged("sampled", "--tasks gsm8k --draws 3 --batch-size 440", "sampled", 900, *problems),
        judged("chains", chains, "chains", 900, *problems),
    ]


def warms() -> list[Warm]:
    return [
        *(Warm(f"decode {p}", bench(f"bench_decode_gpu {p} --warm"), ("decode", "generate")) for p in PRESETS),
        *(
            Warm(
                f"generate {r}",
                bench(f"bench_generate_gpu {r} --warm --shapes 0 2"),
                ("generate", "store-ram", "store-disk", "prompts", "turns"),
                ("fa3_fwd_interface",) if r == "fa3" else (),
            )
            for r in GENERATED
            if r != "stock_flash"
        ),
        *(
            Warm(
                f"serve {d}",
                bench(f"bench_serve_vllm decode --kv-cache-dtype {d} --shapes 48x512 --warm"),
                (f"serve-{d}", f"serve-{d}-largest", f"serve-{d}-goodput", f"serve-{d}-turns", f"serve-{d}-profile"),
                ("vllm",),
            )
            for d in dict.fromkeys([*SERVED, *PROFILED])
        ),
        *(
            Warm(f"chunks {p}", bench(f"bench_attend_gpu --prefill --quick --schemes {p}"), ("chunks",))
            for p in ("raw", "int8_centered", "int4", "kivi4", "klt4", "klt2")
        ),
        Warm("close fp8", bench("bench_close_gpu --closing-only --quick --schemes fp8"), ("close",)),
    ]


@dataclass
class Machine:
    """Machine that parts run on; tests replace it."""

    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    clock: Callable[[], float] = time.monotonic
    record: Callable[[], dict[str, Any]] = run_files.this_run
    boot: str = ""

    def __post_init__(self) -> None:
        with contextlib.suppress(OSError):
            self.boot = self.boot or Path("/proc/sys/kernel/random/boot_id").read_text().strip()

    def run(self, argv: Sequence[str], environment: Mapping[str, str], limit: float, log: Path) -> int | None:
        """Run a command. Return the exit code, or None if the limit came first; `log` has what the command printed."""
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *argv],
                cwd=ROOT,
                env=dict(environment),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                return None

    def missing(self, needs: Sequence[str]) -> str | None:
        """Return the first of `needs` that is not installed, or None."""
        path = [
            *filter(None, [self.environment.get("KVBITS_VLLM_SITE"), self.environment.get("KVBITS_PEERS_SITE")]),
            *sys.path,
        ]
        return next((n for n in needs if PathFinder.find_spec(n, path) is None), None)


class Session:
    """One command: its folder, the state that is kept there, and the time it has."""

    def __init__(self, machine: Machine, out: Path, logs: Path, limit: float | None, retry: bool = False) -> None:
        self.machine, self.out, self.logs, self.retry = machine, out, logs, retry
        self.end = None if limit is None else machine.clock() + limit
        self.run = machine.record()
        self.gpu = (self.run["gpu"] or {}).get("name")
        self.state = run_files.read(out / STATE) if (out / STATE).exists() else {"runs": {}, "rows": []}
        self.name = next(
            (r["session"] for r in reversed(self.state["runs"].values()) if self._here(r)), self.run["session"]
        )
        self.run["session"] = self.name

    def _here(self, run: Mapping[str, Any]) -> bool:
        """Return whether a run was of this commit, on this machine since its start."""
        return run.get("facts", {}).get("boot") == self.machine.boot and self._alike(run)

    def _alike(self, run: Mapping[str, Any]) -> bool:
        """Return whether a run was of this commit, on such a GPU."""
        known = run["commit"] is not None and not run["dirty"] and not self.run["dirty"]
        return known and run["commit"] == self.run["commit"] and (run["gpu"] or {}).get("name") == self.gpu

    def left(self) -> float:
        return float("inf") if self.end is None else self.end - self.machine.clock()

    def last_seconds(self, part: Part) -> float | None:
        """Return how long the part took when it last ended well, on any machine, or None."""
        return next(
            (r["seconds"] for r in reversed(self.state["rows"]) if r["part"] == part.name and r["exit"] == 0), None
        )

    def done(self, part: Part, chosen: Sequence[Part]) -> bool:
        """Return whether the part need not run again.

        `chosen`: the parts that are asked for; one that others' ratios are over runs again where one of those must.
        """
        ended = [(r["part"], self.state["runs"][r["run"]]) for r in self.state["rows"] if r["exit"] == 0]
        alike = {(name, run["session"]) for name, run in ended if self._alike(run)}
        if (part.name, self.name) in alike and (part.beside in (None, part.name) or (part.beside, self.name) in alike):
            return True
        if part.beside == part.name:
            others = [
                p for p in chosen if p.beside == part.name and p is not part and self.machine.missing(p.needs) is None
            ]
            return part.name in {name for name, _ in alike} and all(self.done(p, chosen) for p in others)
        return any(
            name == part.name and (part.beside is None or (part.beside, session) in alike) for name, session in alike
        )

    def environment(self, vllm: bool) -> dict[str, str]:
        given = self.machine.environment
        site = given.get("KVBITS_VLLM_SITE" if vllm else "KVBITS_PEERS_SITE")
        path = os.pathsep.join(
            [
                *filter(None, [site]),
                str(ROOT / "src"),
                str(ROOT / "benchmarks"),
                *filter(None, [given.get("PYTHONPATH")]),
            ]
        )
        commit = (
            {"KVBITS_COMMIT": f"{self.run['commit']}{'-dirty' if self.run['dirty'] else ''}"}
            if self.run["commit"]
            else {}
        )
        return (
            given
            | commit
            | {
                "PYTHONPATH": path,
                "KVBITS_SESSION": self.name,
                "PYTHONUNBUFFERED": "1",
                "HF_HUB_OFFLINE": "1",
                "VLLM_USE_FLASHINFER_SAMPLER": "0",
                "VLLM_NO_USAGE_STATS": "1",
            }
        )

    def words(self, argv: Sequence[str]) -> list[str]:
        disk = self.machine.environment.get("KVBITS_DISK") or tempfile.gettempdir()
        return [w.format(out=self.out, shared=self.out.parent, disk=disk) if "{" in w else w for w in argv]

    def keep(self, part: str, code: int | None, seconds: float) -> None:
        row = {"part": part, "exit": code, "seconds": round(seconds, 1)}
        run = {key: value for key, value in self.run.items() if key != "facts"} | {"facts": {"boot": self.machine.boot}}
        self.state = {
            "runs": self.state["runs"] | {run["id"]: run},
            "rows": [*self.state["rows"], {"run": run["id"]} | row],
        }
        self.out.mkdir(parents=True, exist_ok=True)
        run_files.write(self.state, self.out / STATE)

    def measure(self, part: Part, chosen: Sequence[Part]) -> tuple[str, float]:
        """Measure a part. Return (what became of it, seconds)."""
        if self.done(part, chosen):
            return "done before", 0.0
        if (absent := self.machine.missing(part.needs)) is not None:
            return f"left out: no {absent}", 0.0
        if part.argv[0].endswith(".py") and not (ROOT / part.argv[0]).is_file():
            return f"left out: no {part.argv[0]}", 0.0
        if not self.retry and any(
            r["part"] == part.name and r["exit"] not in (0, None) and self._here(self.state["runs"][r["run"]])
            for r in self.state["rows"]
        ):
            return "failed before on this machine (--retry)", 0.0
        expected = self.last_seconds(part) or part.seconds
        if self.left() < max(LEAST, expected):
            return f"no time: {expected:.0f} s expected, {max(0, self.left()):.0f} s left", 0.0
        start = self.machine.clock()
        log = self.logs / f"{part.name}.log"
        code = self.machine.run(self.words(part.argv), self.environment(part.vllm), min(part.limit, self.left()), log)
        seconds = self.machine.clock() - start
        self.keep(part.name, code, seconds)
        if code == 0:
            return "done", seconds
        print(f"--- the end of {log}:\n{_end(log)}\n---", flush=True)
        return ("failed: killed at its limit" if code is None else f"failed: exit code {code}"), seconds

    def warm(self, wanted: Sequence[Part]) -> tuple[str, float]:
        """Compile for the parts that will run, once on a machine; what fails here fails where it is measured, and says
        why there.
        """
        kept = [r for r in self.state["rows"] if self._here(self.state["runs"][r["run"]])]
        before = {r["part"] for r in kept if r["part"].startswith("warm ")}
        needed = [
            w
            for w in warms()
            if any(p.name in w.parts for p in wanted)
            and f"warm {w.name}" not in before
            and self.machine.missing(w.needs) is None
        ]
        if not needed:
            return "nothing to compile", 0.0
        start, limit = self.machine.clock(), min(240.0, self.left())

        def one(job: Warm) -> int | None:
            log = self.logs / f"warm_{re.sub(r'[^A-Za-z0-9_]+', '_', job.name)}.log"
            return self.machine.run(
                self.words(job.argv), self.environment(job.vllm), max(1.0, limit - (self.machine.clock() - start)), log
            )

        with ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as pool:
            codes = list(pool.map(one, needed))
        seconds = self.machine.clock() - start
        for job, code in zip(needed, codes, strict=True):
            self.keep(f"warm {job.name}", code, seconds)
        bad = [job.name for job, code in zip(needed, codes, strict=True) if code != 0]
        return (
            f"{len(needed) - len(bad)} of {len(needed)} processes" + (f"; not {', '.join(bad)}" if bad else ""),
            seconds,
        )


def _end(log: Path) -> str:
    """Return the last lines of a log, without lines of JSON."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(line[:300] for line in lines[-25:] if not line.startswith('{"runs"'))


def table(lines: Sequence[tuple[str, str, str, str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[3]]) for line in lines
    )


def listing(session: Session, chosen: Sequence[Part]) -> str:
    """List what would run, and how long each part took last time."""
    lines = [("part", "took", "state", "what")]
    for p in chosen:
        last, absent = session.last_seconds(p), session.machine.missing(p.needs)
        took = f"{last:.0f} s" if last is not None else f"({p.seconds} s)"
        state = "done" if session.done(p, chosen) else f"no {absent}" if absent else "to run"
        lines.append((p.name, took, state, f"{p.what} -> {p.writes}"))
    to_run = [
        session.last_seconds(p) or p.seconds for p, line in zip(chosen, lines[1:], strict=True) if line[2] == "to run"
    ]
    return f"{table(lines)}\n{len(to_run)} parts to run, {sum(to_run) / 60:.0f} minutes; times in brackets are guesses"


def take(source: Path, out: Path) -> None:
    """Add the runs of every file of rows below `source`, as all_gpu.py wrote it on another machine, to the same file
    below `out`; other files are copied.
    """
    for path in sorted(p for p in source.rglob("*.json") if p.is_file()):
        to = out / path.relative_to(source)
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            theirs = run_files.read(path)
        except Exception:  # a file of another kind, such as those of `kvbits eval`: one run each
            to.write_bytes(path.read_bytes())
            print(f"copied {to}")
            continue
        ours = run_files.read(to) if to.exists() else {"runs": {}}
        fresh = theirs["runs"].keys() - ours["runs"].keys()
        sections = [name for name in dict.fromkeys([*ours, *theirs]) if name != "runs"]
        whole = {
            name: [*ours.get(name, []), *(r for r in theirs.get(name, []) if r["run"] in fresh)] for name in sections
        }
        run_files.write({"runs": ours["runs"] | {k: v for k, v in theirs["runs"].items() if k in fresh}} | whole, to)
        print(f"{to}: {len(fresh)} runs more")


def main(argv: Sequence[str] | None = None, machine: Machine | None = None) -> int:
    machine = machine or Machine()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts by name, also with wildcards: 'serve-*'")
    parser.add_argument("--skip", nargs="+", metavar="NAME", default=[])
    parser.add_argument("--limit", type=float, metavar="MINUTES", help="of the whole command")
    parser.add_argument(
        "--retry", action="store_true", help="run parts again that failed at this commit on this machine"
    )
    parser.add_argument("--out", type=Path, help="folder of results; benchmarks/results/<gpu> if not given")
    parser.add_argument("--logs", type=Path, help="folder of what the parts print; one of temporary files if not given")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--take", type=Path, metavar="DIR")
    args = parser.parse_args(argv)
    record = machine.record()
    name = (record["gpu"] or {"name": "nvidia-h200"})["name"]
    out = (args.out or ROOT / "benchmarks" / "results" / re.sub(r"[^a-z0-9]+", "-", name.lower())).resolve()
    if args.take:
        take(args.take, out)
        return 0
    every = parts(machine.environment)
    unknown = [n for n in [*(args.only or []), *args.skip] if not any(fnmatchcase(p.name, n) for p in every)]
    if unknown:
        parser.error(
            f"no part is called {', '.join(unknown)}; parts: {', '.join(p.name for p in every)}. Accuracy needs"
            f" KVBITS_MODELS, and points-.. need KVBITS_DATA, too, and {POINTS_MODEL} among the models"
        )
    chosen = [
        p
        for p in every
        if any(fnmatchcase(p.name, n) for n in args.only or ["*"])
        and not any(fnmatchcase(p.name, n) for n in args.skip)
    ]
    session = Session(
        machine,
        out,
        args.logs or Path(tempfile.gettempdir()) / "kvbits_all_gpu",
        None if args.limit is None else 60 * args.limit,
        args.retry,
    )
    if args.list:
        print(listing(session, chosen))
        return 0
    if record["gpu"] is None:
        print("no NVIDIA GPU here (nvidia-smi lists none); --list works without", file=sys.stderr)
        return 2
    session.logs.mkdir(parents=True, exist_ok=True)
    lines = [("part", "seconds", "result", "writes")]
    warmed, seconds = session.warm([p for p in chosen if not session.done(p, chosen)])
    lines.append(("(compiling)", f"{seconds:.0f}", warmed, ""))
    print(f"compiling: {warmed}, {seconds:.0f} s", flush=True)
    for part in chosen:
        result, seconds = session.measure(part, chosen)
        lines.append((part.name, f"{seconds:.0f}", result, part.writes))
        print(f"{part.name}: {result}, {seconds:.0f} s", flush=True)
    print(table(lines))
    results = [line[2] for line in lines[2:]]
    return (
        1 if any(r.startswith("failed") for r in results) else 3 if any(r.startswith("no time") for r in results) else 0
    )


if __name__ == "__main__":
    with contextlib.suppress(io.UnsupportedOperation):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    raise SystemExit(main())
