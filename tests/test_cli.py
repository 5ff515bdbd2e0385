"""Each command prints one table, or exactly one JSON object; errors are one line and exit code 2; light commands load
no torch.
"""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
import types
from functools import partial
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import kvbits
from kvbits import planner, schemes
from kvbits.cli import app
from kvbits.errors import DataError
from kvbits.integrations.engine.served import WIDEST
from kvbits.planner import uniform
from kvbits.spec import CacheSpec, LayerGeometry

GEOMETRY = ["--layers", "4", "--kv-heads", "2", "--head-dim", "64"]
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def run(*args, code=0):
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def run_json(*args):
    result = run(*args, "--json")
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def error(*args):
    """The one line an error prints."""
    result = run(*args, code=2)
    assert result.stdout == "" and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr


def test_ram_holds_the_weights_the_reserve_and_the_cache():
    found = run_json("plan", *GEOMETRY, "--ram", "16GB", "--weights", "1GB", "--reserve", "2GB")
    assert found["memory_bytes"] == 13 * 10**9
    assert "--weights" in error("plan", *GEOMETRY, "--ram", "16GB")
    for other in (("--gpu-memory", "H100"), ("--memory", "1GB"), ("--gpus", "2")):
        assert other[0] in error("plan", *GEOMETRY, "--weights", "1GB", "--ram", "16GB", *other)


def test_a_format_of_vllm_is_told_from_a_preset():
    assert "add --engine vllm, or take klt4" in error("plan", *GEOMETRY, "--scheme", "kvbits_klt4")
    for name in set(planner.VLLM_SHOWN) & schemes.PRESETS.keys():  # fp8 is both
        assert [r["scheme"] for r in run_json("plan", *GEOMETRY, "--scheme", name)["rows"]] == [name]


def test_counts_that_no_machine_has_are_refused():
    for option in ("--gpus", "--batch-size"):
        for count in ("0", "-1", "9" * 30, "1.5", "nan"):
            assert option in error("plan", *GEOMETRY, option, count)


def test_kernels_are_compiled_ahead_for_cards_by_name():
    from kvbits.cli.warm import _capabilities

    assert _capabilities("h100,A100-80GB,sm_89,12.0") == [(9, 0), (8, 0), (8, 9), (12, 0)]
    for name in ("V100", "sm_70", "h1000", "90a"):
        with pytest.raises(kvbits.KvbitsError, match=name):
            _capabilities(name)


# -- help and imports -----------------------------------------------------------------------------------------------


def test_help_lists_every_command():
    text = run("--help").stdout
    commands = ["bench", "calibrate", "check", "demo", "eval", "fit", "info", "plan", "report", "schemes", "warm"]
    assert sorted(typer.main.get_command(app).commands) == commands
    for command in commands:
        assert command in text
        assert "--json" in run(command, "--help").stdout


def test_version():
    import kvbits

    assert run("--version").stdout.strip() == kvbits.__version__


def test_unknown_options_and_commands_are_one_line():
    assert "No such option: --nonsense; see `kvbits plan --help`" in error("plan", "--nonsense")
    assert "No such option: --nonsense; see `kvbits --help`" in error("--nonsense")
    assert "No such command 'nonsense'" in error("nonsense")
    assert "missing argument 'model'; see `kvbits check --help`" in error("check").lower()


def test_python_m_kvbits_without_torch():
    command = [sys.executable, "-X", "importtime", "-m", "kvbits", "plan", *GEOMETRY, "--scheme", "int8", "--json"]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(out.stdout)["rows"][0]["scheme"] == "int8"
    loaded = {line.split("|")[-1].strip().split(".")[0] for line in out.stderr.splitlines()}
    assert "kvbits" in loaded and not loaded & {"torch", "transformers", "numpy"}


def test_an_error_from_a_real_process_is_one_line():
    out = subprocess.run([sys.executable, "-m", "kvbits", "plan"], capture_output=True, text=True)
    assert (
        (out.returncode, out.stdout) == (2, "")
        and out.stderr.count("\n") == 1
        and out.stderr.startswith("error: give MODEL")
    )


def test_a_missing_optional_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "this needs huggingface_hub, which is not installed; run `pip install huggingface_hub`" in error(
        "plan", "some-model"
    )


