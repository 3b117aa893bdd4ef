"""A folder in which nothing can be written, not even by root."""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest


def _without_privileges(check: Callable[[], None]) -> None:
    if os.geteuid() == 0:  # of this thread only, for good
        libc = ctypes.CDLL(None)
        version = (ctypes.c_uint32 * 2)(0x20080522, 0)
        if libc.capset(version, (ctypes.c_uint32 * 6)()):
            pytest.skip("root keeps its privileges")
    check()


def call_where_read_only(folder: Path, check: Callable[[], None]) -> None:
    """Call a function while a folder and its files may only be read."""
    if not hasattr(os, "geteuid"):
        pytest.skip("needs permissions of POSIX")
    places = [folder, *folder.rglob("*")]
    for place in places:
        place.chmod(0o500 if place.is_dir() else 0o400)
    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(_without_privileges, check).result()
    finally:
        for place in places:
            place.chmod(0o700 if place.is_dir() else 0o600)
