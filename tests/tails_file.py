"""Results of benchmarks/study_tails.py for tests of what is made of them."""

import json

from kvbits.runs import FIELDS

RUNS = {
    name: dict.fromkeys(FIELDS)
    | {"id": name, "session": name, "utc": f"2027-01-0{day}T00:00:00Z", "commit": "0123abcdef", "dirty": False}
    for day, name in enumerate(("r1", "r2"), 1)
}


def tails_of(folder, rows, length=8192, model="qwen2.5-coder-1.5b-instruct"):
    """A file of study_tails.py below `folder`, as if by runs r1 and the newer r2: rows of (run, format, tail, bits, KL)."""
    facts = {"model": model, "length": length, "text": "wiki.test"}
    found = [
        {"run": run, "format": name, "tail": tail, "kind": "simulated" if "nv" in name else "kvbits", "held_bits": bits}
        | {"kl_mean": kl, "kl_median": kl / 4, "kl_p999": kl * 50, "top1_agreement": 0.98, "dp_rms": 0.0123}
        for run, name, tail, bits, kl in rows
    ]
    (folder / "tails").mkdir(exist_ok=True)
    known = {name: run | {"facts": facts} for name, run in RUNS.items()}
    (folder / "tails" / f"{model}-{length}.json").write_text(json.dumps({"runs": known, "rows": found}))
