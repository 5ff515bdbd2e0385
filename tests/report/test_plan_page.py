"""The page to play with gives the numbers of `kvbits plan`, in a real browser, and draws there, light, dark and on a
phone.
"""

import html
import json
import random
import re
import shlex

import pytest
from browser import DARK, browse, needs_browser
from commands import error, run
from messages import mentions
from typer.testing import CliRunner

from kvbits import schemes
from kvbits.cli import app
from kvbits.config_file import Fields
from kvbits.gpus import CARDS
from kvbits.report.plan_page import asset, known, page
from kvbits.weights import counted

CONFIGS = json.loads(asset("models.json"))
SCHEMES = ("bf16", *schemes.CORE)
PARAMETERS = {
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-2-7B": 6_738_415_616,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-0.5B": 494_032_768,
    "Gemma-2-9B": 9_241_705_984,
    "Gemma-3-1B": 999_885_952,
    "gpt-oss-20b": 20_914_757_184,
    "SmolLM2-135M": 134_515_008,
}
"""Parameters that the hub states for each model."""


def test_the_listed_models_have_their_parameters():
    assert {name: counted(Fields(config)).total for name, config in CONFIGS.items()} == PARAMETERS


def pasted(draw):
    """A config.json that the page reads."""
    kind = draw.choice(["llama", "mistral", "qwen2", "qwen3"])
    heads = draw.choice([4, 8, 32])
    stated = {
        "model_type": kind,
        "num_hidden_layers": draw.randint(1, 90),
        "hidden_size": heads * draw.choice([32, 64, 80, 128]),
        "vocab_size": draw.randint(100, 200_000),
        "intermediate_size": draw.randint(64, 30_000),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([1, 2, 4]),
        "tie_word_embeddings": draw.random() < 0.5,
        "max_position_embeddings": draw.choice([2048, 131_072, 1 << 24]),
    }
    more = {
        "mistral": {"sliding_window": draw.choice([None, 100, 4096])},
        "qwen2": {"use_sliding_window": False},
        "qwen3": {"head_dim": draw.choice([64, 128])},
    }
    return stated | more.get(kind, {})


ANSWERS = 80


def cases():
    draw = random.Random(5)
    for i in range(ANSWERS):
        ask = {
            "gpus": draw.choice([1, 1, 2, 4, 8, 16]),
            "context": round(2 ** draw.uniform(0, 21)),
            "batch": draw.choice([1, 2, 7, 256]),
        }
        yield {
            "model": None if i % 5 == 0 else draw.choice(list(CONFIGS)),
            "pasted": json.dumps(pasted(draw)),
            "card": draw.choice(list(CARDS)),
            **ask,
        }


