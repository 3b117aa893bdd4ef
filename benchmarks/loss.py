"""The AP loss beside its alternatives; the same as `listwise benchmark loss`."""

import sys

from listwise.cli.main import main

if __name__ == "__main__":
    sys.argv[:1] = ["listwise", "benchmark", "loss"]
    main()
