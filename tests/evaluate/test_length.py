"""Loss at long contexts: chains replayed, words copied, states tracked, RULER's prompts; and how sure a difference of
two caches is.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter

import pytest
import tiny
import torch
from messages import raises
from nightly import at_night

from kvbits import schemes
from kvbits.calibrate.sampling import Sample
from kvbits.errors import DataError, SpecError, UnsupportedError
from kvbits.evaluate import results, shown
from kvbits.evaluate.caches import base_factory, factory, sides
from kvbits.evaluate.calibrator import Calibrator
from kvbits.evaluate.fidelity import drift, octaves
from kvbits.evaluate.paired import paired
from kvbits.evaluate.rows import follow
from kvbits.evaluate.run import Evaluation
from kvbits.evaluate.settings import Options
from kvbits.evaluate.tasks import Context, load, replay, text
from kvbits.evaluate.tasks.ruler import TASKS
from kvbits.evaluate.tasks.tracking import STATES, Table
from kvbits.evaluate.texts import Text, novel
from kvbits.model_ref import ModelRef
from kvbits.report import markdown
from kvbits.report.collect import collect

TEXTS = (Text("one", novel()[:40_000]),)


@pytest.fixture(scope="module")
def model():
    return tiny.model()


def run(model, out, task, names, alone=False, **options):
    return Evaluation(
        name="tiny", schemes=names, tasks=[task], texts=TEXTS, out=out, options=Options(**options), alone=alone
    ).run(model, tiny.tokenizer(), progress=False)[task]


def task_of(name, model=None, **options):
    return load(name)(Context(ModelRef.of(model or tiny.model()), tiny.tokenizer(), TEXTS, Options(**options)))


def test_a_difference_of_pairs_is_mcnemar_s():
    pairs = [(True, True)] * 80 + [(False, False)] * 8 + [(False, True)] * 10 + [(True, False)] * 2
    found = paired([[pair] for pair in pairs])
    assert (found["lost"], found["gained"]) == (10, 2) and found["difference"] == pytest.approx(-0.08)
    assert found["p"] == pytest.approx(2 * (1 + 12 + 66) / 2**12)
    assert found["difference_low"] == pytest.approx(-8 / 102 - 1.959964 * (13 - 64 / 102) ** 0.5 / 102)
    same = paired([[(True, True)]] * 50)
    assert same["p"] == 1 and same["difference_low"] < 0 < same["difference_high"] < 0.1, (
        "agreement alone does not prove that nothing differs"
    )
    assert paired([[(True, False)]] * 3000)["p"] < 1e-300 and paired([]) == paired([[]]) == {}


def test_questions_that_fail_together_count_as_one():
    """Ten answers of a history that is lost as a whole say as much as one answer of each of ten times fewer."""
    lost = [True] * 18 + [False] * 2
    together, alone = (paired([[(right, True)] * size for right in lost]) for size in (10, 1))
    assert together["difference"] == alone["difference"] == pytest.approx(-0.1) and together["lost"] == 20
    assert {**together, "lost": 2} == pytest.approx(alone, rel=0.02)
    apart = paired([[(right, True)] for right in lost * 10])
    width, narrow = (one["difference_high"] - one["difference_low"] for one in (together, apart))
    assert width > 2.5 * narrow and together["p"] == 0.5 and apart["p"] < 1e-5
    even = paired([[(True, True)] * 9 + [(False, True)]] * 20)  # each history loses one call
    assert even["difference_low"] > together["difference_low"] and even["p"] == pytest.approx(2 / 2**20)


def test_an_interval_of_few_clusters_holds_what_is_true_as_often_as_it_says():
    """Histories of ten calls, of which some lose nearly all: 95 % intervals that call all calls independent hold the
    true share three times of five.
    """
    drawn = random.Random(7)

    def held(size):
        covered = 0
        for _ in range(400):
            chances = [drawn.choice((0.02, 0.02, 0.6)) for _ in range(12)]
            calls = [[(drawn.random() >= chance, True) for _ in range(10)] for chance in chances]
            flat = [call for some in calls for call in some]
            found = paired([flat[i : i + size] for i in range(0, len(flat), size)])
            covered += found["difference_low"] <= -(0.02 + 0.02 + 0.6) / 3 <= found["difference_high"]
        return covered / 400

    assert held(10) > 0.91 and held(1) < 0.85


def test_drift_is_the_growth_of_kl_when_the_position_doubles():
    positions = list(range(100, 5000))
    found = octaves(positions, [0.001 * p**0.5 for p in positions], [p % 10 != 0 for p in positions])
    assert (
        list(found) == ["64", "128", "256", "512", "1024", "2048", "4096"]
        and found["64"]["tokens"] == 28
        and found["512"]["flips"] == 51
    )
    whole = {at: (one["tokens"], one["kl"] / one["tokens"]) for at, one in found.items() if at != "4096"}
    assert drift(whole) == pytest.approx(2**0.5 - 1, rel=1e-3)
    assert (
        drift({at: one for at, one in whole.items() if int(at) < 1024}) is None
        and drift({"512": (5, 0.0), "1024": (5, 0.1)}) is None
    )


def test_a_chain_goes_on_with_another_prompt_where_the_model_ends_it(model):
    base, starts = base_factory(model), [[5, 6, 7, 8], [9, 10]]
    with_turn = [11, 12, 13]

    def write(rows, end):
        draws = [random.Random(row) for row in rows]
        return replay.write(
            model, base, [starts[row] for row in rows], [itertools.repeat(with_turn) for _ in rows], 120, end, draws
        )

    free = write([0, 1], None)
    assert [chain[: len(s)] for chain, s in zip(free, starts, strict=True)] == starts and [len(c) for c in free] == [
        120,
        120,
    ]
    assert write([1], None)[0] == free[1], "a chain does not depend on those beside it"
    end = free[0][40]
    first = free[0].index(end, 4)
    ended = write([0, 1], end)[0]
    assert ended[: first + 1] == free[0][: first + 1] and ended[first + 1 : first + 4] == with_turn


def test_a_chain_is_written_once_and_replayed_by_caches_that_come_later(model, tmp_path, monkeypatch):
    first = run(model, tmp_path, "replay", ["raw", "kivi2"], alone=True, windows=2, length=700)
    assert (
        first["raw"]["kl_mean"] < 1e-6
        and 0 < first["kivi2-keys"]["kl_mean"] < first["kivi2"]["kl_mean"] > first["kivi2-values"]["kl_mean"] > 0
    )
    items = {n: results.read(tmp_path / "tiny-float32" / "replay" / f"{n}.json")["items"] for n in ("32-bit", "kivi2")}
    for key, item in items["32-bit"].items():
        assert (
            len(item["chain"]) == 700
            and item["prompt_tokens"] + item["num_tokens"] + 1 == 700
            and "chain" not in items["kivi2"][key]
        )
        assert (
            item["prompt_tokens"] < items["kivi2"][key]["first_flip"] <= 700
            and items["kivi2"][key]["kl_worst"] > item["prompt_tokens"]
        )
        assert sum(one["tokens"] for one in items["kivi2"][key]["octaves"].values()) == item["num_tokens"]
    monkeypatch.setattr(replay, "write", lambda *a: pytest.fail("written again"))
    again = run(model, tmp_path, "replay", ["kivi2", "int8"], windows=2, length=700)
    assert 0 < again["int8"]["kl_mean"] < again["kivi2"]["kl_mean"] == first["kivi2"]["kl_mean"]
    cells = next(iter(collect(tmp_path).models.values())).tasks["replay"]
    _, table = markdown.octaves(cells)
    assert (
        "512 to 1,023" in table
        and "| kivi2-values | " in table
        and f"{first['kivi2']['octaves']['512']['kl_mean']:.5f}" in table
    )


def test_a_chain_is_written_by_pages_where_the_model_can_have_them(model, tmp_path, monkeypatch):
    """A stock cache copies all it holds at each token; in float32 both write the same."""

    def chain(out):
        run(model, out, "replay", ["int8_centered"], windows=1, length=600)
        return results.read(out / "tiny-float32" / "replay" / "32-bit.json")["items"]["planning@0"]["chain"]

    def refuse(*args):
        raise UnsupportedError("no pages")

    written, by = replay.write, []
    monkeypatch.setattr(replay, "write", lambda *a: by.append(a[1].name) or written(*a))
    pages = chain(tmp_path / "pages")
    monkeypatch.setattr(replay, "factory", refuse)
    assert chain(tmp_path / "stock") == pages and by == ["raw", "32-bit"]


@pytest.mark.night
def test_caches_of_another_chain_are_measured_anew(model, tmp_path, monkeypatch):
    def items(name):
        return results.read(tmp_path / "tiny-float32" / "replay" / f"{name}.json")["items"]

    run(model, tmp_path, "replay", ["int4"], windows=1, length=600)
    (old,) = items("int4").values()
    (tmp_path / "tiny-float32" / "replay" / "32-bit.json").unlink()
    written = replay.write
    monkeypatch.setattr(replay, "write", lambda *a: [[*chain[:-1], 5] for chain in written(*a)])
    run(model, tmp_path, "replay", ["int8"], windows=1, length=600)
    again = run(model, tmp_path, "replay", ["int4"], windows=1, length=600)
    (base,), (new,) = items("32-bit").values(), items("int4").values()
    assert (
        base["chain"][-1] == 5
        and new["chain_sha256"] == base["chain_sha256"] == replay.chain_sha256(base["chain"]) != old["chain_sha256"]
    )
    assert again["int4"]["kl_mean"] == new["kl"] / new["num_tokens"]
    other = tmp_path / "gsm8k.jsonl"
    other.write_text('{"question": "How many?", "answer": "#### 4"}\n')
    run(model, tmp_path / "data", "replay", ["int8"], windows=2, length=600, data={"gsm8k": str(other)})
    other.write_text('{"question": "How much?", "answer": "#### 4"}\n')
    with raises(SpecError, "prompts"):
        run(model, tmp_path / "data", "replay", ["int8"], windows=2, length=600, data={"gsm8k": str(other)})
    for line in ('{"prompt": "def f():"}', '{"question": null}', '{"question": " "}'):
        other.write_text(f'{{"question": "How much?"}}\n{line}\n')
        with raises(SpecError, "gsm8k.jsonl", "object 2", "'question'"):
            run(model, tmp_path / "data", "replay", ["int8"], windows=2, length=600, data={"gsm8k": str(other)})


@pytest.mark.night
def test_a_replay_that_is_stopped_goes_on_with_the_next_chain(model, tmp_path, monkeypatch):
    compared, wrote, done = text.compare, replay.write, []

    def stop(*a, **how):
        done.append(1)
        if len(done) == 2:
            raise KeyboardInterrupt
        return compared(*a, **how)

    monkeypatch.setattr(text, "compare", stop)
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path, "replay", ["int8"], windows=3, length=600, batch_size=2)
    first = results.read(tmp_path / "tiny-float32" / "replay" / "int8.json")["items"]
    assert list(first) == ["planning@0", "planning@1"]
    together = []
    monkeypatch.setattr(replay, "write", lambda *a: together.append(len(a[2])) or wrote(*a))
    run(model, tmp_path, "replay", ["int8"], windows=3, length=600, batch_size=2)
    found = results.read(tmp_path / "tiny-float32" / "replay" / "int8.json")["items"]
    assert (
        list(found) == ["planning@0", "planning@1", "planning@2"]
        and found["planning@0"] == first["planning@0"]
        and together == [1]
    )


@pytest.mark.night
def test_windows_and_chains_that_go_together_are_measured_as_each_alone(model, tmp_path):
    for task in ("fidelity", "replay"):
        alone, together = (
            run(model, tmp_path / str(n), task, ["kivi2"], windows=3, length=600, batch_size=n) for n in (1, 3)
        )
        one, three = (results.read(tmp_path / str(n) / "tiny-float32" / task / "kivi2.json")["items"] for n in (1, 3))
        assert list(one) == list(three) and len(one) == 3
        for key, item in one.items():
            other = three[key]
            assert other["kl"] == pytest.approx(item["kl"], rel=1e-3) and other["nll"] == pytest.approx(
                item["nll"], rel=1e-5
            ), (task, key)
            for name in ("num_tokens", "kl_worst", "read_raw", "bytes_planned", "saturated"):
                assert other[name] == item[name], (task, name)
            assert (item["batch"], other["batch"]) == (1, 3)
        assert together["kivi2"]["windows"] == alone["kivi2"]["windows"] == 3
        assert (
            alone["kivi2"]["tokens_per_s"]
            and together["kivi2"]["tokens_per_s"] is None
            and "speed_ratio" not in together["kivi2"]
        )


def test_elements_beyond_static_scales_are_counted_for_each_window(model, tmp_path):
    text = Text("other", novel()[50_000:90_000])
    for n in (1, 3):
        Evaluation(
            name="tiny",
            schemes=["int8_static"],
            tasks=["fidelity"],
            texts=TEXTS,
            out=tmp_path / str(n),
            calibration_text=text,
            options=Options(windows=3, length=600, batch_size=n),
        ).run(model, tiny.tokenizer(), progress=False)
    one, three = (
        results.read(tmp_path / str(n) / "tiny-float32" / "fidelity" / "int8_static.json")["items"] for n in (1, 3)
    )
    assert sum(item["saturated"] for item in one.values()) > 0
    assert {item["saturated"] for item in three.values()} == {-(-sum(item["saturated"] for item in one.values()) // 3)}


@pytest.mark.night
def test_answers_are_drawn_alike_for_all_caches_and_more_draws_add_to_fewer(model, tmp_path):
    data = {"gsm8k": str(tmp_path / "gsm8k.jsonl")}
    problems = [{"question": f"What is {i} and {i}?", "answer": f"#### {2 * i}"} for i in range(3)]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(p) + "\n" for p in problems))

    def items(out, name):
        return results.read(tmp_path / out / "tiny-float32" / "gsm8k" / f"{name}.json")["items"]

    def ask(out, draws, **how):
        return run(model, tmp_path / out, "gsm8k", ["raw"], data=data, shots=0, draws=draws, **how)["raw"]

    found = ask("a", 2, batch_size=1)
    assert (found["problems"], found["answers"]) == (3, 6) and list(items("a", "raw"))[3:] == [
        f"{key.split('#')[0]}#2" for key in list(items("a", "raw"))[:3]
    ]
    assert [r["tokens"] for r in items("a", "raw").values()] == [r["tokens"] for r in items("a", "32-bit").values()]
    ask("b", 2, batch_size=4)
    assert [(k, r["tokens"], r["chosen"]) for k, r in items("a", "raw").items()] == [
        (k, r["tokens"], r["chosen"]) for k, r in items("b", "raw").items()
    ]
    before = items("b", "raw")
    assert ask("b", 3)["answers"] == 9 and {k: items("b", "raw")[k] for k in before} == before
    with raises(SpecError, "sampling"):
        ask("b", 0)
    with raises(SpecError, "seed"):
        ask("b", 2, seed=1)
    with raises(SpecError, "draws=-1"):
        Options(draws=-1)


def test_drawn_answers_of_programs_belong_to_a_seed(tmp_path):
    (tmp_path / "h.jsonl").write_text(
        json.dumps({"task_id": "h/0", "prompt": "def f():\n", "entry_point": "f", "test": "def check(f): pass"}) + "\n"
    )
    settings = [
        task_of("humaneval", data={"humaneval": str(tmp_path / "h.jsonl")}, draws=n, seed=s).settings
        for n, s in ((0, 0), (0, 1), (2, 0), (2, 1))
    ]
    assert settings[0] == settings[1] and settings[2] != settings[3] and settings[0] != settings[2]


def test_a_chain_is_not_read_in_long_chunks():
    with raises(SpecError, 16, "--chunk 32"):
        task_of("replay", chunk=32)
    with raises(DataError, "8000 tokens", 4096, "--length"):
        task_of("replay", length=8000)
    with raises(DataError, "200 tokens", 512, "--length 514") as refused:
        task_of("replay", length=200, windows=5)
    least = int(re.search(r"--length (\d+)", str(refused.value))[1])
    assert task_of("replay", length=least, windows=5).size("planning@0") == least


def test_texts_of_unlike_lengths_are_followed_as_each_alone(model):
    drawn = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 60, (n,), generator=drawn) for n in (150, 203, 301)]
    texts = [torch.randint(3, 60, (n,), generator=drawn).tolist() for n in (5, 17, 40)]
    f = factory(model, "int4")
    together = follow(model, f, prompts, texts, 64, text_chunk=16)
    assert [len(t) for t in together] == [5, 17, 40]
    assert together == [follow(model, f, [p], [t], 64, text_chunk=16)[0] for p, t in zip(prompts, texts, strict=True)]


@pytest.mark.parametrize("name", ["copying", *at_night("tracking")])
def test_a_part_is_right_if_plain_greedy_decoding_would_have_written_it(model, tmp_path, name):
    options = {"contexts": (200, 400), "repeats": 2, "new_tokens": 120}
    found = run(model, tmp_path, name, ["raw", "kivi2"], **options)
    task = task_of(name, model, **options)
    items = results.read(tmp_path / "tiny-float32" / name / "raw.json")["items"]
    hits = 0
    for key in task.item_keys():
        prompt, text, where = task.item(key)
        with torch.no_grad():
            chosen = (
                model(torch.cat([prompt, torch.tensor(text)])[None]).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
            )
        assert items[key]["right"] == "".join("01"[chosen[a:b] == text[a:b]] for a, b in where) and where
        hits += sum(chosen[i] == text[i] for a, b in where for i in range(a, b))
    assert hits == sum(i["tokens_right"] for i in items.values()) > 0
    assert found["raw"]["lost"] == found["raw"]["gained"] == 0 and found["raw"]["parts"] == sum(
        s["parts"] for s in found["raw"]["by_kind"].values()
    )
    assert "difference" in (headers := shown.table(name, found)[0]) and "difference low" not in headers
    (table,) = markdown.kinds(next(iter(collect(tmp_path).models.values())).tasks[name])
    assert f"| {next(iter(found['raw']['by_kind']))} | " in table


def test_words_to_copy_lie_as_far_back_as_was_asked():
    task = task_of("copying", contexts=(600,), new_tokens=150)
    prompt, text, where = task.item("words:600:0")
    assert (
        600 <= len(prompt) < 670
        and prompt[: len(text)].tolist() == text
        and 150 <= sum(b - a for a, b in where) < 220
        and where[0][0] > 0
    )


def test_what_is_asked_of_a_state_is_what_was_told_last():
    changed = dict.fromkeys(STATES, 0)
    for seed in range(8):
        for state, make in STATES.items():
            tell = make(random.Random(seed))
            text, asked = "".join(tell.step() for _ in range(60)), 0
            for piece, question in tell.questions():
                if question:
                    line = text.rsplit("\n", 1)[1]
                    wanted, told = STILL[state](text, line)
                    assert wanted == piece.strip(), (state, line)
                    asked, changed[state] = asked + 1, changed[state] + (told > 1)
                text += piece
            assert asked == {"variables": 10, "lists": 30, "sums": 12}[state]
    assert all(changed.values()), "some of what is asked for was told more than once"


def last_numbers(text, line):
    """(what comes next in a line of a table, how often its name was told)."""
    name, before = line.split(" =")
    told = re.findall(rf"^{name} = ([\d, ]+)\n", text, re.M)
    return told[-1].split(", ")[before.count(",")], len(told)


def next_count(text, line):
    told = re.findall(rf"^{line} (\d+)\.", text, re.M)
    return str(int(told[-1]) + 1), len(told)


STILL = {"variables": last_numbers, "lists": last_numbers, "sums": next_count}


def test_noise_and_not_harder_questions_fill_a_prompt():
    task = task_of("tracking", contexts=(700, 1800))
    for kind in STATES:
        short, long = (task.context.tokenizer.decode(task.parts(kind, n, random.Random(1))[0]) for n in (700, 1800))
        assert long.startswith(short) and (kind == "sums" or long.count("=") == short.count("=") == Table.STEPS)
    with raises(DataError, "tracking", "12 tokens", "--contexts"):
        task_of("tracking", contexts=(12,))


@pytest.mark.parametrize("kind", list(TASKS))
def test_a_prompt_of_ruler_has_the_answer_and_fills_its_room(kind):
    task = task_of("ruler", contexts=(3000,))
    decode = task.context.tokenizer.decode
    for r in range(2):
        prompt, asked = task.item(f"{kind}:3000:{r}")
        body = task.context.tokenizer(asked.lead + "".join(asked.hidden), add_special_tokens=False)["input_ids"]
        assert 2400 < len(prompt) <= 3000 and len(body) < 3000
        text = "".join(decode(prompt).split())
        assert all(text.count("".join(w.split())) >= 1 for w in asked.wanted) and len(set(asked.wanted)) == len(
            asked.wanted
        )
        assert (
            text.endswith("".join(asked.question.split()))
            and prompt.tolist() != task.item(f"{kind}:3000:{r + 1}")[0].tolist()
        )
    assert len(TASKS) == 13


def test_the_wanted_needles_are_those_of_the_names_asked_for():
    task = task_of("ruler", contexts=(3000,))
    _, asked = task.item("niah_multiquery:3000:0")
    for name, number in zip(re.search(r"for (.*)\?", asked.question)[1].split(" and "), asked.wanted, strict=True):
        assert any(name in h and number in h for h in asked.hidden)
    _, chain = task.item("vt:3000:0")
    assert [h.split()[1] for h in chain.hidden] == chain.wanted and [
        h.split()[-1].rstrip(".") for h in chain.hidden[1:]
    ] == chain.wanted[:-1]


@pytest.mark.parametrize("shown", [200, 1000])
def test_the_wanted_words_of_a_coded_text_are_those_that_come_most_often(shown):
    for seed in range(100):
        asked = TASKS["fwe"](random.Random(seed), iter(()), 4096)
        counts = Counter(word.strip() for word in itertools.islice(asked.body, shown))
        assert [word for word, _ in counts.most_common(3)] == asked.wanted


def test_ruler_counts_what_an_answer_has_of_what_was_wanted(model, tmp_path, monkeypatch):
    from kvbits.evaluate.tasks import ruler

    def answered(model, f, prompts, new_tokens, chunk, stop):
        keys = list(TASKS)
        said = [
            task.item(f"{kind}:3000:0")[1].wanted[0] if f.name == "int8" or i % 2 else "none"
            for i, kind in enumerate(keys)
        ]
        return [task.encode(text)[:new_tokens] for text in said][: len(prompts)]

    task = task_of("ruler", contexts=(3000,))
    monkeypatch.setattr(ruler, "generate", answered)
    monkeypatch.setattr(
        type(task.context.tokenizer), "decode", lambda self, ids, **how: "".join(self.convert_ids_to_tokens(ids))
    )
    found = run(model, tmp_path, "ruler", ["int8"], contexts=(3000,), batch_size=13)
    parts = found["int8"]["by_kind"]
    assert (
        parts["cwe:3000"]["accuracy"] == pytest.approx(0.1)
        and parts["niah_single_1:3000"]["accuracy"] == 1
        and parts["vt:3000"]["accuracy"] == 0.2
    )
    assert found["int8"]["gained"] == 7 and found["int8"]["lost"] == 0 and found["int8"]["difference_low"] > 0
    with raises(DataError, "300 tokens", "--contexts of 341"):
        task_of("ruler", contexts=(300,))
    with raises(DataError, "ruler niah_single_1:4090:0", "4116 tokens", 4096, "--contexts"):
        task_of("ruler", contexts=(4090,))


@pytest.mark.filterwarnings("ignore:.*positions of a frame")
def test_keys_alone_and_values_alone_are_schemes_that_the_calibration_of_the_whole_serves(model):
    names = {n: [s.name for s in sides(schemes.get(n, head_dim=64))] for n in ("klt3", "raw", "tiered")}
    assert names == {"klt3": ["klt3-keys", "klt3-values"], "raw": [], "tiered": []}
    whole = schemes.get("klt3", head_dim=64)
    made = Calibrator(model, tiny.tokenizer(), Text("other", novel()[50_000:60_000]), sample=Sample(2, 128))(whole)
    keys, values = sides(whole)
    assert (
        made.fits(model.config, keys)
        and keys.key == whole.key
        and keys.value.is_raw
        and values.value == whole.value
        and values.key.is_raw
    )
