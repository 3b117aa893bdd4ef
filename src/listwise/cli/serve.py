"""`listwise serve`: an index as a page and an HTTP interface."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from listwise.cli import options
from listwise.cli.output import open_console
from listwise.errors import InputError

if TYPE_CHECKING:
    from listwise.serving.settings import ServeSettings

EXAMPLES = options.examples("""Examples:
  listwise serve photos.index                             open http://127.0.0.1:8000
  LISTWISE_TOKEN=... listwise serve photos.index          photos can be added and removed too
  LISTWISE_TOKEN=... listwise serve photos.index --host 0.0.0.0 --port 80
  listwise serve milvus://db.local:19530/photos --uploads /data/uploads

Ctrl-C stops it once running requests are answered.
""")


def serve(
    index: options.IndexPlace,
    model: options.IndexModel = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. All but this machine's own need a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="LISTWISE_TOKEN",
            show_envvar=True,
            help="Token that clients need to write, and to read from other machines.",
        ),
    ] = None,
    uploads: Annotated[
        Path | None, typer.Option(help="Folder for added photos.", show_default="INDEX/uploads")
    ] = None,
    device: options.Device = "auto",
    max_upload: Annotated[int, typer.Option(min=1, help="Maximum megabytes of a photo.")] = 20,
    max_pixels: Annotated[int, typer.Option(min=1, help="Maximum megapixels of a photo.")] = 50,
    timeout: Annotated[float, typer.Option(min=0.1, help="Maximum seconds for an answer.")] = 10.0,
    queue: Annotated[int, typer.Option(min=0, help="Maximum number of waiting requests.")] = 64,
) -> None:
    """Serve an index: search by photo in the browser, or from programs."""
    from listwise.serving.settings import Limits, ServeSettings

    limits = Limits(
        upload_bytes=max_upload * 1_000_000,
        pixels=max_pixels * 1_000_000,
        seconds=timeout,
        waiting=queue,
    )
    # milvus-lite's files are folders too, but its own.
    ours = Path(index).is_dir() and Path(index).suffix != ".db"
    folder = uploads or (Path(index) / "uploads" if ours else None)
    settings = ServeSettings(host=host, token=token or None, uploads=folder, limits=limits)
    if not settings.local and settings.token is None:
        raise InputError(
            f"listening on {host} lets others in: give a token with LISTWISE_TOKEN or --token"
        )
    _serve(index, model, device, port, settings)


def _serve(
    place: str, model: Path | None, device: str, port: int, settings: "ServeSettings"
) -> None:
    console = open_console(json=True)  # stdout carries the address alone
    from listwise.serving.server import listen, run_server

    host = settings.host
    with listen(host, port) as listening:
        with console.status(f"opening {place}"):
            from listwise.search import open_index

            opened = open_index(place, model, device=device, create=False)
        with opened:
            with console.status(f"reading {place}"):
                import numpy as np

                from listwise.serving.app import create_app

                opened.search(np.zeros(opened.model.dim, np.float32), 1)  # the model, and vectors
                app = create_app(opened, settings)
            anywhere = host in ("0.0.0.0", "::")
            shown = "localhost" if anywhere else f"[{host}]" if ":" in host else host
            address = f"http://{shown}:{listening.getsockname()[1]}"
            others = "and at this machine's other addresses; " if anywhere else ""
            typer.echo(f"{len(opened)} photos of {place} at {address} ({others}Ctrl-C stops)")
            run_server(app, listening, settings.limits.seconds)
