"""`listwise index upgrade`, `changes`, `rollback` and `discard`, as they are typed."""

import json
import shutil
from pathlib import Path

import torch
from tiny_net import TINY_NET

from listwise.models import RetrievalNet

QUICK = ("--workers", 0, "--device", "cpu")


def test_upgrade_changes_rollback_discard(listwise, photos):
    shutil.copytree(photos / "class0", "photos")
    for seed, name in enumerate(("model", "better")):
        torch.manual_seed(seed)
        RetrievalNet(TINY_NET, weights="random").save(name)
    listwise("index", "build", "shop", "photos", "--model", "model", *QUICK)
    code, _, err = listwise("index", "changes", "shop")
    assert code == 2
    assert "no earlier generation to compare with" in err
    Path("photos/0.jpg").rename("away.jpg")
    code, _, err = listwise("index", "upgrade", "shop", "--model", "better", *QUICK)
    assert code == 2
    assert "1 of the 6 photos of shop do not exist any more" in err
    assert "with --skip-missing" in err
    Path("away.jpg").rename("photos/0.jpg")
    code, out, err = listwise("index", "upgrade", "shop", "--model", "better", *QUICK)
    assert code == 0, err
    assert "6 photos to describe, about " in out
    assert f"shop uses the model {Path('better').absolute()} now: 6 photos, 6 photos desc" in out
    _, out, _ = listwise("index", "info", "shop")
    assert "current 1, previous 0" in out
    code, out, _ = listwise("index", "changes", "shop", "--queries", 4, "--report", "page.html")
    assert code == 0
    assert "4 queries: 100.0 % of the first 10 results are the same" in out  # there are only six
    page = Path("page.html").read_text()
    assert page.count("<section") == 4
    assert page.count("<img") == 4 * (1 + 5 + 5)
    _, out, _ = listwise("index", "changes", "shop", "-k", 1, "--json")
    answer = json.loads(out)
    assert len(answer["queries"]) == 6
    kept = [query["before"][0]["id"] == query["after"][0]["id"] for query in answer["queries"]]
    assert kept == sorted(kept)
    assert [query["kept"] for query in answer["queries"]] == list(map(int, kept))
    assert answer["kept"] == answer["same_first"] == sum(kept) / 6
    code, out, _ = listwise("index", "rollback", "shop", "--json", *QUICK)
    assert code == 0
    answer = json.loads(out)
    assert (answer["entries"], answer["described"]) == (6, 0)
    assert answer["model"] == str(Path("model").absolute())
    code, out, _ = listwise("index", "discard", "shop")
    assert "a rollback is not possible any more" in out
    code, _, err = listwise("index", "rollback", "shop", *QUICK)
    assert code == 2
    assert "no earlier generation" in err