@pytest.mark.parametrize(
    "command", [["plan"], ["check"], ["calibrate", "--out", "x"], ["eval", "--out", "x"], ["demo", "--model"]]
)
def test_a_path_without_a_model_is_refused_before_torch_is_imported(command):
    code = (
        f"import sys\nfrom kvbits.cli import main\nsys.argv[1:] = {[*command, './no/such']!r}\ntry:\n   "
        " main()\nfinally:\n    assert 'torch' not in sys.modules"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (out.returncode, out.stdout) == (2, "") and out.stderr.startswith(
        "error: no such file or directory: './no/such'"
    ), out.stderr


# -- plan -----------------------------------------------------------------------------------------------------------


def test_plan_rows_are_the_specs_bytes():
    data = run_json(
        "plan",
        *GEOMETRY,
        "--context",
        1000,
        "--batch-size",
        3,
        "--schemes",
        "fp32,int8,kivi2",
        "--memory",
        "1GB",
        "--sinks",
        4,
    )
    assert [r["scheme"] for r in data["rows"]] == ["fp32", "int8", "kivi2"]
    assert (data["context"], data["batch"], data["memory_bytes"]) == (1000, 3, 10**9)
    layers = uniform(4, 2, 64)
    for r in data["rows"][1:]:
        spec = CacheSpec(scheme=schemes.get(r["scheme"], num_sink_tokens=4), layers=layers)
        assert r["total_bytes"] == spec.nbytes(1000, 3)
        assert r["memory_reduction"] == spec.raw_nbytes(1000, 3) / r["total_bytes"]
        assert r["max_batch"] == 10**9 // spec.nbytes(1000)
        assert spec.nbytes(r["max_context"], 3) <= 10**9 < spec.nbytes(r["max_context"] + 1, 3)


def test_plan_takes_every_scheme_and_option():
    data = run_json(
        "plan",
        *GEOMETRY,
        "--sliding-window",
        256,
        "--residual",
        128,
        "--page-size",
        32,
        "--raw-dtype",
        "float32",
        "--memory",
        "2GiB",
        "--scheme",
        "all",
    )
    assert [r["scheme"] for r in data["rows"]] == schemes.expand(["all"], planner.GROUPS)
    assert all(r["unbounded"] and r["max_context"] is None for r in data["rows"])
    assert data["layers"] == [
        {"count": 4, "num_kv_heads": 2, "head_dim": 64, "value_head_dim": 64, "sliding_window": 256}
    ]


def test_plan_prints_a_table_with_its_units():
    text = run("plan", *GEOMETRY, "--scheme", "bf16,int4", "--memory", "10MB").stdout
    assert (
        "bf16" in text
        and "int4" in text
        and "10.00 MB for the cache alone: weights and activations are not in it" in text
        and "GB is 10**9 bytes" in text
    )


def test_plan_lists_the_recommended_schemes_if_none_is_named():
    text = run("plan", *GEOMETRY).stdout
    assert f"--scheme all lists all {len(schemes.PRESETS) + 3}" in text and "int8_per_token" not in text
    assert [r["scheme"] for r in run_json("plan", *GEOMETRY)["rows"]] == list(planner.SHOWN)
    assert "Calibrated when first used, or ahead with `kvbits calibrate`: klt4, klt3." in " ".join(
        run("plan", *GEOMETRY).output.split()
    )
    assert "Calibrated when first used" not in run("plan", *GEOMETRY, "--scheme", "int8,kivi4").output
    mixed = " ".join(run("plan", *GEOMETRY, "--scheme", "klt4,nuq4").output.split())
    assert "`kvbits calibrate`: klt4. Want the file of `kvbits calibrate --scheme NAME --out FILE`: nuq4." in mixed
    assert "--scheme all" not in run("plan", *GEOMETRY, "--scheme", "int8").stdout


def test_plan_reads_a_model_directory(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.Gemma2Config(**SIZES, head_dim=16, sliding_window=32, max_position_embeddings=500).save_pretrained(
        tmp_path
    )
    data = run_json("plan", tmp_path, "--scheme", "int8", "--memory", "1GB")
    assert data["model_max_context"] == 500 and [k["sliding_window"] for k in data["layers"]] == [32, None]
    text = run("plan", tmp_path, "--scheme", "int8", "--memory", "1GB").stdout
    assert max(r["max_context"] for r in data["rows"]) == 500 and "4,096 tokens are more than the 500" in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give MODEL, or --layers, --kv-heads and --head-dim"),
        (["--layers", 2], "missing: --kv-heads, --head-dim"),
        (["/no/such/model"], "no such file or directory: '/no/such/model'"),
        (["model", "--layers", 2], "already says what --layers says"),
        (
            [*GEOMETRY, "--scheme", "int5"],
            "unknown scheme 'int5'; did you mean int8 or int4? known: all, core, literature, fp32",
        ),
        ([*GEOMETRY, "--scheme", "KIVI-4"], "unknown scheme 'KIVI-4'; did you mean kivi4 or kivi2?"),
        ([*GEOMETRY, "--scheme", "zzz"], "unknown scheme 'zzz'; known: all"),
        (
            [*GEOMETRY, "--scheme", "none.json"],
            "cannot read a scheme from none.json: No such file or directory; a file is written by Path",
        ),
        (
            [*GEOMETRY, "--context", "9999999999999"],
            "context=9,999,999,999,999 is more than the 2,147,483,647 tokens that a cache holds of one sequence",
        ),
        ([*GEOMETRY, "--raw-dtype", "bf17"], "unknown --raw-dtype 'bf17'; did you mean bf16? known: bf16, fp16, fp32"),
        ([*GEOMETRY, "--scheme", " , "], "--schemes ' , ' names nothing"),
        ([*GEOMETRY, "--memory", "24G"], "--memory '24G' is not understood; write it with its unit, like 24GB"),
        ([*GEOMETRY, "--memory", "24"], "--memory '24' is not understood; write it with its unit"),
        ([*GEOMETRY, "--memory", "24Gb"], "--memory '24Gb': Gb are bits; write GB for bytes"),
        ([*GEOMETRY, "--memory", "-1GB"], "above 0"),
        ([*GEOMETRY, "--gpu-memory", "80", "--weights", "16GB"], "--gpu-memory '80' is not understood"),
        ([*GEOMETRY, "--gpu-memory", "80GB", "--weights", "16"], "--weights '16' is not understood"),
        (
            [*GEOMETRY, "--gpu-memory", "80GB"],
            "--layers does not say how many bytes they take; give --weights, like --weights 16GB",
        ),
        (
            [*GEOMETRY, "--gpu-memory", "80GB", "--weights", "1GB", "--memory", "1GB"],
            "--memory is for the cache alone, --gpu-memory holds weights",
        ),
        (
            [*GEOMETRY, "--gpu-memory", "80000MB", "--weights", "79GB"],
            "80.00 GB of a GPU hold 79.00 GB of weights and a reserve of 9.60 GB, and nothing is left",
        ),
        (
            [*GEOMETRY, "--gpu-memory", "80GB", "--weights", "1GB", "--reserve", "100%"],
            "--reserve '100%' is no share of a GPU; write 0% to 99%",
        ),
        (
            [*GEOMETRY, "--gpu-memory", "80GB", "--weights", "1GB", "--gpus", 3],
            "2 kv heads cannot be shared by 3 GPUs; use 1 or 2, or a multiple of 2",
        ),
        ([*GEOMETRY, "--gpus", 2, "--reserve", "1GB"], "--gpus, --reserve means nothing without --gpu-memory"),
        ([*GEOMETRY, "--gpus", 0], "'--gpus'"),
        ([*GEOMETRY, "--context", 0], "at least 1 is needed"),
        ([*GEOMETRY, "--context", "8x"], "'8x' is no number of tokens; write 8192 or 8k"),
        ([*GEOMETRY, "--context", 1, "--context", 2], "--context is given 2 times; give it once"),
        ([*GEOMETRY, "--page-size", 5], "page_size=5"),
        ([*GEOMETRY, "--raw-dtype", "int8"], "unknown --raw-dtype 'int8'; known: bf16, fp16, fp32"),
        (["--layers", 2, "--kv-heads", 2, "--head-dim", 63], "head_dim=63 must be a multiple of 8"),
    ],
)
def test_plan_errors_are_one_line(args, message):
    assert message in error("plan", *args)


