"""A process that behaves as if some modules were not installed."""

import sys


class WithoutModules:
    """A finder of modules that does not find some of them."""

    def __init__(self, finder, hidden) -> None:
        self.finder, self.hidden = finder, hidden

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.hidden:
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


def hide(modules) -> None:
    """Behave as if these modules were not installed."""
    for name in list(sys.modules):
        if name.partition(".")[0] in modules:
            del sys.modules[name]
    sys.meta_path[:] = [WithoutModules(finder, set(modules)) for finder in sys.meta_path]


def show() -> None:
    """Find hidden modules again."""
    sys.meta_path[:] = [getattr(finder, "finder", finder) for finder in sys.meta_path]
