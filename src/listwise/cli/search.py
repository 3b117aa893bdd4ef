"""`listwise search` and `serve`: find photos in an index."""

import getpass
import os
import secrets
import shlex
from contextlib import nullcontext
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import typer
from rich.table import Column

from listwise.cli.command import Box, command, make_app
from listwise.cli.output import (
    PICTURES,
    Output,
    check_output,
    has_screen,
    require_index,
    shown_in_browser,
)
from listwise.errors import InputError, validated
from listwise.progress import count_of
from listwise.search.options import SearchOptions
from listwise.servers import announce, search_by_server

if TYPE_CHECKING:
    from listwise.search import Index

app = make_app("Search an index, on the command line or over HTTP.")


@command(app, SearchOptions)
def search(
    output: Output,
    index: str,
    photos: list[str] | None = None,
    *,
    entry: list[str] | None = None,
    box: list[Box] | None = None,
    save: bool = False,
    sheet: Path | None = None,
    open: bool = False,
    model: Path | None = None,
    device: str = "auto",
    **options: Any,
) -> None:
    """Find the photos of an index that are most similar to one or more photos.

    Args:
        photos: One or more photos of what to find.
        entry: Search by the entry with this id; repeat for several.
        box: Search by this part of the photo, in pixels; one box per photo.
        save: Store `same` and `different` as marks in the index.
        sheet: Write a picture of the results to this file (.png).
        open: Write a picture of the results, and open it if this machine has a display.
        model: Model folder or ONNX file, if the model has moved.

    Examples:
      listwise search shop chair.jpg                      # the ten nearest photos
      listwise search shop room.jpg --box 120,80,400,380  # part of a photo
      listwise search shop a.jpg b.jpg --expand --rerank  # two photos, one query
      listwise search shop chair.jpg --quality best       # with local features
      listwise search shop --entry chairs/a.jpg --where "price < 100" -k 50
      listwise search shop a.jpg --same chairs/7.jpg --different sofas/2.jpg
    """
    names, entries, boxes = photos or [], entry or [], box or []
    if not names and not entries:
        raise InputError("give a photo to search by, or --entry with the id of an entry")
    require_index(index)
    check_output(sheet, *PICTURES)
    chosen = validated(SearchOptions, options)
    if save and not chosen.marked:
        raise InputError("nothing to save: give --same or --different")
    if open and sheet is None:
        sheet = Path(mkdtemp(prefix="listwise-"), "results.png")
    answer = None
    by_photo = not (entries or model or chosen.marked or chosen.marks)
    if by_photo and device == "auto":
        with output.console.status("searching"):
            answer = search_by_server(index, names, boxes, chosen.model_dump())
    if answer is None or output.json or sheet is not None:
        from listwise.search import open_index

        with open_index(index, model, device=device, create=False) as opened:
            if answer is None:
                with output.console.status("searching"):
                    answer = _answer(opened, names, entries, boxes, chosen)
            if save:  # only after a search that did not fail
                _save(opened, names, entries, boxes, chosen)
            found = opened.store.get([int(hit["key"]) for hit in answer["results"]])
            for hit in answer["results"]:
                entry_found = found.get(int(hit["key"]))  # None if it was removed meanwhile
                hit["path"] = entry_found and entry_found.path
            if sheet is not None:
                from listwise.search import Hit
                from listwise.search.views import draw_sheet

                hits = [
                    Hit(found[key], hit["score"], hit["inliers"])
                    for hit in answer["results"]
                    if (key := int(hit["key"])) in found
                ]
                draw_sheet(opened, hits, names, boxes, entries).save(sheet)
    if open and has_screen():
        typer.launch(str(sheet))
    facts = {"results": answer["results"], "verified": answer["verified"], "sheet": sheet}
    output.answer({"index": index, **facts})
    print_results(output, answer["results"])
    if chosen.rerank:
        verified = count_of(answer["verified"], "photo")
        output.say(f"compared the local features of {verified} with the query")
    if sheet is not None:
        output.say(f"wrote a picture of the results to {sheet}")
    if save:
        output.say(f"stored the marks; list them with listwise index marks {shlex.quote(index)}")


def _answer(
    index: "Index",
    photos: list[str],
    entries: list[str],
    boxes: list[Box],
    options: SearchOptions,
) -> dict[str, Any]:
    """Search an index: the results, and the number of photos whose local features were compared."""
    from listwise.search.views import Result

    first, end, wanted = options.start, options.start + options.k, options.model_dump()
    wanted |= {"average": True}
    if not options.rerank:
        hits = page = index.search(photos, like=entries, box=boxes, **wanted)
    else:  # photos that are not among the first `k` are compared too
        from listwise.local.rerank import TOP
        from listwise.search.refinement import DIFFUSED

        wanted |= {"start": 0, "k": max(end, DIFFUSED if options.diffuses else TOP)}
        hits = index.search(photos, like=entries, box=boxes, **wanted)
        page = hits[first:end]
    verified = sum(hit.inliers is not None for hit in hits)
    return {"results": [Result.found(hit).model_dump() for hit in page], "verified": verified}