def test_a_repeated_scheme_adds_up():
    data = run_json("plan", *GEOMETRY, "--scheme", "bf16", "--schemes", "int8,kivi4", "--scheme", "int8")
    assert [r["scheme"] for r in data["rows"]] == ["bf16", "int8", "kivi4"]


def test_tokens_and_dtypes_are_understood_as_people_write_them():
    data = run_json("plan", *GEOMETRY, "--context", "8k", "--raw-dtype", "bf16", "--scheme", "raw")
    assert data["context"] == 8192 and data == run_json(
        "plan", *GEOMETRY, "--context", "8,192", "--raw-dtype", "bfloat16", "--scheme", "raw"
    )


def test_a_card_holds_weights_reserve_and_users():
    card = ("--gpu-memory", "80000MB", "--weights", "16GB", "--context", "8k", "--scheme", "bf16,kivi4")
    layers = ("--layers", 32, "--kv-heads", 8, "--head-dim", 128)
    one, two = (run_json("plan", *layers, *card, "--gpus", n) for n in (1, 2))
    assert one["cards"] == {
        "memory_bytes": 80 * 10**9,
        "weights_bytes": 16 * 10**9,
        "count": 1,
        "reserve_bytes": 96 * 10**8,
        "weights_share": 16 * 10**9,
        "cache_bytes": one["memory_bytes"],
    }
    assert (
        one["memory_bytes"] == (80 - 16) * 10**9 - 96 * 10**8 and two["memory_bytes"] == (80 - 8) * 10**9 - 96 * 10**8
    )
    bf16, kivi4 = one["rows"]
    assert bf16["max_batch"] == one["memory_bytes"] // (8192 * 131072)
    assert kivi4["max_batch"] / bf16["max_batch"] > 3
    assert two["layers"][0]["num_kv_heads"] == 4 and two["rows"][0]["total_bytes"] * 2 == bf16["total_bytes"]
    text = " ".join(run("plan", *layers, *card, "--gpus", 2, "--reserve", "10%").stdout.split())
    assert (
        "each of 2 GPUs (tensor parallel): 80.00 GB - 8.00 GB of weights (--weights) - 8.00 GB reserve = 64.00 GB for"
        " the cache" in text
    )
    assert "users" in text and "each GPU" in text
    none = run(
        "plan", *layers, "--gpu-memory", "20GB", "--weights", "16GB", "--context", "64k", "--scheme", "bf16,kivi2"
    ).stdout
    assert "In 16 bits not one user fits." in " ".join(none.split())


def test_weights_come_from_the_files_of_a_model_else_from_its_configuration(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**SIZES)
    config.save_pretrained(tmp_path)
    data = run_json("plan", tmp_path, "--gpu-memory", "1GB", "--scheme", "int8")
    assert data["cards"]["weights_bytes"] == 2 * sum(
        p.numel() for p in transformers.LlamaForCausalLM(config).parameters()
    )
    assert data["weights_from"] == "counted from the configuration at 2 bytes each"
    (tmp_path / "model.safetensors").write_bytes(bytes(1234))
    data = run_json("plan", tmp_path, "--gpu-memory", "1GB", "--scheme", "int8")
    assert data["cards"]["weights_bytes"] == 1234 and data["weights_from"] == "1 weight file"
    assert "4 query heads cannot be shared by 8 GPUs; use 1, 2 or 4" in error(
        "plan", tmp_path, "--gpu-memory", "1GB", "--gpus", 8
    )


def test_with_json_an_error_is_json_too():
    for args, message in (
        (["plan", *GEOMETRY, "--memory", "24"], "--memory '24' is not understood"),
        (["plan", "--nonsense"], "No such option: --nonsense; see `kvbits plan --help`"),
        (["nonsense"], "No such command 'nonsense'"),
    ):
        result = run(*args, "--json", code=2)
        data = json.loads(result.stdout)
        assert (
            set(data) == {"error", "type"} and message in data["error"] and result.stderr == f"error: {data['error']}\n"
        )


def test_a_card_by_its_name_is_said_and_a_size_that_leaves_nothing_names_the_other_unit():
    layers = ("--layers", 80, "--kv-heads", 8, "--head-dim", 128, "--context", "8k", "--scheme", "bf16,int8_centered")
    data = run_json("plan", *layers, "--weights", "141.11GB", "--gpus", 2, "--gpu-memory", "80GB")
    assert [r["max_batch"] for r in data["rows"]] == [3, 5] and data["memory_from"].startswith(
        "80GB is taken as the card of that name with least, A100-80GB"
    )
    assert (
        run_json("plan", *layers, "--weights", "141.11GB", "--gpus", 2, "--gpu-memory", "H100")["rows"][0]["max_batch"]
        == 3
    )
    assert (
        "--gpu-memory: H100: 85.02 GB (79.18 GiB), as torch reports it."
        in run("plan", *layers, "--weights", "16GB", "--gpu-memory", "H100").stdout
    )
    line = error("plan", *layers, "--weights", "141GB", "--gpu-memory", "160GB")
    assert "if you mean 160GiB (2**30 bytes each), 10.18 GB of each GPU are left for a cache: write that" in line
    assert error("plan", *layers, "--weights", "16GB", "--gpu-memory", "80GB", "--reserve", "120%").endswith(
        "write 0% to 99%, or bytes like 8GB\n"
    )


VLLM = ("plan", "--engine", "vllm")


