"""Once: give every committed result row the record of a run that git history supports. No figure changes.

    python benchmarks/migrate_results.py

A row's run is the commit that brought it: the first in whose version of the file it stands as it does now, but for digits that were cut later. Its id is
"before-records-COMMIT", its time that of the commit; its command is the one recorded with it, null where it is not known which of several it was. What else is
not known is null. Files that are not of this format and not in history (results not committed yet) take the facts of their own "environment".
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import result_file
from trim_results import trimmed

from kvbits import runs
from kvbits.evaluate.results import dumps

ROOT = Path(__file__).parents[1]
FOLDER = "benchmarks/results"
WEIGHTS = {
    "smollm2-135m-instruct": ("HuggingFaceTB/SmolLM2-135M-Instruct", "GGUF Q4_1, embeddings Q8_0, dequantized to"),
    "qwen2.5-coder-0.5b-instruct": ("Qwen/Qwen2.5-Coder-0.5B-Instruct", "GGUF Q4_K_M mix, dequantized to"),
    "qwen2.5-coder-1.5b-instruct": ("Qwen/Qwen2.5-Coder-1.5B-Instruct", "GGUF Q4_K_M, dequantized to"),
    "gemma3-270m": ("google/gemma-3-270m", "base model, GGUF Q4_K_M, dequantized to"),
}


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout


def history() -> tuple[dict[str, list[tuple[str, str, str]]], dict[str, str]]:
    """(path -> [(time, commit, blob)] oldest first, new path -> old path)."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    renamed = {}
    when = commit = ""
    for line in git("log", "-m", "--format=@%ct %H", "--raw", "--no-abbrev", "-M90", "--", FOLDER).splitlines():
        if line.startswith("@"):
            seconds, commit = line[1:].split()
            when = datetime.fromtimestamp(int(seconds), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        elif line.startswith(":"):
            facts, *paths = line.split("\t")
            if not facts.split()[4].startswith("D"):
                found.setdefault(paths[-1], []).append((when, commit, facts.split()[3]))
            if len(paths) > 1:
                renamed[paths[1]] = paths[0]
    return {p: sorted(v) for p, v in found.items()}, renamed


_blobs: dict[str, Any] = {}
_cat = subprocess.Popen(["git", "-C", str(ROOT), "cat-file", "--batch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def blob(name: str) -> Any:
    if name not in _blobs:
        _cat.stdin.write(f"{name}\n".encode())
        _cat.stdin.flush()
        size = int(_cat.stdout.readline().split()[2])
        text = _cat.stdout.read(size + 1)
        try:
            _blobs[name] = json.loads(text)
        except ValueError:
            _blobs[name] = None
    return _blobs[name]


SKIPPED = {"kl_histogram", "seconds", "base_seconds", "num_timed", "run", "completion", "isolation", "statistics", "weights"}


def same(ours: Any, theirs: Any, skipped: set[str], digits: float) -> bool:
    """Equal but for cut digits, and for what was dropped."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        shared = [k for k in ours if k in theirs and k not in skipped and not (k == "tokens" and isinstance(theirs[k], list) != isinstance(ours[k], list))]
        return len(shared) >= 0.6 * len([k for k in ours if k not in skipped]) and all(same(ours[k], theirs[k], skipped, digits) for k in shared)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(same(a, b, skipped, digits) for a, b in zip(ours, theirs, strict=True))
    if isinstance(ours, bool) or isinstance(theirs, bool) or not isinstance(ours, int | float) or not isinstance(theirs, int | float):
        return ours == theirs
    return ours == theirs or math.isclose(ours, theirs, rel_tol=digits, abs_tol=1e-9)


def parts(path: str, data: dict[str, Any]) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """(facts of the run, sections of rows) of an old result file."""
    d = dict(data)
    sections: dict[str, list[dict[str, Any]]] = {}
    if "shapes" in d:  # bench_attend_cpu.py
        d.pop("ratio_vs_torch16", None)
        d.pop("share_of_read_bandwidth", None)
        rows = []
        for shape, s in d.pop("shapes").items():
            for name, seconds in s["decode_s"].items():
                row = {"shape": shape, "name": name, "decode_s": seconds}
                for field in (
                    "ratio_vs_torch16",
                    "ratio_vs_torch16_huge_pages",
                    "share_of_read_bandwidth",
                    "ratio_vs_llama",
                    "threads_vs_one",
                    "processes_vs_one",
                ):
                    if s.get(field, {}).get(name):
                        row[field] = s[field][name]
                rows.append(row)
            sections.setdefault("reads", []).append({"shape": shape, "bytes_per_s": s["read_bytes_per_s"]})
        sections = {"rows": rows} | sections
    elif "input_bytes_per_s" in d:  # bench_quantize_cpu.py
        ratios, outer = d.pop("ratio_vs_row_order"), d.pop("ratio_vs_column_outer", None)
        sections["rows"] = [
            {"name": n, "input_bytes_per_s": r}
            | ({"ratio_vs_row_order": ratios[n]} if n in ratios else {})
            | ({"ratio_vs_column_outer": outer} if n == "per_channel" else {})
            for n, r in d.pop("input_bytes_per_s").items()
        ]
        sections["append"] = [{"backend": n, "us": t} for n, t in d.pop("append_us").items()]
        d["matrix"] = [d.pop("rows"), d.pop("columns")]
    elif "tables" in d:  # study_kvquant.py
        sections["rows"] = [{"text": t["text"]} | row for t in d.pop("tables") for row in t["rows"]]
    elif "texts" in d and isinstance(d["texts"], dict):  # kvbits demo
        sections = {"rows": d.pop("rows"), "texts": [d.pop("texts")]}
    else:
        sections["rows"] = d.pop("rows")
        for name in ("peers", "append", "errors", "store_tokens"):
            if isinstance(d.get(name), list):
                sections[name] = d.pop(name)
        if isinstance(d.get("slower_up_to_bytes_16_bit"), dict):
            d.pop("slower_up_to_bytes_16_bit")  # made of the rows
    if path.endswith(
        ("attend_small.json", "close_pages.json")
    ):  # there these names were formats with scales for 64 numbers, not the presets that have them now
        for row in sections["rows"]:
            if row["scheme"] in ("int8", "int4", "int2"):
                row["scheme"] += "_g64"
    return d, sections


def commands(data: dict[str, Any] | None) -> list[str]:
    found = [] if data is None else data.get("command", data.get("commands"))
    return [found] if isinstance(found, str) else found or []


def record(name: str, when: str | None, commit: str | None, typed: str | None, versions: dict[str, str], facts: dict[str, Any]) -> dict[str, Any]:
    argv = None
    if typed:
        try:
            argv = shlex.split(typed)
        except ValueError:
            argv = typed.split()
    unknown = dict.fromkeys(runs.FIELDS)
    return unknown | {"id": name, "session": name, "utc": when, "commit": commit, "argv": argv, "versions": versions, "reconstructed": True} | facts


def versions_of(facts: dict[str, Any]) -> dict[str, str]:
    return {n: facts.pop(n) for n in ("python", "kvbits", "torch", "transformers", "vllm") if isinstance(facts.get(n), str)}


def run_id(commit: str | None) -> str:
    return f"before-records-{commit[:8] if commit else 'none'}"


def migrate_eval(path: Path, data: dict[str, Any], versions: list[tuple[str, str, str]]) -> dict[str, Any]:
    made: dict[str, dict[str, Any]] = {}
    items = {}
    loaded = [(when, commit, blob(b)) for when, commit, b in versions]
    for key, item in data["items"].items():
        source = next(((w, c, d) for w, c, d in loaded if d and same(item, d["items"].get(key), SKIPPED, 1e-3)), None)
        if source is None:
            assert not loaded, (path, key)
            source = (f"{data['environment']['date']}T00:00:00Z", None, data)
        when, commit, then = source
        name = run_id(commit)
        if name not in made:
            e = dict(then["environment"])
            typed, seconds = e.pop("command", None), e.pop("seconds", None)
            e.pop("date", None)
            found = versions_of(e)
            made[name] = record(
                name, when, commit, typed, found, {"device": e.pop("device", None), "threads": e.pop("threads", None), "seconds": seconds or None} | e
            )
        items[key] = {"run": name} | item
    model = dict(data["model"])
    if model["name"] in WEIGHTS and "weights" not in model:
        source, how = WEIGHTS[model["name"]]
        model["weights"] = {"source": source, "format": f"{how} {model['dtype']}"}
    new = {k: v for k, v in data.items() if k not in ("environment", "items", "summary")} | {"version": 2, "model": model}
    return new | {"runs": dict(sorted(made.items(), key=lambda kv: kv[1]["utc"])), "items": items, "summary": data["summary"]}


def migrate_rows(path: Path, name: str, data: dict[str, Any], versions: list[tuple[str, str, str]]) -> dict[str, Any]:
    loaded = []
    for when, commit, b in versions:
        try:
            loaded.append((when, commit, blob(b), parts(name, json.loads(json.dumps(blob(b))))[1]))
        except (KeyError, TypeError, AttributeError):
            continue  # an earlier format of this file
    _, sections = parts(name, data)
    made: dict[str, dict[str, Any]] = {}
    new: dict[str, list[dict[str, Any]]] = {}
    for section, rows in sections.items():
        for row in rows:
            at = next((i for i, (*_, s) in enumerate(loaded) if any(same(row, r, set(), 5e-5) for r in s.get(section, []))), None)
            if at is None:
                assert not loaded, (path, section, row)
                when, commit, then, before = None, None, data, []
            else:
                when, commit, then, _ = loaded[at]
                before = commands(loaded[at - 1][2]) if at else []
            key = run_id(commit)
            if key not in made:
                typed = [c for c in commands(then) if c not in before]
                known = {k: v for k, v in parts(name, json.loads(json.dumps(then)))[0].items() if k not in ("command", "commands")}
                found = versions_of(known)
                made[key] = record(key, when, commit, typed[0] if len(typed) == 1 else None, found, {"facts": known})
                if len(typed) > 1:
                    made[key]["commands"] = typed
            new.setdefault(section, []).append({"run": key} | row)
    return {"runs": dict(sorted(made.items(), key=lambda kv: kv[1]["utc"] or ""))} | new


def main() -> None:
    past, renamed = history()
    count = {"eval": 0, "rows": 0, "new": 0}
    for path in sorted((ROOT / FOLDER).rglob("*.json")):
        name = str(path.relative_to(ROOT))
        data = json.loads(path.read_text())
        if data.get("runs") or data.get("format") == "kvbits-calibration":
            count["new"] += 1
            continue
        versions = past.get(name, []) if name not in renamed else sorted([*past.get(renamed[name], []), *past.get(name, [])])
        partial = path.with_suffix(".tmp")
        if data.get("format") == "kvbits-eval":
            partial.write_text(dumps(trimmed(migrate_eval(path, data, versions))) + "\n")
            os.replace(partial, path)
            count["eval"] += 1
        else:
            result_file.write(migrate_rows(path, name, data, versions), path)
            count["rows"] += 1
        left = runs.problems({k: v for k, v in json.loads(path.read_text()).items() if k in ("runs", "rows", "items", "peers", "errors", "append")})
        assert not left, (path, left[:3])
    print(json.dumps(count), file=sys.stderr)


if __name__ == "__main__":
    main()
