"""Evaluation among distractors, counted and sorted; the same as `listwise benchmark evaluation`."""

from listwise.cli.benchmark import evaluation

if __name__ == "__main__":
    import typer

    typer.run(evaluation)
