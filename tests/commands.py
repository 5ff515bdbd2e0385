"""Commands as they are typed, and what they load in tests."""

from __future__ import annotations

import json
import shlex

from typer.testing import CliRunner

from kvbits.cli import app


def run(command, code=0, **how):
    result = CliRunner().invoke(app, shlex.split(command), **how)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def text_of(command):
    """Return what a command prints, on one line."""
    return " ".join(run(command).stdout.split())


def run_json(command, code=0):
    result = run(f"{command} --json", code)
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def error(command, *parts, **how):
    """The one line of an error, with all these parts in it."""
    result = run(command, code=2, **how)
    assert result.stdout == "" and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert all(part in result.stderr for part in parts), result.stderr
    return result.stderr


def loads(monkeypatch, make, tokenizer):
    """Commands load what `make()` returns; the names that they asked for."""
    asked = []
    monkeypatch.setattr(
        "kvbits.integrations.models.load_model", lambda name, **how: asked.append(name) or (make(), tokenizer)
    )
    monkeypatch.setattr("kvbits.integrations.models.load_tokenizer", lambda name: tokenizer)
    monkeypatch.setattr("kvbits.geometry.load_config", lambda name: make().config)
    return asked
