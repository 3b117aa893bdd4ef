"""A whole training step; the same as `listwise benchmark step`."""

import sys

from listwise.cli.main import main

if __name__ == "__main__":
    sys.argv[:1] = ["listwise", "benchmark", "step"]
    main()
