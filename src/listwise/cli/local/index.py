"""`listwise local codebook | index | search`: an ASMK* index of local features."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from listwise.cli import options
from listwise.cli.output import open_console, print_json, print_result, say, stoppable
from listwise.progress import progress_bar

CODEBOOK = options.examples("""Example:
  listwise local codebook other-photos.arrow words.safetensors

Learn it from photos like those you search, but not from the ones you evaluate with.
""")
INDEX = options.examples("""Examples:
  listwise local index shop-local photos.arrow --codebook words.safetensors
  listwise local index shop-local more.arrow                  add to it
  listwise local index shop-local --remove chairs/a.jpg       remove from it
""")
SEARCH = options.examples("""Examples:
  listwise local search shop-local chair.jpg
  listwise local search shop-local chair.jpg --features photos.arrow     with verification
""")


def codebook(
    features: Annotated[list[Path], typer.Argument(help="Files of listwise local extract.")],
    out: Annotated[Path, typer.Argument(help="The codebook to write (.safetensors).")],
    words: Annotated[int, typer.Option(min=2, help="Number of visual words.")] = 65_536,
    per_word: Annotated[int, typer.Option(min=1, help="Maximum features per word.")] = 60,
    iterations: Annotated[int, typer.Option(min=1, help="Iterations of k-means.")] = 10,
    seed: options.Seed = 0,
    device: options.Device = "auto",
) -> None:
    """Learn the visual words of local features."""
    from listwise.local.asmk.kmeans import learn_from_files

    console = open_console()
    with stoppable(), progress_bar(console, "k-means", iterations) as advance:
        how = {"words": words, "per_word": per_word, "iterations": iterations, "seed": seed}
        found = learn_from_files(
            features, out, **how, on_iteration=lambda _: advance(1), device=device
        )
    say(console, f"{len(found)} words of {found.info.extractor} in {out}", "bold")


def index(
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="Folder of the index.")],
    features: Annotated[
        list[Path] | None, typer.Argument(help="Files of listwise local extract to add.")
    ] = None,
    codebook: Annotated[
        Path | None, typer.Option(help="Codebook of a new index, which keeps a copy.")
    ] = None,
    remove: Annotated[list[str] | None, typer.Option(help="Remove a photo, by its id.")] = None,
    device: options.Device = "auto",
    json: options.AsJson = False,
) -> None:
    """Make an ASMK* index of local features, add photos to it, or remove some."""
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
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="Of listwise local index.")],
    photo: Annotated[Path, typer.Argument(help="The query.")],
    features: Annotated[
        Path | None,
        typer.Option(help="Features of the indexed photos, to verify the first 100 results."),
    ] = None,
    box: Annotated[
        str | None, typer.Option(metavar="X0,Y0,X1,Y1", help="Search with this part of the photo.")
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="Number of results.")] = 10,
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
    table = Table("", "score", "points", "photo", box=None, padding=(0, 2, 0, 0))
    for rank, hit in enumerate(hits, start=1):
        points = "" if hit.inliers is None else str(hit.inliers)
        table.add_row(str(rank), f"{hit.score:.4f}", points, escape(hit.id))
    console.print(table)
