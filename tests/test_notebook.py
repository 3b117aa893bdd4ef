"""The notebook of examples/ runs from start to end, and shows a picture at each step."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "examples" / "first_search.ipynb"


def test_it_has_no_output():
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.slow
def test_it_runs_and_shows_pictures(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=1800, resources=place).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = [output["data"] for output in outputs if "data" in output]
    assert sum("image/png" in data for data in shown) == 4  # photos, dropped, found, served
    pages = [data.get("text/html", "") for data in shown]
    assert sum("<img" in page for page in pages) == 2  # the index and the hits
    assert any("<iframe" in page for page in pages)
    text = "".join(output["text"] for output in outputs if output.output_type == "stream")
    kept, dropped = map(int, re.search(r"(\d+) photos are kept, (\d+) are left out", text).groups())
    assert (kept + dropped, dropped) == (120, pytest.approx(2, abs=2))
    before, after = map(float, re.search(r"validation mAP: ([\d.]+) -> ([\d.]+)", text).groups())
    assert after > before + 0.05
    assert "Hit('building004_00.jpg', score=1.0000)" in str(shown)
    assert not list(tmp_path.glob("*.ipynb"))
