"""The one exception that means "the user can mend this"."""


class InputError(ValueError):
    """Something the user gave cannot be used; the message says what, where and what to do.

    It is a `ValueError`, so library callers need not know it. The command line prints its
    message as one line and leaves with exit code 2.
    """
