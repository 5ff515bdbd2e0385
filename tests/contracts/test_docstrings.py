"""A docstring's first word says what it describes: an action of a function, a thing for the rest."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kvbits

ACTIONS = """
    Abandon Add Allocate Announce Answer Append Assign Attend Begin Bind Break Bring Broadcast Build Calibrate
    Call Carry Change Check Choose Close Collect Compare Compile Compute Copy Count Crop Cut Deal Decide Decode Dequantize
    Describe Do Draw Drop Empty End Estimate Evict Explain Extend Feed Fill Find Flush Forget Free Generate Give Hand
    Have Hold Import Install Invert Join Judge Keep Launch Lead Let List Load Make Measure Merge Move Name Note Open
    Pack Parse Pin Plan Point Predict Prepare Print Put Quantize Raise Read Recode Recompute Refer Refuse Register
    Remove Rename Repeat Replace Report Require Reset Return Round Run Screen See Send Set Show Sort Split Spend Spread
    Start Store Switch Take Turn Undo Wait Warn Wrap Write Yield
"""
VERBS = frozenset(ACTIONS.split())
"""Verbs that functions open with. Add one if it is an action in the base form."""
QUESTIONS = ("How", "If", "Of", "That", "What", "When", "Where", "Whether", "Which", "Who", "Whose", "Why")
"""Words that leave the noun to the end of the sentence."""
ROOT = Path(__file__).parents[2]


def question(kind, text):
    """Return what is wrong if a docstring opens with a word of QUESTIONS, else None."""
    return "opens with a question word" if text.split()[0].strip(",.:;").capitalize() in QUESTIONS else None


def fault(kind, text):
    """Return what is wrong with the head of a docstring of a "function", a "thing" or a "module", or None."""
    words = text.split()
    first, second = words[0].strip(",.:;"), words[1] if len(words) > 1 else ""
    if found := question(kind, text):
        return found
    if kind == "function":
        if first not in VERBS or second == "of":
            return "does not open with a verb of VERBS"
    elif second not in ("in", "of", "that", "with") and any(
        form in VERBS for form in (first, first.removesuffix("s"), first.removesuffix("es"))
    ):
        return "opens with a verb, not with a noun"
    return None


def constant_text(node):
    """Return the text of a statement that is nothing but a string, or None."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return None


def docstrings(tree):
    """Yield (kind, line, text) of modules, classes, functions, and constants that a string follows."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module) and (text := ast.get_docstring(node)):
            yield "module", 1, text
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and (
            text := ast.get_docstring(node)
        ):
            is_read = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
            if isinstance(node, ast.ClassDef) or not is_read:
                yield "thing" if isinstance(node, ast.ClassDef) else "function", node.lineno, text
            elif text.split()[0] != "Return":  # a property is either: a thing, or a function that returns it
                yield "thing", node.lineno, text
        if isinstance(node, (ast.Module, ast.ClassDef)):
            for before, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(before, (ast.Assign, ast.AnnAssign)) and (text := constant_text(after)):
                    yield "thing", before.lineno, text


def faults_below(folder, judge):
    """Return (number of docstrings, faults) of the Python files below a folder, judged by `judge(kind, text)`."""
    read, faults = 0, []
    for path in sorted(folder.rglob("*.py")):
        for kind, line, text in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
            read += 1
            if found := judge(kind, text):
                faults.append(f"{path.relative_to(folder)}:{line} {found}: {text.splitlines()[0]}")
    return read, faults


@pytest.mark.parametrize(
    ("folder", "least"),
    [
        (Path(kvbits.__file__).parent, 1000),
        (ROOT / "benchmarks", 300),
        (ROOT / "studies", 40),
        (ROOT / "docs", 50),
        (ROOT / "examples", 5),
    ],
    ids=lambda x: x.name if isinstance(x, Path) else None,
)
def test_docstrings_open_with_a_verb_or_a_noun(folder, least):
    read, faults = faults_below(folder, fault)
    assert read > least
    assert not faults, "\n".join(faults)


def test_docstrings_of_tests_open_with_no_question_word():
    """A test's docstring may also be a sentence."""
    read, faults = faults_below(ROOT / "tests", question)
    assert read > 1000
    assert not faults, "\n".join(faults)


def test_faults_are_found():
    faults = {
        "function": [
            "What the pages are.",
            "The pages of a row.",
            "Name of a pool.",
            "Returns a row.",
            "float32 [H, D].",
        ],
        "thing": ["Who shares a scale.", "Closes pages without waiting.", "Store a token.", "Of a block."],
    }
    for kind, texts in faults.items():
        assert all(fault(kind, text) for text in texts)
    assert not fault("function", "Return the pages of a row.") and not fault("function", "Name a pool.")
    assert not fault("thing", "Names of presets.") and not fault("thing", "Pages of one layer.")
