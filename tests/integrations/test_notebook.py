"""The notebook runs from top to bottom, on a tiny model in the place of the embedded one."""

import importlib.util
import json
from pathlib import Path

import pytest
import tiny

NOTEBOOK = Path(__file__).parents[2] / "examples" / "kvbits.ipynb"


@pytest.mark.night
@pytest.mark.skipif(importlib.util.find_spec("nbclient") is None, reason="no nbclient (pip install '.[docs]')")
def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    import nbclient
    import nbformat

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("KVBITS_CACHE", str(tmp_path / "kept"))
    tiny.model().save_pretrained(tmp_path / "model")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    text = NOTEBOOK.read_text()
    notebook = nbformat.reads(
        text.replace('load_model(\\"embedded\\"', 'load_model(\\"model\\"').replace("[:4000]", "[:1000]"), 4
    )
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", ()))
    assert all(word in said for word in ("raw: ", "klt4: ", "second time: ", "kivi4"))
    assert not any(cell.get("outputs") for cell in json.loads(text)["cells"]), "committed without what it printed"
