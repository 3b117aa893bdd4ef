"""The one exception for what the user can fix."""


class InputError(ValueError):
    """Something that the user gave cannot be used; the message says what, where and what to do.

    It is a `ValueError`, so callers of the library need not know it. The message names an argument
    in backticks, as in "lower `learning_rate`"; the command line writes its flag in that place,
    prints the message as one line and ends with exit code 2.
    """