def configured(folder, **fields):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_a_plan_for_vllm_lists_what_it_serves_and_no_other(tmp_path):
    from kvbits.integrations.engine.served import FORMATS, LISTED

    data = run_json(*VLLM, *GEOMETRY, "--context", 1000)
    assert (
        [r["scheme"] for r in data["rows"]] == ["bf16", "fp8", *LISTED]
        and data["engine"] == "vllm"
        and data["refused"] == {}
    )
    by_name = {r["scheme"]: r for r in data["rows"]}
    assert (
        by_name["bf16"]["total_bytes"] == 1008 * 4 * 2 * 2 * 64 * 2
        and by_name["fp8"]["total_bytes"] * 2 == by_name["bf16"]["total_bytes"]
    )
    others = [name for name in FORMATS if name not in LISTED]
    by_name |= {
        r["scheme"]: r for r in run_json(*VLLM, *GEOMETRY, "--context", 1000, "--scheme", ",".join(others))["rows"]
    }
    for name, form in FORMATS.items():
        # of the first page and the newest two, in 16 bits
        copies = 3 * 4 * 2 * 2 * 64 * 64 * 2 if form.calibrated else 0
        assert by_name[name]["total_bytes"] == 16 * 4 * form.layout(2, 64, 64).page_size_bytes + copies
    assert [r["scheme"] for r in run_json(*VLLM, *GEOMETRY, "--scheme", "int4,bf16")["rows"]] == ["kvbits_int4", "bf16"]
    assert "no scheme of --engine vllm 'int4_rotated' any more: klt4 has" in error(
        *VLLM, *GEOMETRY, "--scheme", "int4_rotated"
    )
    assert "kivi4 is for Transformers (--engine transformers)" in error(*VLLM, *GEOMETRY, "--scheme", "kivi4")
    assert "unknown --engine 'vlm'; did you mean vllm?" in error("plan", *GEOMETRY, "--engine", "vlm")
    assert "raw_newest" in error(*VLLM, *GEOMETRY, "--sinks", 4)


def test_a_plan_for_vllm_reads_a_file_of_token_local_formats(tmp_path):
    mine = schemes.get("int4")
    file = tmp_path / "mine.json"
    file.write_text(dataclasses.replace(mine, name="mine").to_json())
    rows = run_json(*VLLM, *GEOMETRY, "--scheme", f"kvbits_int4,{file}")["rows"]
    assert rows[1]["scheme"] == "mine" and rows[1]["total_bytes"] == rows[0]["total_bytes"]
    file.write_text(dataclasses.replace(schemes.get("kivi4"), name="mine").to_json())
    assert "make it with `kvbits fit --token-local`" in error(*VLLM, *GEOMETRY, "--scheme", file)


def test_a_plan_for_vllm_agrees_with_what_vllm_really_had():
    """Tokens that fitted an H200 beside Llama-3.1-8B's 16.06 GB of weights."""
    rows = json.loads((Path(__file__).parents[1] / "benchmarks/results/nvidia-h200/serve_vllm.json").read_text())
    rows = rows["rows"] if "rows" in rows else [r for run in rows["runs"] for r in run["rows"]]
    layers = ("--layers", 32, "--kv-heads", 8, "--head-dim", 128, "--gpu-memory", "H200", "--weights", "16.06GB")
    for planned in run_json(*VLLM, *layers)["rows"]:
        names = (1, planned["scheme"], "llama-3.1-8b")
        measured = [
            n
            for r in rows
            if (r.get("gpus"), r.get("kv_cache_dtype"), r.get("geometry")) == names and (n := r.get("capacity_tokens"))
        ]
        # measured while raw copies were allocated for all --max-num-seqs
        if planned["scheme"].startswith("kvbits_klt"):
            continue
        assert all(planned["max_context"] == pytest.approx(n, rel=0.02) for n in measured), planned["scheme"]
        assert measured


def test_what_an_engine_refuses_of_a_model_is_named_and_16_bits_are_shown(tmp_path):
    alibi = configured(tmp_path / "alibi", model_type="bloom", n_layer=4)
    data = run_json(*VLLM, alibi)
    assert [r["scheme"] for r in data["rows"]] == ["bf16", "fp8"] and "ALiBi" in next(iter(data["refused"].values()))
    assert "not served: the model has ALiBi" in " ".join(run(*VLLM, alibi).stdout.split())
    assert "kvbits_int8: the model has ALiBi" in error(*VLLM, alibi, "--scheme", "int8")
    wide = configured(tmp_path / "wide", model_type="llama", num_hidden_layers=4, head_dim=2 * WIDEST)
    assert f"head_dim={2 * WIDEST} is no multiple of 8 from 64 to {WIDEST}" in next(
        iter(run_json(*VLLM, wide)["refused"].values())
    )
    oss = configured(tmp_path / "oss", model_type="gpt_oss", num_hidden_layers=4)
    assert [list(run_json(*VLLM, oss)["refused"]), [r["scheme"] for r in run_json("plan", oss)["rows"]]] == [
        [],
        list(planner.SHOWN),
    ]
    biased = configured(tmp_path / "biased", model_type="qwen2", num_hidden_layers=4)
    data = run_json(*VLLM, biased)
    assert not data["refused"] and [r["scheme"] for r in data["rows"]] == list(planner.VLLM_SHOWN)
    assert "kvbits_int4 loses too much where keys have a bias" in error(*VLLM, biased, "--scheme", "int4")
    latent = configured(tmp_path / "latent", model_type="deepseek_v3", num_hidden_layers=4)
    packed = [name for name in planner.SHOWN if not name.startswith("klt")]
    for engine, names in (("transformers", packed), ("vllm", ["bf16", "fp8"])):
        data = run_json("plan", latent, "--engine", engine, "--gpu-memory", "141GB", "--gpus", 8, "--weights", "100GB")
        assert [r["scheme"] for r in data["rows"]] == names and data["rows"][0]["bytes_per_token"] == 4 * 576 * 2
        assert "latent attention" in next(iter(data["refused"].values())) and data["rows"][0]["max_batch"] > 0
    indexed = " ".join(
        run("plan", configured(tmp_path / "indexed", model_type="deepseek_v32", num_hidden_layers=4)).stdout.split()
    )
    assert (
        "it takes dense=True (KVCache.for_model)" in indexed
        and "Index keys take up to 1,024 bytes a token besides" in indexed
    )
    hybrid = configured(tmp_path / "hybrid", model_type="qwen3_next", num_hidden_layers=8)
    text, data = (
        " ".join(run("plan", hybrid).stdout.split()),
        run_json("plan", hybrid, "--scheme", "bf16", "--context", 1000, "--batch", 2),
    )
    assert (
        "2 layers x 2 kv heads x 256" in text
        and "Recurrent layers keep 12.98 MB for each user, whatever the context; the totals count it." in text
    )
    assert data["state_bytes"] == 6 * (32 * 128 * 128 * 4 + 8192 * 4 * 2) and data["rows"][0]["total_bytes"] == 2 * (
        1000 * 2 * 2 * 2 * 256 * 2 + data["state_bytes"]
    )
    types = ["linear_attention"] * 3 + ["full_attention"]
    both = configured(tmp_path / "both", model_type="kimi_linear", num_hidden_layers=4, layer_types=types)
    text = " ".join(run("plan", both).stdout.split())
    assert (
        "Recurrent layers keep a state of a size that is not known here" in text
        and "Recurrent" not in run("plan", latent).stdout
    )
    for kind, why in (("llama4_text", "attends in chunks"), ("bart", "has an encoder")):
        assert why in next(iter(run_json(*VLLM, configured(tmp_path / kind, model_type=kind))["refused"].values()))
    small = ("--out", tmp_path / "x.json", "--context", "1k", "--batch", 4)
    assert "recurrent states of 4 sequences take 51.90 MB, all of 50.00 MB" in error(
        "fit", hybrid, *small, "--memory", "50MB"
    )
    said = run("fit", hybrid, *small, "--memory", "52MB", code=2).stderr
    assert (
        "recurrent states take 51.90 MB of the memory, pages have 95.49 kB" in said
        and "even in the fewest bits 95.49 kB do not hold" in said
    )


