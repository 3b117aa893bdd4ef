"""Start the server and query it over HTTP.

Shows how a program adds and finds photos with the HTTP interface of `listwise serve`.

    pip install '.[serve,imagenet]'
    python examples/serve_and_query.py photos         # a folder of photos
    python examples/serve_and_query.py                # without photos: draws a few toy buildings

The index is written to the folder `example-server`; `--out` sets another folder.
"""

import argparse
import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

import listwise
from listwise.client import Client
from listwise.data import list_images
from listwise.demo import TOY_PHOTOS, make_toy_landmarks


def start_server(index: Path, token: str) -> tuple[subprocess.Popen, str]:
    """Start `listwise serve` on a free port; return the process and the address that it prints."""
    server = subprocess.Popen(
        [sys.executable, "-m", "listwise", "serve", str(index), "--port", "0"],
        env={**os.environ, "LISTWISE_TOKEN": token},  # writing needs a token, searching does not
        stdout=subprocess.PIPE,
        text=True,
    )
    line = server.stdout.readline()  # printed when the server is ready
    address = re.search(r"http://\S+?:\d+", line)
    if address is None:
        raise SystemExit(f"the server did not start: {line}")
    return server, address[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Start the server and query it over HTTP.")
    parser.add_argument("photos", nargs="?", type=Path, help="folder of photos")
    parser.add_argument("--out", type=Path, default=Path("example-server"), help="output folder")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    photos = options.photos
    if photos is None:
        photos = (
            make_toy_landmarks(options.out / "toy-landmarks", buildings=9, views=8) / TOY_PHOTOS
        )
    first, *others = list_images(photos)

    # An index of all photos but one, with a network that needs no training.
    model = listwise.load("tf_efficientnet_lite0")
    with listwise.open_index(options.out / "index", model, max_side=160) as index:
        index.add(others)

    token = secrets.token_hex(16)
    server, address = start_server(options.out / "index", token)
    try:
        client = Client(address, token)
        print("entries:", client.info()["entries"])

        # Add the photo that is not in the index yet, then search for it.
        client.add(first)
        for hit in client.search(first, k=3)["results"]:
            print(f"  {hit['score']:.3f} {hit['id']}")
    finally:
        server.terminate()
        server.wait(30)


if __name__ == "__main__":
    main()
