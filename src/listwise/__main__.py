"""`python -m listwise`, for `torchrun -m listwise train ...`."""

from listwise.cli.main import main

if __name__ == "__main__":
    main()