def _save(
    index: "Index", photos: list[str], entries: list[str], boxes: list[Box], options: SearchOptions
) -> None:
    """Store the marks of a search by one photo or one entry."""
    given: list[Any] = [*map(Path, photos), *(index.entry(name).key for name in entries)]
    if len(given) != 1:
        raise InputError("--save needs one photo or one --entry: marks belong to one photo")
    try:
        person = getpass.getuser()
    except (OSError, KeyError):  # the user has no name
        person = ""
    box = boxes[0] if boxes else None
    same, different = options.same, options.different
    if not index.marks.add(given[0], same=same, different=different, box=box, by=person):
        raise InputError("nothing to save: the marked entry is the query itself")


def print_results(output: Output, results: list[dict[str, Any]]) -> None:
    """Print the results of a search as a table."""
    formats = {"score": ".3f", "refined": ".3g", "probability": ".2f", "inliers": "d"}
    known = [name for name in formats if any(hit.get(name) is not None for hit in results)]
    rows = []
    for rank, hit in enumerate(results, start=1):
        row = ["" if hit.get(name) is None else format(hit[name], formats[name]) for name in known]
        attributes = ", ".join(f"{k} {v}" for k, v in hit.get("attributes", {}).items())
        rows.append((str(rank), *row, hit["id"], attributes))
    right = [Column(name, justify="right") for name in ("", *known)]
    output.table((*right, "photo", Column(style="dim", no_wrap=True)), rows)


@command(app, json=False)
def serve(
    output: Output,
    index: str,
    *,
    model: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    edit: bool = False,
    token: str | None = None,
    uploads: Path | None = None,
    device: str = "auto",
    max_upload: int = 20,
    max_pixels: int = 128,
    timeout: float = 10.0,
    queue: int = 64,
) -> None:
    """Serve an index: a web page to search by photo, and an HTTP interface.

    Args:
        model: model folder or ONNX file, if the model has moved.
        host: address to listen on; if other machines can reach it, a token is required.
        port: port to listen on; 0 chooses a free port.
        edit: allow changes on the page: print a link with a random token, and open it in the
            browser of this machine.
        token: token that clients send to change the index, and for all requests if other machines
            can connect.
        uploads: folder for added photos; by default INDEX/uploads.
        max_upload: maximum size of a photo, in megabytes.
        max_pixels: maximum size of a photo, in megapixels, up to the 128 of all commands; a JPEG
            file that is reduced may have twice as many, a WebP, AVIF or HEIC file half as many.
        timeout: maximum time per request, in seconds.
        queue: maximum number of waiting requests.

    Examples:
      listwise serve shop                        # open http://127.0.0.1:8000
      listwise serve shop --edit                 # allow changes on the page
      LISTWISE_TOKEN=secret listwise serve shop  # with a token of your own
      LISTWISE_TOKEN=secret listwise serve shop --host 0.0.0.0 --port 80
      listwise serve milvus://127.0.0.1:19530/shop --uploads uploads

    Ctrl-C stops the server after it has answered the running requests.
    """
    from listwise.data.images import MAX_PIXELS
    from listwise.serving.server import Limits, ServeSettings, listen, run_server

    if not 1 <= max_pixels <= MAX_PIXELS // 1_000_000:
        raise InputError(f"`max_pixels` must be from 1 to {MAX_PIXELS // 1_000_000}")
    limits = Limits(
        upload_bytes=max_upload * 1_000_000,
        pixels=max_pixels * 1_000_000,
        seconds=timeout,
        waiting=queue,
    )
    # A folder that ends in .db belongs to milvus-lite.
    is_folder = Path(index).is_dir() and Path(index).suffix != ".db"
    token = (
        token or os.environ.get("LISTWISE_TOKEN") or (secrets.token_urlsafe(24) if edit else None)
    )
    settings = ServeSettings(
        host=host,
        token=token,
        uploads=uploads or (Path(index) / "uploads" if is_folder else None),
        limits=limits,
    )
    if not settings.local and settings.token is None:
        raise InputError(
            f"other machines can reach {host}: set a token with --edit, LISTWISE_TOKEN or --token"
        )
    output = Output(json=True)  # stdout has only the line with the address
    with listen(host, port) as listening:
        with output.console.status(f"opening {index}"):
            from listwise.search import open_index

            opened = open_index(index, model, device=device, create=False)
        with opened:
            with output.console.status(f"reading {index}"):
                from listwise.serving.app import create_app
                from listwise.serving.engine import prepare

                now, most = prepare(opened, limits)
                app = create_app(opened, settings, most)
            anywhere = host in ("0.0.0.0", "::")
            shown = "localhost" if anywhere else f"[{host}]" if ":" in host else host
            address = f"http://{shown}:{listening.getsockname()[1]}"
            others = " and all other addresses of this machine" if anywhere else ""
            link = f"{address}/#token={quote(token)}" if edit and token else address
            memory = f" using {now / 1e9:.1f} GB of memory" if now else ""
            # Others require a token, which `listwise search` does not have.
            found = announce(index, address, settings.instance) if settings.local else nullcontext()
            with found:
                photos = count_of(len(opened), "photo")
                typer.echo(f"serving {photos} of {index} at {link}{others}{memory}")
                opens = output.console.is_terminal and edit and settings.local
                if output.console.is_terminal:
                    output.say("press Ctrl-C to stop")
                with shown_in_browser(link) if opens else nullcontext():
                    run_server(app, listening, limits)
