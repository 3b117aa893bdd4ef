import multiprocessing
import os
import sys
from types import SimpleNamespace

import pytest

from listwise.benchmarks.measure import run_alone
from listwise.data import workers


def test_processes_start_where_only_spawn_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    known = multiprocessing.get_context

    def only_spawn(method: str) -> object:
        if method != "spawn":
            raise ValueError(f"cannot find context for {method!r}")
        return known(method)

    windows = SimpleNamespace(platform="win32", modules=sys.modules)
    monkeypatch.setattr(workers, "sys", windows)
    monkeypatch.setattr(multiprocessing, "get_context", only_spawn)
    assert run_alone(os.getpid) != os.getpid()
