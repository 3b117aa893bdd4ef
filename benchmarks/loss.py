"""The AP loss beside its alternatives; the same as `listwise benchmark loss`."""

from listwise.cli.benchmark import loss

if __name__ == "__main__":
    import typer

    typer.run(loss)
