"""Evaluation among distractors, counted and sorted; the same as `listwise benchmark evaluation`."""

import sys

from listwise.cli.main import main

if __name__ == "__main__":
    sys.argv[:1] = ["listwise", "benchmark", "evaluation"]
    main()
