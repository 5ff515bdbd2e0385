"""Texts come from files in the usual formats, windows are cut without overlap and begin as the tokenizer begins texts."""

import json
import sys
import types

import pytest
import tiny
import torch
from messages import raises

from kvbits.errors import DataError, SpecError
from kvbits.evaluate.texts import Text, novel, read_text, spread, spread_windows, windows


def test_wikitext_is_joined_the_usual_way(tmp_path):
    (tmp_path / "wiki.test.raw").write_text(" \n = Title = \n \n One line .\n")
    assert read_text(str(tmp_path / "wiki.test.raw")).content == "\n\n".join(["", " = Title = \n", "", " One line .\n"])
    (tmp_path / "wiki.cut.raw").write_text(" One line .\n Another .")
    assert read_text(str(tmp_path / "wiki.cut.raw")).content == " One line .\n\n\n Another .\n", "no line is lost"


def test_json_lines_and_books(tmp_path):
    (tmp_path / "c4.jsonl").write_text(
        json.dumps({"prefix": "a b", "gold_completion": " c"}) + "\n" + json.dumps({"text": "d"}) + "\n"
    )
    assert read_text(str(tmp_path / "c4.jsonl")).content == "a b c\n\nd"
    (tmp_path / "odd.jsonl").write_text('{"text": "one\u2028line\u0085still"}\n')  # as JSON allows, and MMLU has
    assert read_text(str(tmp_path / "odd.jsonl")).content == "one\u2028line\u0085still"
    (tmp_path / "gsm.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "2"}))
    assert read_text(str(tmp_path / "gsm.jsonl")).content == "1 + 1?\n2"
    (tmp_path / "book.txt").write_text(
        "licence\n*** START OF THIS PROJECT GUTENBERG EBOOK X ***\n\nIt was.\n*** END OF THIS PROJECT\nlicence"
    )
    assert read_text(str(tmp_path / "book.txt")).content == "It was.\n"
    (tmp_path / "code.py").write_text("x = 1\n")
    assert read_text(str(tmp_path / "code.py")) == Text("code", "x = 1\n")
    assert read_text("novel").content == novel()
    # the same text in every version, or calibrations of one model would differ between versions
    assert read_text("code").sha256.startswith("6d2beb299c4e56f9")


def test_what_cannot_be_read_says_why(tmp_path):
    for name, content, parts in (
        ("missing.txt", None, ("`novel`", "hub:ID")),
        ("bad.txt", b"\xff\xfe", ("UTF-8",)),
        ("bad.jsonl", b'{"other": 1}', ("line 1", "`text`")),
        ("empty.txt", b"  \n", ("text",)),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with raises(SpecError, tmp_path / name, *parts):
            read_text(str(tmp_path / name))


def test_hub_ids_go_through_datasets(monkeypatch):
    class Rows:
        column_names = ("text",)

        def __getitem__(self, name):
            return ["one", "two"]

    asked = []

    def load(repo, config, split):
        asked.append((repo, config, split))
        if repo == "none/there":
            raise ConnectionError("no network")
        return Rows()

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    assert read_text("hub:Salesforce/wikitext:wikitext-2-raw-v1:validation") == Text(
        "Salesforce--wikitext-wikitext-2-raw-v1-validation", "one\n\ntwo"
    )
    assert read_text("hub:ptb").name == "ptb"
    assert asked == [("Salesforce/wikitext", "wikitext-2-raw-v1", "validation"), ("ptb", None, "test")]
    with raises(SpecError, "none/there", "ConnectionError: no network"):
        read_text("hub:none/there")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with raises(SpecError, "pip install datasets"):
        read_text("hub:ptb")


@pytest.mark.parametrize("bos", [False, True])
def test_windows_follow_each_other_and_begin_as_texts_do(bos):
    tokenizer = tiny.tokenizer(bos)
    text = Text("t", "".join(chr(97 + i % 26) for i in range(200)))
    found = windows(tokenizer, text, count=3, length=50)
    assert found.shape == (3, 50)
    body = found[:, 1:] if bos else found
    assert tokenizer.decode(body.flatten()).replace(" ", "") == text.content[: body.numel()]
    assert bool((found[:, 0] == 1).all()) == bos
    with raises(DataError, "200 tokens", "5 windows", 51 if bos else 50, 250):
        windows(tokenizer, text, count=5, length=51 if bos else 50)
    assert found.dtype == torch.int64


def test_spread_windows_reach_over_a_text_and_more_of_them_only_add():
    text = Text("t", "".join(chr(97 + i % 26) for i in range(1010)))
    every = windows(tiny.tokenizer(), text, count=20, length=50)
    seen = [spread_windows(tiny.tokenizer(), text, count=n, length=50) for n in range(1, 21)]
    assert list(seen[-1]) == [0, 10, 5, 15, 2, 12, 7, 17, 1, 11, 6, 16, 3, 13, 8, 18, 4, 14, 9, 19]
    for n, found in enumerate(seen, 1):
        assert list(found) == list(seen[-1])[:n] and all(torch.equal(ids, every[i]) for i, ids in found.items())
    with raises(DataError, "1010 tokens", "21 windows", 50, 1050):
        spread_windows(tiny.tokenizer(), text, count=21, length=50)


@pytest.mark.parametrize("total", [1, 2, 3, 7, 8, 100, 279])
def test_however_many_are_spread_each_stands_once_and_none_is_far_from_another(total):
    assert sorted(spread(total, total)) == list(range(total))
    for count in range(1, total + 1):
        found = sorted(spread(total, count))
        gaps = [b - a for a, b in zip(found, [*found[1:], total], strict=True)]
        assert max(gaps) <= 2 * -(-total // count)
