"""Greedy divergence and retrieval: prompts have their exact length, answers are judged as greedy decoding would write
them.
"""

from __future__ import annotations

import pytest
import tiny
import torch
from messages import raises
from nightly import at_night

from kvbits.errors import DataError, SpecError
from kvbits.evaluate.caches import base_factory, factory
from kvbits.evaluate.rows import Rows, alike, generate, score
from kvbits.evaluate.settings import Options
from kvbits.evaluate.tasks import Context, load
from kvbits.evaluate.texts import Text, novel
from kvbits.model_ref import ModelRef

OPTIONS = {
    "windows": 2,
    "context": 150,
    "new_tokens": 12,
    "chunk": 32,
    "contexts": (1600, 1900),
    "depths": (0.0, 0.5, 1.0),
}


@pytest.fixture(scope="module")
def model():
    return tiny.model()


def task(name, model, bos=False, **changes):
    return load(name)(
        Context(ModelRef.of(model), tiny.tokenizer(bos), (Text("t", novel()[:30_000]),), Options(**(OPTIONS | changes)))
    )


def test_greedy_tokens_are_generates(model):
    ids = torch.tensor(tiny.tokenizer()(novel()[:150])["input_ids"])
    want = model.generate(
        ids[None],
        attention_mask=torch.ones(1, 150, dtype=torch.int64),
        do_sample=False,
        max_new_tokens=12,
        min_new_tokens=12,
        pad_token_id=2,
    )
    assert generate(model, base_factory(model), [ids], 12, 32) == [want[0, 150:].tolist()]
    assert len(generate(model, base_factory(model), [ids], 12, 32, stop=lambda tokens: len(tokens) == 3)[0]) == 3


LENGTHS = (150, 17, 64, 299, 1)


@pytest.fixture(scope="module")
def prompts():
    ids = torch.tensor(tiny.tokenizer()(novel()[:3000])["input_ids"])
    return [ids[100 * i : 100 * i + n] for i, n in enumerate(LENGTHS)]


def calibrated(model, name):
    from kvbits.calibrate import calibrate, prompts_from_text

    return factory(
        model,
        name,
        calibration=lambda s: calibrate(
            model, prompts_from_text(tiny.tokenizer(), novel()[40_000:44_000], length=300, num_prompts=4), s
        ),
    )


@pytest.mark.parametrize("name", ["base", "raw", "int4", "quanto4", *at_night("kivi2", "nuq3-1%")])
def test_a_prompt_does_not_depend_on_those_beside_it(model, prompts, name):
    """Prompts of many lengths together: same logits, tokens and likelihoods as each alone, whatever pages they close."""
    if name == "quanto4":
        pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    f = base_factory(model) if name == "base" else calibrated(model, name)
    if name != "quanto4":
        rows = Rows(model, f.make(len(prompts), 400), prompts, 32)
        for row, p in enumerate(prompts):
            alone = Rows(model, f.make(1, 400), [p], 32).logits[0]
            assert torch.allclose(rows.logits[row], alone, atol=2e-4), f"prompt of {len(p)} tokens"
    assert generate(model, f, prompts, 9, 32) == [generate(model, f, [p], 9, 32)[0] for p in prompts]
    short = generate(model, f, prompts, 40, 32, stop=lambda tokens: len(tokens) % 5 == 0 or tokens[-1] < 20)
    assert short == [
        generate(model, f, [p], 40, 32, stop=lambda tokens: len(tokens) % 5 == 0 or tokens[-1] < 20)[0] for p in prompts
    ]
    continuations = [[torch.arange(3, 3 + n) + i for n in (1, 4, 40)[: 1 + i % 3]] for i in range(len(prompts))]
    together = score(model, f, prompts, continuations, 32)
    for p, some, got in zip(prompts, continuations, together, strict=True):
        assert len(got) == len(some)
        for (nats, greedy), want in zip(got, score(model, f, [p], [some], 32)[0], strict=True):
            assert nats == pytest.approx(want[0], abs=2e-3) and greedy == want[1]


def test_likelihoods_are_those_of_one_plain_pass(model, prompts):
    continuations = [[torch.tensor([5, 6, 7]), torch.tensor([9])]] * len(prompts)
    for p, some, got in zip(
        prompts, continuations, score(model, base_factory(model), prompts, continuations, 32), strict=True
    ):
        for c, (nats, _) in zip(some, got, strict=True):
            with torch.no_grad():
                log_p = torch.log_softmax(model(torch.cat([p, c])[None]).logits[0], -1)
            assert nats == pytest.approx(log_p[len(p) - 1 : -1].gather(1, c[:, None]).sum().item(), abs=1e-4)


def test_an_empty_prompt_is_refused(model):
    with raises(DataError, "1 prompts", 0):
        Rows(model, base_factory(model).make(1, 5), [torch.zeros(0, dtype=torch.int64)], 8)


