"""`listwise serve`: serve an index as a web page and an HTTP interface."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from listwise.cli import options
from listwise.cli.output import open_console, say
from listwise.errors import InputError

if TYPE_CHECKING:
    from listwise.serving.settings import ServeSettings

EXAMPLES = """Examples:
  listwise serve shop                        # open http://127.0.0.1:8000
  LISTWISE_TOKEN=secret listwise serve shop  # allow adding and removing photos
  LISTWISE_TOKEN=secret listwise serve shop --host 0.0.0.0 --port 80
  listwise serve milvus://127.0.0.1:19530/shop --uploads uploads

Ctrl-C stops the server after it has answered the running requests.
"""


def serve(
    index: options.AnyIndexPlace,
    model: options.IndexModel = None,
    host: Annotated[
        str, options.text("Address to listen on; if other machines can reach it, set a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int, options.integer("Port to listen on; 0 chooses a free port.", min=0, max=65535)
    ] = 8000,
    token: Annotated[
        str | None,
        options.text(
            "Token that clients send to change the index, and for all requests if other machines "
            "can connect.",
            envvar="LISTWISE_TOKEN",
            show_envvar=True,
        ),
    ] = None,
    uploads: Annotated[
        Path | None, options.path("Folder for added photos.", show_default="INDEX/uploads")
    ] = None,
    device: options.Device = "auto",
    max_upload: Annotated[
        int, options.integer("Maximum size of a photo, in megabytes.", min=1)
    ] = 20,
    max_pixels: Annotated[
        int, options.integer("Maximum size of a photo, in megapixels.", min=1)
    ] = 50,
    max_side: Annotated[
        int | None,
        options.integer(
            "Reduce photos whose longer side has more pixels than this.",
            min=16,
            show_default="maximum of the index, or 1024",
        ),
    ] = None,
    timeout: Annotated[
        float, options.decimal("Maximum time per request, in seconds.", min=0.1)
    ] = 10.0,
    queue: Annotated[int, options.integer("Maximum number of waiting requests.", min=0)] = 64,
) -> None:
    """Serve an index: a web page to search by photo, and an HTTP interface."""
    from listwise.serving.settings import Limits, ServeSettings

    limits = Limits(
        upload_bytes=max_upload * 1_000_000,
        pixels=max_pixels * 1_000_000,
        max_side=max_side,
        seconds=timeout,
        waiting=queue,
    )
    # A folder that ends in .db belongs to milvus-lite.
    is_folder = Path(index).is_dir() and Path(index).suffix != ".db"
    folder = uploads or (Path(index) / "uploads" if is_folder else None)
    settings = ServeSettings(host=host, token=token or None, uploads=folder, limits=limits)
    if not settings.local and settings.token is None:
        raise InputError(
            f"other machines can reach {host}: set a token with LISTWISE_TOKEN or --token"
        )
    _serve(index, model, device, port, settings)


def _serve(
    place: str, model: Path | None, device: str, port: int, settings: "ServeSettings"
) -> None:
    console = open_console(json=True)  # stdout has only the line with the address
    from listwise.serving.server import listen, run_server

    host = settings.host
    with listen(host, port) as listening:
        with console.status(f"opening {place}"):
            from listwise.search import open_index

            opened = open_index(place, model, device=device, create=False)
        with opened:
            with console.status(f"reading {place}"):
                from listwise.serving.app import create_app
                from listwise.serving.memory import prepare

                prepared = prepare(opened, settings.limits)
                app = create_app(opened, settings, prepared.trial_seconds)
            anywhere = host in ("0.0.0.0", "::")
            shown = "localhost" if anywhere else f"[{host}]" if ":" in host else host
            address = f"http://{shown}:{listening.getsockname()[1]}"
            others = " and all other addresses of this machine" if anywhere else ""
            most = prepared.memory / 1e9
            memory = f" with up to {most:.1f} GB of memory" if most else ""
            with _announced(place, address, settings):
                typer.echo(f"serving {len(opened)} photos of {place} at {address}{others}{memory}")
                if console.is_terminal:
                    say(console, "press Ctrl-C to stop")
                run_server(app, listening, settings.limits)


def _announced(place: str, address: str, settings: "ServeSettings") -> AbstractContextManager[None]:
    """Let `listwise search` use this server, unless it requires a token."""
    from listwise.servers import announce

    if not settings.local:
        return nullcontext()
    return announce(place, address, settings.instance)
