"""Photos decoded and augmented; the same as `listwise benchmark input`."""

import sys

from listwise.cli.main import main

if __name__ == "__main__":
    sys.argv[:1] = ["listwise", "benchmark", "input"]
    main()