def test_the_speed_of_small_caches_names_the_layers(tmp_path):
    folder = configured(
        tmp_path / "g",
        model_type="gemma3_text",
        num_hidden_layers=12,
        num_key_value_heads=16,
        num_attention_heads=16,
        sliding_window=256,
    )
    text = " ".join(run("plan", folder, "--context", "64k").stdout.split())
    assert (
        "Speed of the 10 layers with a window of 256: a cache of this size saves memory and no time on a GPU. 1 x 256"
        in text
    )
    assert "with full attention: a cache" not in text
    assert "Speed of these layers: a cache" in " ".join(run("plan", *GEOMETRY, "--context", 100).stdout.split())


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_folder_and_numbers_are_planned_without_torch_and_transformers(tmp_path, engine):
    folder = configured(
        tmp_path / "m",
        model_type="llama",
        num_hidden_layers=4,
        torch_dtype="bfloat16",
        quantization_config={"quant_method": "fp8"},
    )
    for what in ([str(folder), "--gpu-memory", "80GB"], [*GEOMETRY, "--memory", "1GB"]):
        code = (
            f"import sys\nfrom kvbits.cli import main\nsys.argv[1:] = {['plan', *what, '--engine', engine]!r}\ntry:\n  "
            "  main()\nfinally:\n    print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
        )
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert out.returncode == 0 and out.stdout.endswith("[]\n"), out.stderr + out.stdout


# -- schemes --------------------------------------------------------------------------------------------------------


def test_schemes_lists_every_preset():
    data = run_json("schemes", "--head-dim", 64)
    assert data["head_dim"] == 64 and sorted(r["scheme"] for r in data["rows"]) == sorted(schemes.PRESETS)
    assert (
        [r["scheme"] for r in data["rows"] if r["ring"] == "core"]
        == [r["scheme"] for r in data["rows"][: len(schemes.CORE)]]
        == list(schemes.CORE)
    ), "the core comes first"
    for r in data["rows"]:
        assert r["bits_per_element"] == schemes.get(r["scheme"]).bits_per_element(64) and r["description"]
        assert {"source", "page_size", "residual_length", "needs_calibration", "key", "value"} <= set(r)
    text = run("schemes").stdout
    assert all(name in text for name in schemes.PRESETS) and "arxiv.org" in text
    text = " ".join(text.split())
    assert "at head_dim 128" in text and "in heads of 128 channels (--head-dim for other models)" in text


def test_schemes_at_a_table_s_head_dim_print_the_table_s_bits():
    """The table of every cache is of a model with heads of 64 channels, the README's of heads of 128, and both say so."""
    root = Path(__file__).parents[1]
    readme = (root / "docs" / "results" / "evaluation.md").read_text()
    dim = int(re.search(r"at long context; both on \S+ \(`kvbits schemes --head-dim (\d+)`\)", readme)[1])
    printed = {r["scheme"]: f"{r['bits_per_element']:.2f}" for r in run_json("schemes", "--head-dim", dim)["rows"]}
    table = readme[readme.index("| bits held | bits |") :]
    stated = dict(re.findall(r"^\| ([^` ]+) \| [\d.]+ \| ([\d.]+) \|", table, re.M))
    # of their format until 2026-11-23, as the page says
    stated = {name: bits for name, bits in stated.items() if not name.startswith("klt")}
    assert len(stated) > 15 and {k: printed[k] for k in stated} == stated
    other = {r["scheme"]: f"{r['bits_per_element']:.2f}" for r in run_json("schemes")["rows"]}
    assert other != printed, "the width would not have to be said"


def test_the_readme_s_bits_are_those_of_a_cache_of_8192_tokens():
    """README says what is held at the length that its column names, newest and first tokens in 16 bits included;
    `kvbits schemes` says less.
    """
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    stated = dict(re.findall(r"^\| `(\S+)` \| ([\d.]+) \|", readme, re.M))
    layers = (LayerGeometry(num_kv_heads=1, head_dim=128),)
    held = {
        name: f"{8 * CacheSpec(scheme=schemes.get(name), layers=layers).nbytes(8192) / (2 * 8192 * 128):.2f}"
        for name in stated
    }
    assert "bits held at 8,192 tokens" in readme and len(stated) == 7 and held == stated


def test_schemes_fit_other_widths_and_refuse_impossible_ones():
    assert {r["scheme"] for r in run_json("schemes", "--head-dim", 40)["rows"]} == set(schemes.PRESETS)
    assert "head_dim=7" in error("schemes", "--head-dim", 7)


# -- info and Ctrl-C ------------------------------------------------------------------------------------------------


def test_every_environment_variable_is_listed_and_documented():
    from kvbits.cli.info import ENVIRONMENT

    root = Path(__file__).parents[1]
    code = "".join(p.read_text() for kind in ("*.py", "*.cpp", "*.h") for p in Path(kvbits.__file__).parent.rglob(kind))
    read = set(re.findall(r"""(?:environ(?:\.get\(|\[)|getenv\()\s*["'](\w+)["']""", code))
    assert read == set(ENVIRONMENT) and "KVBITS_CPU_TIER" in read
    documented = (root / "docs" / "internals" / "building.md").read_text()
    assert all(f"`{name}`" in documented for name in ENVIRONMENT)


