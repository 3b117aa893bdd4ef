"""`listwise serve`: an index as a page and an HTTP interface."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import socket

    from fastapi import FastAPI
    from rich.console import Console

    from listwise.descriptors import Model
    from listwise.search.store import Store
    from listwise.serving.settings import ServeSettings

EXAMPLES = """Examples:

  listwise serve photos.index                             open http://127.0.0.1:8000

  LISTWISE_TOKEN=... listwise serve photos.index          photos can be added and removed too

  LISTWISE_TOKEN=... listwise serve photos.index --host 0.0.0.0 --port 80

  listwise serve milvus://db.local:19530/photos --uploads /data/uploads

Ctrl-C stops it once running requests are answered.
"""


def serve(
    index: Annotated[
        str, typer.Argument(help="A folder, milvus://host:port/name, or a .db file of milvus-lite.")
    ],
    model: Annotated[
        Path | None, typer.Option(help="The model folder, if it is not where it was.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than this machine's need a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="LISTWISE_TOKEN",
            show_envvar=True,
            help="What clients must know to write, and to read from other machines.",
        ),
    ] = None,
    uploads: Annotated[
        Path | None,
        typer.Option(help="Folder for added photos. [dim]default: INDEX/uploads[/dim]"),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "auto",
    max_upload: Annotated[int, typer.Option(min=1, help="Megabytes of a photo.")] = 20,
    max_pixels: Annotated[int, typer.Option(min=1, help="Megapixels of a photo.")] = 50,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that an answer takes.")] = 10.0,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait.")] = 64,
) -> None:
    """Serve an index: search by photo in the browser, or from programs."""
    from rich.console import Console

    from listwise.cli.index import model_of
    from listwise.errors import InputError
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
    console = Console(stderr=True, highlight=False)
    with _listening(host, port) as listening:
        with console.status(f"opening {index}"):
            from listwise.search.engines import open_store

            opened = open_store(index)
        with opened:
            app = _app(console, opened, model_of(console, opened, model, device), settings)
            anywhere = host in ("0.0.0.0", "::")
            shown = "localhost" if anywhere else f"[{host}]" if ":" in host else host
            address = f"http://{shown}:{listening.getsockname()[1]}"
            others = "and at this machine's other addresses; " if anywhere else ""
            typer.echo(f"{len(opened)} photos of {index} at {address} ({others}Ctrl-C stops)")
            _run(app, listening, timeout)


def _app(
    console: "Console", index: "Store", model: "Model", settings: "ServeSettings"
) -> "FastAPI":
    with console.status(f"reading {index.uri}"):
        import numpy as np

        from listwise.search.index import Index
        from listwise.serving.app import create_app

        # What an engine reads when it first searches is read now.
        index.search(np.zeros((1, index.header.dim), np.float32), 1)
        return create_app(Index(index, model), settings)


def _run(app: "FastAPI", listening: "socket.socket", timeout: float) -> None:
    """Serve until a signal; it is then the end that was asked for, not a failure."""
    import logging
    import math
    import signal

    import uvicorn

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        limit_concurrency=1000,
        timeout_graceful_shutdown=math.ceil(timeout) + 1,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # the server raises what stopped it once more
    uvicorn.Server(config).run(sockets=[listening])


def _listening(host: str, port: int) -> "socket.socket":
    import errno
    import socket

    from listwise.errors import InputError

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            reason = "the port is taken: give another with --port"
        raise InputError(f"cannot listen on {host}, port {port}: {reason}") from None
