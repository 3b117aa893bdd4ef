"""`listwise local`, from photos to figures."""

import json

import pytest


def test_from_photos_to_search(run, photos):
    out = run("local", "extract", photos, "all.arrow", "--count", 60, "--workers", 0)
    assert "of 48 photos" in out
    out = run("local", "codebook", "all.arrow", "words.safetensors", "--words", 400)
    assert "wrote 400 visual words (hessian-affine-rootsift-60" in out
    out = run("local", "index", "found", "all.arrow", "--codebook", "words.safetensors")
    assert "48 photos in found" in out
    query = ("local", "search", "found", photos / "class1" / "2.jpg", "--count", 60)
    first = run(*query, "--json", "-k", 3)["results"][0]
    assert (first["id"], first["inliers"]) == ("class1/2.jpg", None)
    out = run(*query, "--features", "all.arrow")
    assert out.split()[:3] == ["score", "inliers", "photo"]
    assert "class1/2.jpg" in out.splitlines()[1]
    assert run("local", "index", "found", "--remove", "class1/2.jpg", "--json")["photos"] == 47
    found = run(*query, "--json", "-k", 47)["results"]
    assert "class1/2.jpg" not in [each["id"] for each in found]
    assert "48 photos in found" in run("local", "index", "found", "all.arrow")


@pytest.mark.slow
def test_a_benchmark_is_evaluated(run, model, toy_landmarks, tmp_path):
    here = ("--workers", 0)
    run("local", "extract", toy_landmarks / "train.csv", "other.arrow", "--count", 100, *here)
    run("local", "codebook", "other.arrow", "words.safetensors", "--words", 256)
    start = ("local", "evaluate", toy_landmarks, "--codebook", "words.safetensors", "--count", 100)
    command = (*start, "--models", model, "--report", "report.html", "--json")
    rows = run(*command)["figures"]
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
    assert run(*command, *here)["figures"] == rows  # from what was kept
    (kept,) = tmp_path.glob("local-*-hesaff/model-*")
    again = run(*start, "--descriptors", kept, "--no-verify", "--json", *here)["figures"]
    assert again == {
        "HesAff-rSIFT-ASMK*": rows["HesAff-rSIFT-ASMK*"],
        str(kept): rows["model"],
    }