def test_info_says_what_is_here(monkeypatch, tmp_path):
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("KVBITS_CACHE", str(tmp_path))
    data = run_json("info")
    assert data["packages"]["torch"] == torch.__version__ and data["packages"]["vllm"] and "cpu_kernels" in data
    assert data["environment"]["KVBITS_CACHE"] == str(tmp_path) and f"0 in {tmp_path}" in data["compiled_kernels"]
    assert "KVBITS_CPU_TIER" in run("info").stdout


@pytest.mark.parametrize(
    ("chosen", "state"),
    [
        (None, "loaded"),
        ("kvbits,other", "loaded"),
        ("other", "not loaded"),
        ("other, kvbits", "not loaded"),
        ("", "not loaded"),
    ],
)
def test_info_says_whether_vllm_loads_the_plugin(monkeypatch, chosen, state):
    """vLLM compares names as they are written."""
    from importlib.metadata import EntryPoint

    from kvbits.cli import info

    group, variable = "vllm.general_plugins", "VLLM_PLUGINS"
    entries = [EntryPoint(name, f"{name}:register", group) for name in ("kvbits", "other")]
    monkeypatch.setattr(info.importlib.metadata, "entry_points", lambda group: entries if "vllm" in group else [])
    monkeypatch.delenv(variable, raising=False)
    if chosen is not None:
        monkeypatch.setenv(variable, chosen)
    found = info._plugins()
    assert found["vllm plugin"].startswith(state) and found["vllm plugin"].endswith("others: other")
    assert found["sglang plugin"].startswith("not installed")


def test_a_cpu_without_kernels_is_said(monkeypatch, capsys):
    pytest.importorskip("torch")
    from kvbits.cli.common import say_device
    from kvbits.ops.cpu import library

    monkeypatch.setattr(library, "unavailable", lambda: "none was built")
    say_device("cpu")
    assert (
        "warning: without CPU kernels every scheme takes the reference, many times slower: none was built"
        in capsys.readouterr().err
    )


STOPPED = """
import sys, time, threading, os, signal
from kvbits.cli import common, main
@common.command()
def sleepy(hard: bool = False, as_json: common.Json = False) -> None:
    common.when_stopped("two of five are kept; the same command goes on")
    print("ready", file=sys.stderr, flush=True)
    if hard:  # what a long operation in C is to Python: signals are not seen until it ends
        signal.signal(signal.SIGINT, lambda *args: time.sleep(30))
    time.sleep(30)
sys.argv[1:] = ["sleepy", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(
    "options", [[], ["--json"], ["--hard"], ["--hard", "--json"]], ids=lambda o: " ".join(o) or "plain"
)
def test_ctrl_c_says_what_is_kept_and_leaves_soon(options):
    # a shell starts what runs in its background with the signal ignored
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heeds,
    )
    assert process.stderr.readline() == "ready\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130 and err == "stopped: two of five are kept; the same command goes on\n"
    assert time.monotonic() - began < 4, "1.2 seconds by itself, on a machine that does nothing else"
    assert (json.loads(out)["type"] == "KeyboardInterrupt") if "--json" in options else out == ""


def test_the_demo_says_where_a_text_of_one_s_own_is_read():
    assert "takes no --text; `kvbits check MODEL --text FILE`" in error("demo", "--text", "x")


# -- calibrate ------------------------------------------------------------------------------------------------------


class Bytes:
    """A tokenizer of UTF-8 bytes."""

    bos_token_id = None

    def __call__(self, text, add_special_tokens=True, verbose=True):
        return {"input_ids": list(text.encode())}


@pytest.fixture
def loader(monkeypatch):
    """Replaces the loading of models: a tiny random Llama and a byte tokenizer."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    def load_model(name, dtype="auto", device=None):
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval(), Bytes()

    monkeypatch.setattr("kvbits.integrations.models.load_model", load_model)
    monkeypatch.setattr("kvbits.integrations.models.load_tokenizer", lambda name: Bytes())
    monkeypatch.setattr("kvbits.geometry.load_config", lambda name: transformers.LlamaConfig(**SIZES))
    return load_model


