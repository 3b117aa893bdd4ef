"""The folder of a run from an index: what it needs to be resumed, and what is refused."""

import shutil

import pytest
from feedback_examples import QUICK
from tiny_net import TINY_NET

import listwise as lw
from listwise.errors import InputError
from listwise.feedback import resume_from_index
from listwise.feedback.comparison import COMPARISON_FILE
from listwise.feedback.photos import read_index_run
from listwise.models import RetrievalNet
from listwise.training.view import TrainView


class Interrupt(TrainView):
    """Interrupts a run after its second update."""

    def update(self, update, metrics):
        if update == 2:
            raise KeyboardInterrupt


def start(index, run, view=None, **settings):
    given = QUICK | {"adapter": True, "updates": 4, "checkpoint_every": 1} | settings
    return lw.train(run_folder=run, from_index=index, view=view, **given)


@pytest.fixture
def interrupted(marked, tmp_path):
    """The folder of a run that was interrupted."""
    with pytest.raises(KeyboardInterrupt):
        start(marked, tmp_path / "run", Interrupt())
    return tmp_path / "run"


def test_the_comparison_shows_how_results_were_marked(marked, tmp_path):
    found = start(marked, tmp_path / "run").comparison
    record, images = read_index_run(tmp_path / "run")
    kinds = dict(zip(images.ids, images.labels, strict=True))
    different = {each.query: set(each.different) for each in record.queries}
    changes = [query.new_ap - query.old_ap for query in found.queries]
    assert changes == sorted(changes)
    for query in found.queries:
        for hits in (query.old, query.new):
            assert query.query not in {hit.id for hit in hits}
            assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
            for hit in hits:
                same = kinds.get(hit.id) == kinds[query.query]
                marked_different = hit.id in different[query.query]
                assert hit.mark == ("same" if same else "different" if marked_different else "")
    count = sum(hit.mark == "different" for query in found.queries for hit in query.new)
    assert found.wrong("new") == count
    (tmp_path / "run" / COMPARISON_FILE).write_text("{}")
    with pytest.raises(InputError, match=r"comparison\.json is damaged: delete it"):
        resume_from_index(tmp_path / "run")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("index.json", r"index\.json is missing or damaged"),
        ("descriptors.safetensors", r"descriptors\.safetensors is damaged"),
        ("labels.csv", r"labels\.csv was changed"),
    ],
)
def test_a_damaged_file_of_a_run_is_named(interrupted, file, message):
    content = (interrupted / file).read_bytes()
    kept = content[: content.rindex(b"\n", 0, -1) + 1] if file == "labels.csv" else content[:-9]
    (interrupted / file).write_bytes(kept)
    with pytest.raises(InputError, match=message):
        resume_from_index(interrupted)


def test_a_model_that_has_changed_is_refused(marked, tmp_path):
    RetrievalNet(TINY_NET, weights="random").save(tmp_path / "model")
    marked.upgrade(tmp_path / "model", workers=0)
    with pytest.raises(KeyboardInterrupt):
        start(marked, tmp_path / "run", Interrupt())
    shutil.rmtree(tmp_path / "model")
    RetrievalNet(TINY_NET, weights="random").save(tmp_path / "model")
    with pytest.raises(InputError, match=r"has changed since .* was started: start a new run"):
        resume_from_index(tmp_path / "run")
