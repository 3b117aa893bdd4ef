"""`listwise index` with what cameras wrote into photos, as it is typed."""

from pathlib import Path

from PIL import Image

QUICK = ("--workers", 0, "--device", "cpu", "--json")


def test_date_and_camera_become_attributes_if_requested(run, model):
    folder = Path("photos")
    folder.mkdir()
    exif = Image.Exif()
    exif[0x0110] = "Pixel 6"
    exif.get_ifd(0x8769)[0x9003] = "2019:12:31 23:59:59"
    Image.effect_noise((60, 50), 80).save(folder / "a.jpg", exif=exif)
    Image.effect_noise((60, 50), 40).save(folder / "b.jpg")
    Path("t.csv").write_text("path,price,camera\nphotos/a.jpg,12,mine\n")
    written = {"date": "2019-12-31T23:59:59", "camera": "Pixel 6"}

    def attributes():
        entries = run("index", "list", "shop", "--json")["entries"]
        return sorted((entry["attributes"] for entry in entries), key=len)

    run("index", "build", "shop", folder, "--model", model, *QUICK)
    assert attributes() == [{}, {}]
    again = run("index", "add", "shop", folder, "--exif", *QUICK)
    assert (again["updated"], again["unchanged"]) == (1, 1)  # nothing is described again
    assert attributes() == [{}, written]
    assert run("index", "add", "shop", folder, *QUICK)["unchanged"] == 2
    where = ("--where", "date contains '2019-12'", "--json")
    assert [entry["id"] for entry in run("index", "list", "shop", *where)["entries"]] == ["a.jpg"]
    # A column of a table comes first.
    run("index", "remove", "shop", "a.jpg", "--json")
    run("index", "add", "shop", "t.csv", "--exif", *QUICK)
    assert attributes() == [{}, written | {"price": "12", "camera": "mine"}]
