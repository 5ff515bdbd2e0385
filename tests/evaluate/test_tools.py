"""Calls of functions: what a conversation says is what its call has to say, and agreement counts whole calls."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest
import tiny
import torch
from messages import raises
from tiny import trained

from kvbits import embedded
from kvbits.errors import DataError, SpecError
from kvbits.evaluate import results, shown
from kvbits.evaluate.caches import base_factory, factory
from kvbits.evaluate.paired import agreement, paired
from kvbits.evaluate.rows import generate, generate_forked
from kvbits.evaluate.run import Evaluation
from kvbits.evaluate.settings import Options
from kvbits.evaluate.tasks import Context, load
from kvbits.evaluate.tasks.conversations import KINDS, PARAMETERS, chat_text, converse, writes_functions
from kvbits.evaluate.tasks.tools import ToolsTask, call_of, calls_together, digest
from kvbits.evaluate.texts import DAY, Text, novel
from kvbits.integrations.models import load_model, load_tokenizer
from kvbits.model_ref import ModelRef

TEXTS = (Text("one", novel()[:40_000]),)
PLAIN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATE_WITH_FUNCTIONS = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% for c in m['tool_calls'] %}CALL {{ c['function'] | tojson }}{% endfor %}\n{% endfor %}"
)


TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}


def require(value, schema):
    """A value is as its JSON schema says."""
    assert type(value) is TYPES[schema["type"]] and value in schema.get("enum", [value])
    if isinstance(value, dict):
        assert value.keys() == schema["properties"].keys() == set(schema.get("required", value))
    for name, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        require(one, schema["items"] if isinstance(value, list) else schema["properties"][name])


def with_template(template):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def conversations(count=40):
    return [converse(random.Random(seed), asked=6) for seed in range(count)]


def test_the_wanted_call_is_what_users_told_last():
    changed = 0
    for talk in conversations():
        users = [m["content"] for m in talk.messages(9, talk.asked[0])[:-1] if m["role"] == "user"]
        for asked, call in zip(talk.asked, talk.wanted, strict=True):
            said = {name: PARAMETERS[name].say(v) for name, v in call["arguments"].items() if name != "case"}
            case = call["arguments"]["case"]
            assert case in asked and call["name"] == re.sub(r"Please (\w+) the (\w+) .*", r"\1_\2", asked)
            first, *later = (text for text in users if case in text)
            assert first.startswith(f"Case {case} (")
            elsewhere = [one for one in said.values() if one not in first]
            assert len(elsewhere) == len(later) <= 1 and all(one in later[0] for one in elsewhere)
            changed += len(later)
    assert changed > 40


def test_wanted_calls_fit_the_schemas_and_no_other_function_is_wanted():
    kinds = set()
    for talk in conversations():
        schemas = {f.name: f.schema["function"]["parameters"] for f in talk.functions}
        assert len(schemas) == 4 and len({c["name"] for c in talk.wanted}) == 2, "two functions distract"
        for call in talk.wanted:
            require(call["arguments"], schemas[call["name"]])
            kinds |= {kind for kind, some in KINDS.items() for name in call["arguments"] if name in some}
    assert kinds == set(KINDS)


def test_a_conversation_grows_by_minutes_alone():
    talk = converse(random.Random(3), asked=4)
    short, long = (talk.messages(n, talk.asked[0]) for n in (2, 30))
    told = [m["content"] for m in short if m["role"] == "user" and not m["content"].startswith("For the minutes")]
    assert told == [
        m["content"] for m in long if m["role"] == "user" and not m["content"].startswith("For the minutes")
    ]
    minutes = [m["content"] for m in long if m["content"].startswith("For the minutes")]
    assert len(set(minutes)) == 30 and len(long) == len(short) + 2 * 28
    assert not any(case in text for case in re.findall(r"case (\w+-\d+)", " ".join(talk.asked)) for text in minutes)
    assert talk.messages(5, "?") == converse(random.Random(3), asked=4).messages(5, "?")


def test_templates_without_functions_get_them_in_the_system_turn():
    talk = converse(random.Random(1), asked=2)
    messages = talk.messages(1, talk.asked[0])
    own, plain = (
        chat_text(with_template(t), messages, talk.functions) for t in (TEMPLATE_WITH_FUNCTIONS, PLAIN_TEMPLATE)
    )
    assert writes_functions(with_template(TEMPLATE_WITH_FUNCTIONS)) and not writes_functions(
        with_template(PLAIN_TEMPLATE)
    )
    assert "<tool_call>" not in own and own.endswith('CALL {"name": "') and plain.endswith('<tool_call>\n{"name": "')
    system, rest = plain.split("<|im_end|>", 1)
    assert all(json.dumps(f.schema) in system for f in talk.functions)
    shown_call = call_of(rest)
    assert shown_call == messages[2]["tool_calls"][0]["function"], "the first call shows the form"
    for template, parts in (
        (None, ("chat template",)),
        ("{{ raise_exception('no system turn') }}", ("no system turn",)),
    ):
        with raises(DataError, "tools", *parts):
            chat_text(with_template(template), messages, talk.functions)


def test_a_template_that_writes_today_s_date_gives_the_same_prompt_tomorrow():
    talk, texts = converse(random.Random(1), asked=2), []
    for _ in range(2):
        dated = "\nToday: {{ strftime_now('%d %b %Y %f') }}\n" + TEMPLATE_WITH_FUNCTIONS
        texts.append(chat_text(with_template(dated), talk.messages(1, talk.asked[0]), talk.functions))
    plain = chat_text(with_template(TEMPLATE_WITH_FUNCTIONS), talk.messages(1, talk.asked[0]), talk.functions)
    assert texts[0] == texts[1] == f"\nToday: {DAY}\n{plain}"


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "a", "arguments": {"x": 14, "y": {"z": [1.5, "b"]}}}\n</tool_call>',
        'Sure: {"parameters": {"y": {"z": [1.5, "b"]}, "x": 14.0}, "name": "a"}',
        '{"unrelated": 1} [TOOL_CALLS] [{"name": "a", "arguments": {"x": 14, "y": {"z": [1.5, "b"]}}}] {"name": "b"}',
    ],
)
def test_a_call_is_read_in_every_form_that_is_json(text):
    call = call_of(text)
    assert digest(call) == digest({"name": "a", "arguments": {"x": 14, "y": {"z": [1.5, "b"]}}})


@pytest.mark.parametrize(
    "other",
    [
        {"name": "b", "arguments": {"x": 1}},
        {"name": "a", "arguments": {"x": "1"}},
        {"name": "a", "arguments": {"x": True}},
        {"name": "a", "arguments": {"x": 1, "y": None}},
        {"name": "a", "arguments": {"x": [1]}},
    ],
)
def test_another_name_type_or_argument_is_another_call(other):
    assert digest(other) != digest({"name": "a", "arguments": {"x": 1}})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no call",
        '{"name": "a", "arguments": {"x": 1}',
        '{"name": "a", "arguments": [1]}',
        '{"name": 3, "arguments": {}}',
        '{"name": "a", "arguments": {"x": NaN}}',
        pytest.param('{"name": ' + "[" * 5000, id="brackets without end"),
        pytest.param('{"a": ' * 5000, id="braces without end"),
    ],
)
def test_what_is_no_call_does_not_parse(text):
    assert call_of(text) is None and digest(None) is None


def test_agreement_counts_the_calls_that_the_other_cache_could_write():
    base = {"calls:2000:0": {"calls": ["a", "b", None, "d"]}, "calls:4000:0": {"calls": ["a"]}}
    mine = {"calls:2000:0": {"calls": ["a", None, None, "x"]}, "calls:2000:1": {"calls": ["a"]}}
    same = calls_together(mine, base)
    assert same == [[True, False, False]]
    assert calls_together(base, base) == [[True] * 4], "a repeat asks the same at every length"
    found, against = agreement(same), paired([[(True, True), (False, True), (False, True)]])
    assert found["agreement"] == pytest.approx(1 / 3) and found["compared"] == 3
    assert found["agreement_low"] == pytest.approx(1 + against["difference_low"])
    alike = agreement([[True]] * 200)
    assert alike["agreement_low"] < 1 == alike["agreement_high"]
    assert agreement([]) == agreement([[]]) == {}


@pytest.mark.parametrize("name", ["base", "int4", "kivi2-simulated"])
def test_a_fork_writes_what_its_prompt_and_continuation_write_alone(name):
    model = tiny.model()
    drawn = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 60, (n,), generator=drawn) for n in (300, 211)]
    continuations = [[torch.randint(3, 60, (n,), generator=drawn) for n in lengths] for lengths in ((20, 33, 9), (70,))]
    f = base_factory(model) if name == "base" else factory(model, name.split("-")[0], simulate="simulated" in name)
    together = generate_forked(model, f, prompts, continuations, 12, 64)
    assert [len(some) for some in together] == [3, 1] and all(len(text) == 12 for some in together for text in some)
    alone = [
        [generate_forked(model, f, [p], [[c]], 12, 64)[0][0] for c in some]
        for p, some in zip(prompts, continuations, strict=True)
    ]
    assert together == alone
    if name == "base":
        whole = [torch.cat([p, c]) for p, some in zip(prompts, continuations, strict=True) for c in some]
        assert generate(model, f, whole, 12, 64) == [text for some in together for text in some]


def test_no_length_at_all_is_refused():
    with raises(SpecError, "contexts=()"):
        Options(contexts=())


def test_room_is_asked_for_before_a_model_runs():
    context = Context(ModelRef.of(tiny.model()), with_template(PLAIN_TEMPLATE), TEXTS, Options(contexts=(300,)))
    with raises(DataError, "tools calls:300:0", "300 tokens", "--contexts"):
        load("tools")(context)


@pytest.mark.skipif(
    trained() is None,
    reason=f"needs SmolLM2-135M-Instruct: a folder of that name in KVBITS_MODELS, or {embedded.INSTALL}",
)
def test_usual_lengths_have_room_for_all_calls():
    ref = ModelRef.find(trained())
    task = load("tools")(Context(ref, load_tokenizer(ref), TEXTS, Options()))
    assert len({key.split(":")[1] for key in task.item_keys()}) == len(ToolsTask.usual_contexts)


@pytest.mark.skipif(
    trained() is None,
    reason=f"needs SmolLM2-135M-Instruct: a folder of that name in KVBITS_MODELS, or {embedded.INSTALL}",
)
@pytest.mark.night
def test_calls_of_a_trained_model(tmp_path, monkeypatch):
    """Raw pages write what the stock cache writes, and the same questions come after a longer history."""
    monkeypatch.setattr(ToolsTask, "ASKED", 3)
    model, tokenizer = load_model(trained(), dtype="float32")
    options = Options(contexts=(1500,), repeats=1, chunk=256)
    context = Context(ModelRef.of(model), tokenizer, TEXTS, options)
    task, (key,) = load("tools")(context), load("tools")(context).item_keys()
    history, asked, wanted = task.item(key)
    longer = load("tools")(replace(context, options=Options(contexts=(2500,)))).item("calls:2500:0")
    assert 1300 < len(history) + len(asked[0]) <= 1500 < 2300 < len(longer[0]) + len(longer[1][0]) <= 2500
    assert longer[2] == wanted and [a.tolist() for a in longer[1]] == [a.tolist() for a in asked]
    evaluation = Evaluation(
        name="smollm2", schemes=["raw"], tasks=["tools"], texts=TEXTS, out=tmp_path, options=options
    )
    found = evaluation.run(model, tokenizer, progress=False)["tools"]["raw"]
    base, raw = (
        results.read(tmp_path / "smollm2-float32" / "tools" / f"{name}.json")["items"][key]
        for name in ("32-bit", "raw")
    )
    assert raw["answer"] == base["answer"] and all(raw["answer"])
    calls = [call_of(text) for text in raw["answer"]]
    assert raw["calls"] == list(map(digest, calls)) and found["parsed"] == sum(c is not None for c in calls) / 3
    assert found["accuracy"] == sum(digest(c) == digest(one) for c, one in zip(calls, wanted, strict=True)) / 3
    assert found.get("compared", 0) == sum(call is not None for call in base["calls"])


def test_a_table_says_how_sure_an_agreement_is():
    rows = {"32-bit": agreement([[True]] * 3) | {"parsed": 1.0}, "raw": agreement([[True], [True, False]]), "none": {}}
    columns, cells = shown.table("tools", rows, only=shown.NARROW["tools"][0])
    at = columns.index("agreement")
    assert re.fullmatch(r"66\.7% \(\d+\.\d% to \d+\.\d%\)", cells[1][at]) and cells[2][at] == ""
    assert "agreement low" not in columns
