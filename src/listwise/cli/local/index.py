"""`listwise local codebook | index | search`: an ASMK* index of local features."""

from pathlib import Path
from typing import Annotated

from rich.markup import escape
from rich.table import Table

from listwise.cli import options
from listwise.cli.output import open_console, print_json, print_result, say, stoppable
from listwise.progress import progress_bar

CODEBOOK = """Example:
  listwise local codebook other-photos.arrow words.safetensors

Learn from photos that resemble the database, but not from photos that you evaluate with.
"""
INDEX = """Examples:
  listwise local index shop-local photos.arrow --codebook words.safetensors
  listwise local index shop-local more.arrow             # add photos
  listwise local index shop-local --remove chairs/a.jpg  # remove a photo
"""
SEARCH = """Examples:
  listwise local search shop-local chair.jpg
  listwise local search shop-local chair.jpg --features photos.arrow
"""


def codebook(
    features: Annotated[
        list[Path], options.argument("FEATURES", "Feature files that listwise local extract wrote.")
    ],
    out: Annotated[Path, options.argument("OUT", "Codebook to write (.safetensors).")],
    words: Annotated[int, options.integer("Number of visual words.", min=2)] = 65_536,
    per_word: Annotated[
        int, options.integer("Maximum number of features per word to learn from.", min=1)
    ] = 60,
    iterations: Annotated[int, options.integer("Number of k-means iterations.", min=1)] = 10,
    seed: options.Seed = 0,
    device: options.Device = "auto",
) -> None:
    """Learn a codebook of visual words from local features."""
    from listwise.local.asmk.kmeans import learn_from_files

    console = open_console()
    with stoppable(), progress_bar(console, "k-means", iterations) as advance:
        how = {"words": words, "per_word": per_word, "iterations": iterations, "seed": seed}
        found = learn_from_files(
            features, out, **how, on_iteration=lambda _: advance(1), device=device
        )
    say(
        console,
        f"wrote {len(found)} visual words ({found.info.extractor}) to {out}",
        "bold",
    )


def index(
    index: Annotated[Path, options.argument("INDEX", "Folder of the index.")],
    features: Annotated[
        list[Path] | None,
        options.argument("FEATURES", "Feature files of the photos to add."),
    ] = None,
    codebook: Annotated[
        Path | None, options.path("Codebook of a new index; the index stores a copy.")
    ] = None,
    remove: Annotated[
        list[str] | None, options.entry("Remove the photo with this id; repeat for several.")
    ] = None,
    device: options.Device = "auto",
    json: options.AsJson = False,
) -> None:
    """Build an ASMK* index of local features, add photos to it or remove them."""
    from listwise.local.asmk.index import change_index
    from listwise.local.storage import FeatureFile

    console = open_console(json)
    files = [FeatureFile.open(path) for path in features or []]
    with stoppable(), progress_bar(console, "indexing", sum(map(len, files))) as advance:
        opened = change_index(index, files, codebook, remove or [], device, advance)
    facts = opened.info()
    each = f"{facts['words_per_photo']:.0f} words and {facts['bytes_per_photo'] / 1000:.1f} kB each"
    print_result(console, json, facts, f"{facts['photos']} photos in {index}, {each}")


def search(
    index: Annotated[Path, options.argument("INDEX", "Folder that listwise local index wrote.")],
    photo: Annotated[Path, options.argument("PHOTO", "Photo of what to find.")],
    features: Annotated[
        Path | None,
        options.path("Feature file of the indexed photos, to verify the first 100 results."),
    ] = None,
    box: Annotated[str | None, options.box("Search by this part of the photo, in pixels.")] = None,
    k: Annotated[int, options.integer("Maximum number of results.", "-k", min=1)] = 10,
    delf: options.Delf = None,
    count: options.Count = None,
    device: options.Device = "auto",
    json: options.AsJson = False,
) -> None:
    """Find the photos of an ASMK* index that are most similar to a photo."""
    from listwise.data import PhotoFile
    from listwise.local.extract import open_extractor
    from listwise.local.search import search_by_photo

    console = open_console(json)
    query = PhotoFile(str(photo), None if box is None else options.parse_box(box))
    extractor = open_extractor(delf, count, device)
    with console.status("searching"):
        hits = search_by_photo(index, query, extractor, k, features, device)
    if json:
        rows = [{"id": hit.id, "score": hit.score, "inliers": hit.inliers} for hit in hits]
        print_json({"index": index, "results": rows})
        return
    table = Table("", "score", "inliers", "photo", box=None, padding=(0, 2, 0, 0))
    for rank, hit in enumerate(hits, start=1):
        points = "" if hit.inliers is None else str(hit.inliers)
        table.add_row(str(rank), f"{hit.score:.4f}", points, escape(hit.id))
    console.print(table)
