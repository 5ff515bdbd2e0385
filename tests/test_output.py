"""Commands end without a trace whatever state their output is in, and tables cut no name and no number."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from nightly import at_night

from kvbits import planner
from kvbits.cli import output
from kvbits.cli.common import new_table
from kvbits.planner import plan, uniform

KVBITS = [sys.executable, "-m", "kvbits"]
NAMES = ("\u6a21\u578b[/b]", "\u0645\u0648\u062f\u0644", "na\u00efve", ":smile:", "a" * 90, os.fsdecode(b"\xff\xfe"))
QUICK = (
    ["plan", "--layers", "4", "--kv-heads", "2", "--head-dim", "128", "--memory", "1GB"],
    ["plan", "--help"],
    ["fit", "--layers"],
)
COMMANDS = ("check", "calibrate", "report")
"""Commands that are given a name, besides plan; the first two import torch, which takes seconds."""


def run(args, encoding="utf-8", columns=80, out=subprocess.PIPE, err=subprocess.PIPE, **more):
    env = os.environ | {"PYTHONIOENCODING": encoding, "COLUMNS": str(columns), "HF_HUB_OFFLINE": "1"} | more
    return subprocess.run([*KVBITS, *args], stdout=out, stderr=err, env=env, timeout=300, check=False)


def refused(command, name, encoding):
    done = run([command, name], encoding)
    read = "utf-8" if encoding == "idna" else encoding  # which replaces nothing
    said = (done.stdout + done.stderr).decode(read, "strict" if encoding != "utf-16" else "replace")
    assert done.returncode == 2 and "Traceback" not in said and "error" in said, (name, command, said)


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "utf-8", *at_night("latin-1", "utf-16", "gb18030", "idna")])
def test_characters_that_the_encoding_lacks_are_replaced(encoding):
    for name in (*NAMES[:2], "a" * 96 + "b") if encoding in ("cp1252", "utf-8") else NAMES[2:4]:
        refused("plan", name, encoding)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_refuses_a_name_in_any_script(command):
    refused(command, NAMES[0], "ascii")


def test_a_model_of_any_name_is_planned(tmp_path):
    for name in NAMES[:2]:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
        done = run(["plan", str(tmp_path / name)], "ascii", 40)
        assert done.returncode == 0 and b"klt4" in done.stdout and done.stdout.isascii(), done.stderr
        whole = run(["plan", str(tmp_path / name), "--json"], "ascii")
        assert json.loads(whole.stdout)["model"] == str(tmp_path / name)


@pytest.mark.parametrize("args", QUICK, ids=" ".join)
def test_outputs_that_are_closed_full_or_left_end_without_a_trace(args):
    reader, writer = os.pipe()
    os.close(reader)
    left = run(args, out=writer)
    os.close(writer)
    with open("/dev/full", "wb") as full:
        filled, deaf = run(args, out=full), run(args, err=full)
    command = " ".join(map(str, [*KVBITS, *args]))
    shut = [
        subprocess.run(["sh", "-c", f"{command} {how}"], capture_output=True, timeout=300, check=False)
        for how in (">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-")
    ]
    for done in (left, filled, deaf, *shut):
        assert b"Traceback" not in (done.stderr or b"") and b"Exception ignored" not in (done.stderr or b""), (
            done.stderr
        )
        assert done.returncode in (0, 2, output.PIPE_CLOSED), done
    if args[0] != "fit":
        assert (left.returncode, filled.returncode) == (output.PIPE_CLOSED, output.NOT_WRITTEN)


def numbers(text):
    return re.findall(r"\d[\d,.]*", text)


@pytest.mark.parametrize("columns", [20, 80, 300])
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_no_name_and_no_number_is_cut(columns, engine):
    schemes = planner.VLLM_SHOWN if engine == "vllm" else planner.GROUPS["all"]
    args = ["plan", "--layers", "4", "--kv-heads", "2", "--head-dim", "128", "--memory", "1GB", "--engine", engine]
    done = run([*args, "--scheme", "all"], columns=columns, TERM="dumb")
    text = done.stdout.decode()
    words = set(text.replace("\u2502", " ").split())
    assert done.returncode == 0 and set(schemes) <= words and "\u2026" not in text
    found = plan(uniform(4, 2, 128), list(planner.SHOWN) if engine != "vllm" else list(schemes), engine=engine)
    assert {f"{r.bytes_per_token:,.0f}" for r in found.rows} <= words
    longest = max(len(w) for w in words)
    assert all(len(line) <= max(columns, longest + 30) for line in text.splitlines())


def test_a_table_that_fits_is_drawn_and_another_becomes_lines():
    table = new_table("[/x] \u6a21\u578b", "name", "bytes", "why")
    table.add_row("kvbits_int8_centered", "1,234,567,890", "some words that may be broken")
    wide, narrow = output.lines_of(table, 80), output.lines_of(table, 30)
    assert wide[0] == "[/x] \u6a21\u578b" and any("kvbits_int8_centered" in x and "1,234,567,890" in x for x in wide)
    assert "kvbits_int8_centered" in narrow and "  bytes: 1,234,567,890" in narrow


def test_a_table_as_wide_as_its_place_keeps_its_edge_and_every_cell():
    cells = [
        ("cache", "int8_centered"),
        ("memory", "24.31MB"),
        ("perplexity", "22.34"),
        ("KL, nats", "0.0000"),
        ("top token", "99.2%"),
    ]
    table = new_table("", *(heading for heading, _ in cells))
    table.add_row(*(cell for _, cell in cells))
    natural = max(map(len, output.lines_of(table, 200)))
    drawn = 0
    for columns in range(40, natural + 2):
        lines = output.lines_of(table, columns)
        drawn += lines[-1].startswith("└")
        assert lines[-1][-1] == "┘" or not lines[-1].startswith("└"), f"{columns} columns cut the table"
        assert all(any(cell in line for line in lines) for _, cell in cells)
    assert drawn > 3, "headings that are two words can be broken, so the table fits less than its natural width"
