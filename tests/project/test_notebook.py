"""The notebook runs from top to bottom, and is stored without outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT

from needs import needs

pytestmark = pytest.mark.slow

NOTEBOOK = ROOT / "examples" / "trl_to_page.ipynb"


def code_cells() -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_is_stored_without_outputs() -> None:
    assert len(code_cells()) > 5
    assert not [cell for cell in code_cells() if cell["outputs"] or cell["execution_count"] is not None]


def test_the_script_changes_by_its_import_alone() -> None:
    """The cell of TRL's trainer and the cell of ours differ by the import and the output's folder."""
    sources = ["".join(cell["source"]) for cell in code_cells()]
    plain, ours = (source.splitlines() for source in sources if "trainer = DPOTrainer(" in source)
    assert ours[0] == "from catto import CATTOConfig as DPOConfig, CATTOTrainer as DPOTrainer"
    assert [line.replace("my-catto-model", "my-dpo-model") for line in ours[2:]] == plain


@needs("notebook")
def test_the_notebook_runs_to_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient
    import nbformat

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "dpo+catto: accuracy" in said
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "DPO + CATTO" in page
    assert (tmp_path / "evaluation" / "dpo+catto" / "model_card.md").exists()
    assert "<svg" in notebook.cells[-1]["outputs"][0]["data"]["image/svg+xml"]
