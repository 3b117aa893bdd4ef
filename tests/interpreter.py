"""Triton's interpreter, in which kernels are tested without a GPU."""

import inspect

import numpy as np
import pytest


def skip_if_interpreter_is_broken() -> None:
    """Skip a test where loops of kernels fail in Triton's interpreter.

    Triton passes the bound of a loop, an array of one element, to `int`, which NumPy refuses since
    2.4. Newer versions of Triton (3.9, not 3.6) take the element out first.
    """
    from triton.runtime import interpreter

    try:
        int(np.zeros(1, dtype=np.int64))
    except TypeError:
        if "int(self.handle.data))" in inspect.getsource(interpreter):
            pytest.skip("Triton's interpreter does not work with this version of NumPy")
