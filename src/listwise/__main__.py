"""The program `listwise`; also `python -m listwise`, for `torchrun -m listwise train ...`."""

import atexit
import gc
import os
import sys

# Objects that are created between two searches for garbage. PyTorch and the other libraries create
# half a million that stay, and with the default of 700 the searches take a fifth of the start.
BETWEEN_COLLECTIONS = 10_000


class _Ending:
    """Ends a command that has done its work, without freeing its memory piece by piece.

    Taking PyTorch and the libraries of a GPU apart takes a second, and the system frees their
    memory anyway. `code` is None while the command runs, and after an unexpected error.
    """

    code: int | None = None

    def __call__(self) -> None:
        if self.code is not None and "torch" in sys.modules:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:  # it is None if it was closed before the start
                    stream.flush()
            os._exit(self.code)


def run() -> None:
    """Run the command line, and end the process."""
    gc.set_threshold(BETWEEN_COLLECTIONS)
    from listwise.cli.main import main

    ending = _Ending()
    atexit.register(ending)  # first, so it runs last: after all threads and the code of libraries
    try:
        main()
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            ending.code = left.code or 0
        raise


if __name__ == "__main__":
    run()
