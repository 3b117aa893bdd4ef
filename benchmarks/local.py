"""Local descriptors beside the package `asmk`; the same as `listwise benchmark local`."""

import sys

from listwise.cli.main import main

if __name__ == "__main__":
    sys.argv[:1] = ["listwise", "benchmark", "local"]
    main()
