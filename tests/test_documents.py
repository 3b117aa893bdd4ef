"""The code in README and docs is true: it runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


# Those whose code needs photos have tests of their own.
ALONE = [path for path in DOCUMENTS if path.name not in ("data.md", "training.md")]


@pytest.mark.parametrize("document", ALONE, ids=lambda path: path.name)
def test_python_blocks_run(document, photos, tmp_path, monkeypatch):
    if document.name == "README.md":
        (tmp_path / "photos").symlink_to(photos)
    blocks = re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": document.stem}
    for block in blocks:
        exec(compile(block, document.name, "exec"), names)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target
