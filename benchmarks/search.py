"""Search in an index beside other engines; the same as `listwise benchmark search`."""

import sys

from listwise.cli.main import main

if __name__ == "__main__":
    sys.argv[:1] = ["listwise", "benchmark", "search"]
    main()
