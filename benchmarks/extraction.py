"""Photos to descriptors; the same as `listwise benchmark extraction`."""

import sys

from listwise.cli.main import main

if __name__ == "__main__":
    sys.argv[:1] = ["listwise", "benchmark", "extraction"]
    main()