def test_calibrate_says_when_the_text_is_short_and_refuses_windows_past_the_model(loader, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("abc " * 25)
    options = ("--scheme", "int8_static", "--text", text, "--out", tmp_path / "s", "--windows", 9)
    assert (
        "note: text is short: it gives 3 windows of 32 tokens, not 9 of 32"
        in run("calibrate", "tiny", *options, "--length", 32).stderr
    )
    text.write_text("abc")
    assert "it gives 1 window of 4 tokens, not 9 of 32" in run("calibrate", "tiny", *options, "--length", 32).stderr
    assert (
        "note:"
        not in run(
            "calibrate",
            "tiny",
            "--scheme",
            "int8_static",
            "--out",
            tmp_path / "s",
            "--windows",
            2,
            "--length",
            32,
            "--force",
        ).stderr
    )
    limit = "windows of 5000 tokens pass the model's 2048 positions; give --length, at most 2048"
    assert limit in error("calibrate", "tiny", *options, "--length", 5000)


@pytest.mark.filterwarnings("ignore:.*positions of a frame")
def test_calibrate_writes_a_file_that_loads(loader, tmp_path):
    from kvbits.calibrate import Calibration
    from kvbits.geometry import layer_geometries

    text = tmp_path / "text.txt"
    text.write_text("Some words that repeat. " * 100)
    out = tmp_path / "scales.safetensors"
    options = (
        "--scheme",
        "int8_static",
        "--text",
        text,
        "--out",
        out,
        "--windows",
        5,
        "--length",
        32,
        "--seed",
        3,
        "--threads",
        1,
    )
    data = run_json("calibrate", "tiny", *options)
    assert (data["prompts"], data["tokens"], data["layers"], data["percentile"], data["model"]) == (
        5,
        160,
        2,
        99.9,
        "tiny",
    )
    found = Calibration.load(out)
    assert found.id == data["id"] and found.info["text"] == "text" and len(found.info["text_sha256"]) == 64
    config = loader("tiny")[0].config
    found.fitted(config, schemes.for_layers("int8_static", layer_geometries(config)))
    said = run("calibrate", "tiny", *options, "--percentile", 100).stdout
    assert "160 tokens in 5 windows, maximum" in said and "wrote" in said
    assert run_json("calibrate", "tiny", *options, "--text", "novel")["text"] == "text+novel"
    small = ("--out", tmp_path / "basis.safetensors", "--windows", 3, "--length", 200, "--threads", 1)
    data = run_json("calibrate", "tiny", *small)
    assert data["scheme"] == "klt4", "without --scheme what the README recommends"
    assert (data["text"], data["prompts"]) == (
        "novel-end+code",
        3,
    ), "a basis sees what queries look for: in prose and in a program"
    assert Calibration.load(out).id != found.id


def test_calibrate_replaces_only_its_own_file(loader, tmp_path):
    options = ("--out", tmp_path / "c", "--windows", 2, "--length", 32, "--threads", 1, "--scheme", "int8_static")
    first = run_json("calibrate", "tiny", *options)
    assert first["text"] == "novel-end"
    assert run_json("calibrate", "tiny", *options)["id"] == first["id"]
    before = (tmp_path / "c").read_bytes()
    assert "calibration of scheme 'int8_static', not 'nuq4'; give another --out, or --force" in error(
        "calibrate", "tiny", *options[:-1], "nuq4"
    )
    assert "calibration of model 'tiny', not 'other'" in error("calibrate", "other", *options)
    assert (tmp_path / "c").read_bytes() == before
    assert run_json("calibrate", "other", *options, "--force")["model"] == "other"
    (tmp_path / "c").write_text("my notes")
    assert "is no calibration that could be replaced" in error("calibrate", "tiny", *options)
    assert (tmp_path / "c").read_text() == "my notes"


@pytest.mark.filterwarnings("ignore:.*positions of a frame")
def test_several_schemes_are_calibrated_in_one_pass(loader, tmp_path, monkeypatch):
    from kvbits.calibrate import Calibration, collect

    passes, plain = [], collect._see_queries
    monkeypatch.setattr(collect, "_see_queries", lambda *args: passes.append(args) or plain(*args))
    options = ("--windows", 3, "--length", 320, "--threads", 1)
    data = run_json(
        "calibrate",
        "tiny",
        "--scheme",
        "klt4,klt3",
        "--scheme",
        "klt2",
        "--out",
        tmp_path / "{scheme}.safetensors",
        *options,
    )
    assert [c["scheme"] for c in data["calibrations"]] == ["klt4", "klt3", "klt2"] and len(passes) == 1
    for name in ("klt4", "klt3", "klt2"):
        together = Calibration.load(tmp_path / f"{name}.safetensors")
        alone = run_json("calibrate", "tiny", "--scheme", name, "--out", tmp_path / "alone", *options, "--force")
        assert together.id == alone["id"] and together.info["scheme"] == name
    assert "holds a calibration of model 'tiny', not 'other'" in error(
        "calibrate", "other", "--scheme", "klt4,klt3", "--out", tmp_path / "{scheme}.safetensors"
    )


def test_a_file_of_another_scheme_is_refused_before_torch_is_imported(loader, tmp_path):
    out = tmp_path / "c.safetensors"
    run("calibrate", "tiny", "--scheme", "int8_static", "--out", out, "--windows", 2, "--length", 32, "--threads", 1)
    configured(tmp_path / "m", model_type="llama")
    code = (
        "import sys\nfrom kvbits.cli import main\nsys.argv[1:] ="
        f" {['calibrate', str(tmp_path / 'm'), '--out', str(out), '--scheme', 'klt4']!r}\ntry:\n    main()\nfinally:\n "
        "   assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "holds a calibration of scheme 'int8_static', not 'klt4'" in done.stderr, (
        done.stderr
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--text": "missing.txt"}, "missing.txt: No such file"),
        ({"--text": "binary.txt"}, "binary.txt is not UTF-8"),
        ({"--text": "empty.txt"}, "empty.txt holds no text"),
        ({"--out": "nowhere/x.safetensors"}, "nowhere does not exist"),
        ({"--scheme": "int8"}, "schemes that need calibration: klt4, klt3"),
        ({"--scheme": "int9"}, "unknown scheme 'int9'"),
        (
            {"--scheme": "int8_static,nuq4"},
            "2 schemes go into a file each, and --out out.safetensors names one; write {scheme} where",
        ),
        (
            {"--scheme": "int8_static,nuq4", "--out": "{scheme}.s"},
            "these schemes take 128 windows of 256 tokens (int8_static) and 16 windows of 2,048 tokens",
        ),
        ({"--percentile": "10"}, "percentile=10.0 is outside"),
        (
            {"--percentile": "99"},
            "--percentile is of static scales, and klt4 has none; omit it, or give another --scheme",
        ),
        ({"--weights": "none"}, "--weights is of codebooks, and klt4 has none"),
        ({"--percentile": "200"}, "percentile=200.0 is outside 90 to 100"),
        ({"--weights": "some"}, "weights='some' is not 'fisher' or 'none'"),
        ({"--length": "1"}, "at least 2 is needed"),
        ({"--windows": "0"}, "'--windows'"),
        ({"--skip-tokens": "1024"}, "--skip-tokens 1024 leaves nothing of windows of 1024 tokens"),
        ({"--device": "nope"}, "unknown device 'nope'"),
    ],
)
def test_calibrate_errors_are_one_line_and_write_nothing(loader, tmp_path, monkeypatch, changes, message):
    """And they come before a model is loaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvbits.integrations.models.load_model", None)
    (tmp_path / "text.txt").write_text("words " * 50)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    options = {"--text": "text.txt", "--out": "out.safetensors"} | changes
    assert message in error("calibrate", "tiny", *(x for pair in options.items() for x in pair))
    assert not list(tmp_path.glob("*.safetensors*"))


# -- demo -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stub_demo(monkeypatch):
    calls = []

    def fake_run(**kwargs):
        kwargs.pop("say")("found something")
        calls.append(kwargs)
        if kwargs["context"] == 13:
            raise DataError("context=13\nis unlucky")
        return {
            "model": "m",
            "context": kwargs["context"],
            "rows": [{"scheme": "int8", "ppl": float("nan")}],
            "texts": [{"same_tokens": 3}],
        }

    module = types.ModuleType("kvbits.evaluate.demo")
    module.run, module.shown = fake_run, lambda result: [f"table of {result['model']}"]
    module.require_context = lambda context, new_tokens, config: None
    monkeypatch.setitem(sys.modules, "kvbits.evaluate.demo", module)
    monkeypatch.setattr("kvbits.evaluate.demo", module, raising=False)
    return calls


def test_demo_passes_its_options_on(stub_demo):
    shown = run("demo")
    assert shown.stdout == "table of m\n" and shown.stderr == "found something\n"
    assert stub_demo[-1] == {
        "model": None,
        "schemes": ["int8_centered", "klt4", "klt2"],
        "context": 1024,
        "new_tokens": 32,
    }
    data = run_json("demo", "--model", "x", "--scheme", "fp8", "--context", 99, "--new-tokens", 5, "--threads", 1)
    assert stub_demo[-1] == {"model": "x", "schemes": ["fp8"], "context": 99, "new_tokens": 5}
    (name,) = data["runs"]
    assert data["rows"] == [{"run": name, "scheme": "int8", "ppl": None}]  # JSON has no NaN
    assert data["runs"][name]["facts"] == {"model": "m", "context": 99} and data["runs"][name]["argv"]


def test_demo_errors_are_one_line(stub_demo):
    assert run("demo", "--context", 13, code=2).stderr == "found something\nerror: context=13 is unlucky\n"
    assert "unknown scheme" in error("demo", "--scheme", "int5")
    assert "unknown scheme 'int5'" in error("demo", "--schemes", "int8,int5")


# -- files and numbers that cannot be, before any work ----------------------------------------------------------------


RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "eval"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["report", RESULTS, "--html", "folder"], "--html 'folder' is a directory; name a file in it"),
        (
            ["report", RESULTS, "--html", "nowhere/x.html"],
            "--html nowhere/x.html: the directory nowhere does not exist",
        ),
        (["eval", "folder", "--out", "file/x"], "--out file/x: file is a file; name a folder"),
        (
            ["eval", "folder", "--out", "o", "--data", "foo=file"],
            "data 'foo' belongs to no benchmark; known: humaneval, gsm8k",
        ),
        (["eval", "folder", "--out", "o", "--contexts", "-5"], "--contexts '-5' is no number of tokens"),
        (
            ["eval", "folder", "--out", "o", "--text", "file", "--text", "file"],
            "--text file is given 2 times; give it once",
        ),
        (
            ["eval", "folder", "--out", "o", "--text", "file", "--text", "./file"],
            "--text file is given 2 times; give it once",
        ),
        (["eval", "folder", "--out", "o", "--depths", ""], "--depths '' names nothing"),
        (["eval", "folder", "--out", "o", "--depths", "0,0.0"], "--depths 0.0 is given 2 times; give it once"),
        (["eval", "folder", "--out", "o", "--contexts", "1k,1024"], "--contexts 1024 is given 2 times; give it once"),
        (
            ["eval", "folder", "--out", "o", "--draws", "3"],
            "--draws 3 means nothing for fidelity; gsm8k and humaneval draw answers",
        ),
        (["eval", "folder", "--out", "o", "--threads", "1025"], "'--threads'"),
        (["bench", "--heads", "8/2/63", "--out", "b.json"], "head_dim=63 must be a multiple of 8"),
        (["eval", "folder", "--out", "o", "--windows", "-1"], "'--windows'"),
        (["eval", "folder", "--out", "o", "--name", "../x"], "--name '../x' is no name of a folder"),
        (
            ["plan", "--layers", "100000000", "--kv-heads", "1", "--head-dim", "64"],
            "num_layers=100000000 must be at least 1 and at most 4,096",
        ),
        (["eval", "folder", "--out", "o", "--length", "1"], "at least 2 is needed"),
        (
            ["check", "folder", "--scheme", "int8,int4"],
            "--scheme 'int8,int4' names 2 schemes, and this command takes one scheme",
        ),
        (["check", "folder", "--scheme", "int8", "--scheme", "int4"], "--scheme is given 2 times; give it once"),
        (["check", "folder", "--windows", "-1"], "'--windows'"),
        (["check", "folder", "--length", "1"], "at least 2 is needed"),
        (
            ["demo", "--context", "100000000"],
            "context + new_tokens = 100,000,032 tokens, but the text has 159,940 characters; lower --context",
        ),
        (["demo", "--new-tokens", "1"], "at least 2 is needed"),
        (["eval", "folder", "--out", "o", "--dtype", "int9"], "unknown dtype 'int9'; known: auto, bf16, fp16"),
        (["eval", "folder", "--out", "o", "--device", "nope"], "unknown device 'nope'; cpu and cuda are usual"),
        (["eval", "folder", "--out", "o", "--device", "cuda:99"], "device 'cuda:99' is not there: torch"),
        (["check", "folder", "--scheme", "int5"], "unknown scheme 'int5'"),
        (["check", "folder", "--max-kl", "-1"], "limit kl=-1.0 must be a number of at least 0"),
        (["check", "folder", "--max-ppl-change", "nan"], "limit ppl_change=nan must be"),
        (["check", "folder/config.json"], "cannot load a model from the file 'folder/config.json'; give the directory"),
        (["calibrate", "folder", "--out", "folder", "--force"], "--out 'folder' is a directory"),
    ],
    ids=lambda x: " ".join(map(str, x[:1] + x[2:])) if isinstance(x, list) else "",
)
def test_what_cannot_be_is_refused_before_any_work(tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    assert message in error(*args)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["config.json", "file", "folder"]


def test_a_file_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    assert "x.html: No space left on device" in error("report", RESULTS, "--html", tmp_path / "x.html")


def test_a_dtype_that_is_not_is_told_by_the_names_of_the_help():
    line = error("check", "embedded", "--dtype", "bf17")
    assert (
        "unknown dtype 'bf17'; did you mean bf16? known: auto, bf16, fp16, fp32, or their long names: bfloat16,"
        " float16, float32" in line
    )


def test_a_hub_id_without_a_network_says_the_way_out(monkeypatch):
    pytest.importorskip("transformers")
    import socket

    def nobody(*args):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    line = error("plan", "nobody/no-such-model")
    assert (
        "cannot be reached (Name or service not known); run `hf download ID --local-dir FOLDER` where there is a"
        " network" in line
    )


def test_a_report_of_nothing_says_which_folder_it_wants(tmp_path):
    assert "no such folder; give the one that `kvbits eval MODEL --out FOLDER` wrote" in error(
        "report", tmp_path / "nowhere"
    )
    assert (
        "holds no results of `kvbits eval` (MODEL/TASK/SCHEME.json); give the folder itself that its --out named"
        in error("report", tmp_path)
    )
