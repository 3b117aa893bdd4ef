"""For all tests: how they run side by side, and a few photos that a network can tell apart."""

import atexit
import colorsys
import gc
import multiprocessing
import os
import re
from pathlib import Path

# Where tests run side by side, threads of theirs would wait for one another. Libraries read this as
# they are imported, here and in the processes that tests start.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
from hypothesis import settings
from PIL import Image, ImageDraw

gc.disable()  # until all is imported: that leaves little garbage

SOAK = bool(os.environ.get("LISTWISE_SOAK"))
# On a busy machine an example may take any time.
examples = 500 if SOAK else 10
settings.register_profile("listwise", deadline=None, max_examples=examples)
settings.load_profile("listwise")

HERE = Path(__file__).parent
CLASSES = 8
PHOTOS = 6
# Files that one worker runs one after the other, because they share something: a Milvus server, of
# which no two can run at the same time (their ports are fixed), or what takes seconds to import.
SHARED = {
    "Milvus": r"_places\b|\b(milvus_server|killable_server)\b",
    "Triton": r"^from interpreter import",
    "ONNX": r"^import onnx\b|benchmarks import export\b|run\(\"export\"",
}
GROUPS = {
    f"tests/{path.relative_to(HERE).as_posix()}": group
    for path in HERE.glob("*/test_*.py")
    for group, pattern in SHARED.items()
    if re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
}

LONG = {
    f"tests/{name}.py"
    for name in (
        *("serving/test_page", "serving/test_server_process", "serving/test_limits"),
        *("crash/test_crash_points", "training/test_trainer", "models/test_mixed"),
        *("test_documents", "test_extras", "cli/test_demo", "studies/test_runs"),
    )
}

# For the tests that start many processes: forked from one that has imported what takes long. There
# is one such process, whichever test starts it. Nothing of gRPC, which survives no fork.
multiprocessing.set_forkserver_preload(
    [
        "listwise.local.asmk",
        "listwise.search.folder.store",
        "listwise.search.milvus.store",
        "listwise.training",
        "torch.utils.tensorboard",
        "listwise.api",
        "listwise.cli.main",
        "listwise.serving.app",
        "hypothesis",
        "pytest",
    ]
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Files side by side, but those of a group one after the other."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return GROUPS.get(file, file)

    return Files(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(config, items):
    """Leave out thorough tests, and sort the others.

    Tests with a Milvus server come first: they mostly wait, while others use the cores. Then the
    files that take longest, so that none of them is left when the other workers are done.
    """
    thorough = [] if SOAK else [item for item in items if item.get_closest_marker("thorough")]
    if thorough:
        config.hook.pytest_deselected(items=thorough)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    items.sort(
        key=lambda item: (GROUPS.get(item.location[0]) != "Milvus", item.location[0] not in LONG)
    )


def pytest_collection_finish():
    """From now on, garbage is looked for less often, and not among what is imported."""
    gc.set_threshold(10_000)
    gc.enable()
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries that look for leaks find none


def pytest_addoption(parser):
    parser.addoption(
        "--expected-skips",
        metavar="REGEX",
        help="Fail if a test is skipped for a reason that this regular expression does not match.",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    """Name each skipped test that `--expected-skips` does not allow, and fail."""
    expected = session.config.getoption("--expected-skips")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if expected is None or reporter is None:
        return
    for file, line, why in (report.longrepr for report in reporter.stats.get("skipped", ())):
        if not re.search(expected, why):
            reporter.write_line(f"unexpected skip: {file}:{line}: {why}")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def draw_photo(kind: int, generator: np.random.Generator, size: tuple[int, int]) -> Image.Image:
    """A colored shape, by its kind, at a random place on a random ground."""
    ground = generator.integers(90, 160, (size[1], size[0], 3)).astype(np.uint8)
    photo = Image.fromarray(ground)
    hue = (kind + generator.uniform(-0.6, 0.6)) / CLASSES
    vivid = colorsys.hsv_to_rgb(hue % 1, generator.uniform(0.5, 1), generator.uniform(0.4, 1))
    color = tuple(int(255 * c) for c in vivid)
    side = int(min(size) * generator.uniform(0.4, 0.7))
    left, top = (int(generator.integers(0, length - side)) for length in size)
    box = (left, top, left + side, top + side)
    draw = ImageDraw.Draw(photo)
    (draw.ellipse if kind % 2 else draw.rectangle)(box, fill=color)
    return photo


@pytest.fixture(scope="session")
def photos(tmp_path_factory) -> Path:
    """A folder of 8 class folders with 6 JPEG photos each, of two shapes; leave it as it is."""
    root = tmp_path_factory.mktemp("data") / "photos"
    generator = np.random.default_rng(0)
    for kind in range(CLASSES):
        folder = root / f"class{kind}"
        folder.mkdir(parents=True)
        for i in range(PHOTOS):
            size = (72, 56) if i % 2 else (64, 64)
            draw_photo(kind, generator, size).save(folder / f"{i}.jpg", quality=92)
    return root


@pytest.fixture(scope="session")
def copies(photos, tmp_path_factory) -> Path:
    """The class folders with copies of one photo each, so that every ranked list is perfect."""
    root = tmp_path_factory.mktemp("copies")
    for kind in range(CLASSES):
        (root / f"class{kind}").mkdir()
        content = (photos / f"class{kind}" / "0.jpg").read_bytes()
        for i in range(3):
            (root / f"class{kind}" / f"{i}.jpg").write_bytes(content)
    return root


@pytest.fixture(scope="session")
def toy_landmarks(tmp_path_factory) -> Path:
    """The fewest toy landmarks that there may be, made once for all workers; leave them so."""
    from filelock import FileLock

    from listwise.demo import make_toy_landmarks

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with FileLock(folder / "toy.lock"):  # a complete folder is kept as it is
        return make_toy_landmarks(folder / "toy-landmarks", buildings=9, views=6, workers=1)


@pytest.fixture
def mixed_batches(monkeypatch):
    """Photos of different shapes in one batch, as on a GPU; the sizes of the photos by batch."""
    from listwise.models import embed, mixed

    batches = []

    class Watched(mixed.MixedNet):
        def __call__(self, canvases, sizes):
            batches.append(list(sizes))
            return super().__call__(canvases, sizes)

    monkeypatch.setitem(embed.MIXED, "cpu", True)
    monkeypatch.setattr(embed, "MixedNet", Watched)
    return batches
