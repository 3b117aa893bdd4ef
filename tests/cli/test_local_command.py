"""`listwise local`, from photos to figures."""

import json

import pytest
import torch
from tiny_net import TINY_NET

from listwise.models import RetrievalNet


def test_from_photos_to_search(listwise, photos, tmp_path):
    code, out, err = listwise(
        "local", "extract", photos, "all.arrow", "--count", 60, "--workers", 0
    )
    assert (code, err) == (0, "")
    assert "of 48 photos" in out
    code, out, err = listwise("local", "codebook", "all.arrow", "words.safetensors", "--words", 400)
    assert (code, err) == (0, "")
    assert "wrote 400 visual words (hessian-affine-rootsift-60" in out
    code, out, _ = listwise(
        "local", "index", "found", "all.arrow", "--codebook", "words.safetensors"
    )
    assert code == 0
    assert "48 photos in found" in out
    query = ("local", "search", "found", photos / "class1" / "2.jpg", "--count", 60)
    _, out, _ = listwise(*query, "--json", "-k", 3)
    first = json.loads(out)["results"][0]
    assert first["id"] == "class1/2.jpg"
    assert first["inliers"] is None
    code, out, _ = listwise(*query, "--features", "all.arrow")
    assert code == 0
    assert "class1/2.jpg" in out.splitlines()[1]
    code, out, _ = listwise("local", "index", "found", "--remove", "class1/2.jpg", "--json")
    assert (code, json.loads(out)["photos"]) == (0, 47)
    _, out, _ = listwise(*query, "--json", "-k", 47)
    assert "class1/2.jpg" not in [each["id"] for each in json.loads(out)["results"]]
    code, out, _ = listwise("local", "index", "found", "all.arrow")
    assert "48 photos in found" in out


def test_a_mistake_is_one_line(listwise, photos):
    few = photos / "class0"
    listwise("local", "extract", few, "all.arrow", "--count", 60, "--workers", 0)
    listwise("local", "codebook", "all.arrow", "words.safetensors", "--words", 40)
    listwise("local", "index", "found", "all.arrow", "--codebook", "words.safetensors")
    photo = photos / "class0" / "0.jpg"
    for arguments, said in [
        (("search", "nowhere", photo), "no index at nowhere"),
        (("search", "found", photo), "extract the features with --count 60, or"),
        (("search", "found", "no.jpg", "--count", 60), "no.jpg"),
        (("index", "new", "all.arrow"), "--codebook"),
        (("index", "found", "--remove", "none.jpg"), "has no photo none.jpg"),
        (("index", "found", "none.arrow"), "no file of local features at none.arrow"),
        (("codebook", "all.arrow", "w", "--words", 100000), "give more photos"),
        (("extract", "nowhere", "x.arrow"), "nowhere"),
        (("evaluate", photos, "--codebook", "words.safetensors"), "a benchmark contains"),
        (("extract", photos, "x.arrow", "--delf", "nowhere"), "nowhere"),
        (("codebook", "all.arrow", "all.arrow", "--words", 40), "all.arrow exists"),
    ]:
        code, _, err = listwise("local", *arguments)
        assert code == 2, arguments
        assert said in err, (arguments, err)
        assert err.count("\n") == 1


def test_a_wrong_codebook_leaves_no_index_behind(listwise, photos):
    for count in (60, 50):
        few = photos / "class0"
        listwise("local", "extract", few, f"{count}.arrow", "--count", count, "--workers", 0)
        listwise("local", "codebook", f"{count}.arrow", f"words/{count}", "--words", 40)
    code, _, err = listwise("local", "index", "found", "60.arrow", "--codebook", "words/50")
    assert code == 2
    assert "hessian-affine-rootsift-50" in err
    code, out, err = listwise("local", "index", "found", "60.arrow", "--codebook", "words/60")
    assert (code, err) == (0, "")
    assert "6 photos in found" in out


@pytest.mark.slow
def test_a_benchmark_is_evaluated(listwise, toy_landmarks, tmp_path):
    here = ("--workers", 0)
    code, _, err = listwise(
        "local", "extract", toy_landmarks / "train.csv", "other.arrow", "--count", 100, *here
    )
    assert (code, err) == (0, "")
    listwise("local", "codebook", "other.arrow", "words.safetensors", "--words", 256)
    torch.manual_seed(0)
    RetrievalNet(TINY_NET, weights="random").save("model")
    command = ("local", "evaluate", toy_landmarks, "--codebook", "words.safetensors")
    command += ("--count", 100, "--model", "model", "--report", "report.html", "--json")
    code, out, err = listwise(*command)
    assert code == 0, err
    rows = json.loads(out)["figures"]
    medium = {name: found["Medium"]["mAP"] for name, found in rows.items()}
    assert list(medium) == ["HesAff-rSIFT-ASMK*", "HesAff-rSIFT-ASMK* + SP", "model", "model + SP"]
    # A random network knows nothing, so that points which match must help it.
    assert medium["model + SP"] > medium["model"]
    assert medium["HesAff-rSIFT-ASMK*"] > medium["model"]
    page = (tmp_path / "report.html").read_text()
    assert page.count('<th scope="row">HesAff-<wbr>rSIFT-<wbr>ASMK*') == 2  # lines of the table
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert data["models"] == ["model", "model + SP"]
    assert max(inliers for inliers, _ in data["matches"]) >= 8
    for query in data["queries"]:
        plain, verified = (lists[1]["entries"] for lists in query["lists"])  # Medium
        assert all(len(entry) == 4 for entry in plain)
        counts = [data["matches"][entry[4]][0] for entry in verified]
        counted = [count for count in counts if count >= 8]
        assert counts[: len(counted)] == sorted(counted, reverse=True)
    assert json.loads(listwise(*command, *here)[1])["figures"] == rows  # from what was kept
    (kept,) = tmp_path.glob("local-*-hesaff/model-*")
    command = (*command[:7], "--descriptors", kept, "--no-verify", "--json", *here)
    code, out, err = listwise(*command)
    assert code == 0, err
    again = json.loads(out)["figures"]
    assert again == {
        "HesAff-rSIFT-ASMK*": rows["HesAff-rSIFT-ASMK*"],
        str(kept): rows["model"],
    }
