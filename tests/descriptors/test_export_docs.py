"""The code of the page on export, beside the other tests that import what exports a network."""

import onnx
from test_documents import DOCS, blocks


def test_the_page_on_export(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for _, code in blocks(DOCS / "export.md", "python"):
        exec(compile(code, "export.md", "exec"), names)
    assert names["exported"].dim == names["model"].dim
    assert names["exported"].fingerprint == names["model"].fingerprint
    onnx.checker.check_model("model.onnx")
