"""The exception for errors that the user can fix."""


class InputError(ValueError):
    """Invalid input; the message tells what is wrong, where, and what to do.

    It is a subclass of `ValueError`. The message names arguments in backticks, as in "lower
    `learning_rate`"; the command line shows the flag instead, prints the message as one line and
    exits with code 2.
    """


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else type(error).__name__
    return line if len(line) <= 160 else f"{line[:157]}..."