def planned(case, folder):
    """Return what `kvbits plan` answers: bytes left for the cache, and rows; None if it refuses."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[case["model"]]) if case["model"] else case["pasted"])
    options = f"--gpu-memory {shlex.quote(case['card'])} --gpus {case['gpus']} --context {case['context']}"
    command = (
        f"plan {folder / 'config.json'} {options} --batch-size {case['batch']} --scheme {','.join(SCHEMES)} --json"
    )
    done = CliRunner().invoke(app, shlex.split(command))
    found = json.loads(done.stdout)
    if done.exit_code:
        assert mentions(found["error"], f"{case['gpus']} GPUs") or mentions(
            found["error"], "weights", "reserve", "GPU"
        ), found
        return None
    rows = [[r["scheme"], r["total_bytes"], r["max_batch"], r["max_context"]] for r in found["rows"]]
    return [found["cards"]["cache_bytes"], rows]


@needs_browser
def test_random_answers_are_those_of_the_command(tmp_path):
    asked = list(cases())
    probe = f"""<script>addEventListener("load", () => {{
        const data = JSON.parse(document.getElementById("plan-data").textContent);
        const answers = {json.dumps(asked)}.map((c) => {{
            const found = plan.rows(data, c.model ? data.models[c.model] : plan.read(data, c.pasted), {{ memory: data.cards[c.card], ...c }});
            return found.refused ? null : [found.left, found.rows.filter((r) => !r.scheme.startsWith("vLLM ")).map((r) => [r.scheme, r.total, r.users, r.longest])];
        }});
        document.body.dataset.answers = JSON.stringify(answers);
    }});</script></head>"""
    path = tmp_path / "page.html"
    path.write_text(page(known()).replace("</head>", probe))
    answers = json.loads(
        html.unescape(re.search(r'data-answers="([^"]*)"', browse(path, tmp_path / "profile")).group(1))
    )
    assert len(answers) == ANSWERS and 0.1 < sum(a is None for a in answers) / ANSWERS < 0.6
    for case, answer in zip(asked, answers, strict=True):
        assert answer == planned(case, tmp_path), case


PROBE = """<script>addEventListener("error", (e) => document.body.dataset.failed = e.message); addEventListener("load", () => {
    const $ = (id) => document.getElementById(`plan-${id}`), put = (id, value) => { $(id).value = value; $(id).dispatchEvent(new Event("input")); return $("answer").textContent; };
    const said = [$("answer").textContent, put("context", 17), put("preset", "klt2"), put("card", "L4"), put("gpus", "4"), put("engine", "vLLM"), put("model", "gpt-oss-20b")];
    document.body.dataset.bars = document.querySelectorAll("#plan-bars .bar").length;
    put("engine", "Transformers");
    put("paste", '{"model_type": "mamba"}');
    said.push($("paste-says").textContent);
    put("paste", '{"model_type": "llama", "num_hidden_layers": 2}');
    said.push($("paste-says").textContent);
    document.body.dataset.said = said.join("|");
    document.body.dataset.look = [document.documentElement.scrollWidth, getComputedStyle(document.body).backgroundColor, document.querySelectorAll("#plan-rows .bar").length].join(" ");
});</script></head>"""


@needs_browser
@pytest.mark.parametrize(
    "options, background", [((), "rgb(255, 255, 255)"), ((DARK,), "rgb(18, 23, 30)")], ids=["light", "dark"]
)
def test_bars_move_with_what_is_dragged(tmp_path, options, background):
    path = tmp_path / "page.html"
    path.write_text(page(known(), context=4096).replace("</head>", PROBE))
    dom = browse(path, tmp_path / "profile", *options)
    assert "data-failed" not in dom
    *answers, unread, short = html.unescape(re.search(r'data-said="([^"]*)"', dom).group(1)).split("|")
    assert len(set(answers)) == len(answers) and mentions(answers[0], "users", "4,096 tokens") and "klt2" in answers[2]
    assert mentions(unread, "mamba", "kvbits plan config.json --html page.html") and "hidden_size" in short
    look = re.search(r'data-look="([^"]*)"', dom).group(1)
    assert background in look and int(look.split()[-1]) >= len(SCHEMES) and int(look.split()[0]) <= 800


@needs_browser
def test_a_phone_needs_no_sideways_scrolling(tmp_path):
    (tmp_path / "page.html").write_text(page(known()))
    (tmp_path / "phone.html").write_text(
        '<body><iframe id="f" src="page.html"'
        ' style="width:390px;height:900px"></iframe><script>addEventListener("load", () => setTimeout(() =>'
        " document.body.dataset.width = f.contentDocument.documentElement.scrollWidth, 500));</script>"
    )
    width = re.search(
        r'data-width="(\d+)"', browse(tmp_path / "phone.html", tmp_path / "profile", "--allow-file-access-from-files")
    )
    assert width and 300 < int(width.group(1)) <= 390


def test_the_command_writes_a_page_of_its_model_that_asks_nobody(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(CONFIGS["Qwen3-8B"]))
    html = tmp_path / "page.html"
    run(f"plan {tmp_path / 'mine'} --context 32k --html {html}")
    text = (tmp_path / "page.html").read_text()
    data = json.loads(re.search(r'id="plan-data">(.*?)</script>', text, re.S).group(1))
    assert (
        next(iter(data["models"])) == "mine"
        and data["models"]["mine"] == data["models"]["Qwen3-8B"]
        and 'value="15.0"' in text
    )
    assert (
        not re.search(r'(src|href)="(?!data:)', text)
        and "@import" not in text
        and "http" not in text.replace("https://arxiv", "")
    )
    numbers = f"plan --layers 2 --kv-heads 2 --head-dim 64 --html {html}"
    run(f"{numbers} --weights 1GB")
    assert '"2 layers":{"weights":1000000000' in html.read_text()
    error(numbers, "--html", "--weights")