def test_first_divergence_is_where_texts_differ(model):
    t = task("greedy", model)
    factories = {"32-bit": base_factory(model), "raw": factory(model, "raw"), "kivi2": factory(model, "kivi2")}
    records = {k: t.run(k, factories, lambda n: None) for k in t.item_keys()}
    for r in records.values():
        assert r["32-bit"]["first_divergence"] == r["raw"]["first_divergence"] == 12
        a, b, d = r["32-bit"]["tokens"], r["kivi2"]["tokens"], r["kivi2"]["first_divergence"]
        assert a[:d] == b[:d] and (d == 12 or a[d] != b[d])
    found = t.summary({k: r["kivi2"] for k, r in records.items()}, {})
    assert found["prompts"] == 2 and 0 <= found["first_divergence"] <= 12 and 0 <= found["agreement"] <= 1


def test_follow_says_what_a_cache_writes_after_the_bases_own_tokens(model):
    """Checked against single passes over the same tokens: the token chosen at each place, whatever was chosen before
    it.
    """
    t, written = task("follow", model), task("greedy", model)
    factories = {"32-bit": base_factory(model), "raw": factory(model, "raw"), "kivi2": factory(model, "kivi2")}
    for key in t.item_keys():
        text = written.run(key, {"32-bit": factories["32-bit"]}, lambda n: None)["32-bit"]["tokens"]
        prompt = t._windows[key][:150]
        found = t.run(key, factories, lambda n: None)
        assert found["32-bit"]["tokens"] == found["raw"]["tokens"] == text and found["raw"]["same"] == 12
        alone = Rows(model, factories["kivi2"].make(1, 162), [prompt], 32)
        want = [alone.logits.argmax(-1).item(), *alone.feed(torch.tensor([text[:-1]]), keep=11).argmax(-1)[0].tolist()]
        assert found["kivi2"]["tokens"] == want and found["kivi2"]["same"] == sum(
            a == b for a, b in zip(want, text, strict=True)
        )
    long = task("follow", model, new_tokens=70)
    assert long.run(long.item_keys()[0], factories, lambda n: None)["32-bit"]["same"] == 70, (
        "several passes of a chunk read the text where it stands"
    )


def test_prompts_of_alike_length_go_together():
    assert alike([700, 130, 2500, 90, 300, 129, 1024], 128) == [[3, 5, 1], [4, 0], [6], [2]]
    assert alike([5, 1, 128], 128) == [[1, 0, 2]] and alike([], 128) == []
    assert sorted(i for group in alike(list(LENGTHS), 32) for i in group) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("bos", [False, True])
def test_prompts_have_their_exact_length_and_hold_the_answer(model, bos):
    t, again, other = (task("entities", model, bos, seed=seed) for seed in (0, 0, 1))
    assert len(t.item_keys()) == 6
    for key in t.item_keys():
        ids, answer, _ = t.item(key)
        assert len(ids) == int(key.split(":")[1]) and (ids[0] == 1) == bos
        text, wanted = ("".join(t.context.tokenizer.convert_ids_to_tokens(x)).strip() for x in (ids, answer))
        assert wanted.isdigit() and wanted in text and not text.endswith(wanted)
    key = t.item_keys()[1]
    assert torch.equal(again.item(key)[0], t.item(key)[0]) and other.item(key)[1] != t.item(key)[1]


def test_found_means_that_greedy_decoding_writes_it(model, monkeypatch):
    t = task("entities", model)
    key = t.item_keys()[0]
    ids, _, _ = t.item(key)
    written = generate(model, base_factory(model), [ids], 4, 32)[0]
    for answer, found in ((written, True), ([*written[:3], (written[3] + 1) % 50], False)):
        monkeypatch.setattr(t, "item", lambda key, answer=answer: (ids, answer, [(0, 4)]))
        record = t.run(key, {"32-bit": base_factory(model), "raw": factory(model, "raw")}, lambda n: None)
        assert record["32-bit"] == record["raw"] == {"right": str(int(found)), "tokens": 4, "tokens_right": 3 + found}


@pytest.mark.parametrize("name", ["greedy", "follow", *at_night("entities")])
def test_records_do_not_depend_on_the_batch(model, name, monkeypatch):
    t = task(name, model, contexts=(1600,), repeats=2)
    factories = {"32-bit": base_factory(model), "int4": factory(model, "int4")}
    if name == "entities":  # answers of different lengths
        real = t.item
        monkeypatch.setattr(t, "item", lambda key: (real(key)[0], real(key)[1] * (1 + int(key[-1])), real(key)[2]))
    together = t.run_batch(t.item_keys(), factories, lambda n: None)
    for key in t.item_keys():
        alone = t.run(key, factories, lambda n: None)
        assert together[key] == alone


def test_shares_are_said_by_depth_and_length(model):
    records = {f"{key}:0": {"right": right} for key, right in {"0:700": "1", "1:700": "0", "1:900": "0"}.items()}
    base = records | {"1:700:0": {"right": "1"}}
    found = task("entities", model).summary(records, base)
    assert {kind: s["accuracy"] for kind, s in found["by_kind"].items()} == {"0:700": 1, "1:700": 0, "1:900": 0}
    assert found["accuracy"] == pytest.approx(1 / 3) and (found["lost"], found["gained"]) == (1, 0)


def test_prompts_that_cannot_be_are_refused(model):
    with raises(DataError, 4116, 4096, "--contexts"):
        task("entities", model, contexts=(4096,))
    with raises(DataError, "50 tokens", 977, "--contexts"):
        task("entities", model, contexts=(50,))
    with raises(SpecError, 1.5, 0, 1):
        Options(depths=(1.5,))
