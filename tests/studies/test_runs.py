"""The engine of the studies, on a small network and real files."""

import csv
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import yaml
from tiny_net import TINY_NET

from listwise.data.catalog import Benchmark
from listwise.descriptors import Whitening, load_model
from listwise.errors import InputError
from listwise.results import describe_benchmark
from listwise.studies.definitions import STUDIES, TrainingSet
from listwise.studies.outputs import write_outputs
from listwise.studies.plan import OUTCOME_FILE, Outcome, plan_study, read_outcome
from listwise.studies.runs import StudyBenchmark, StudyView, run_study
from listwise.training.view import TrainView

GIVEN = {
    "backbone": TINY_NET,
    "weights": "random",
    "val_fraction": 0.25,
    "val_max_side": 48,
    "micro_batch": 12,
    "crops": {"size": 32},
    "learning_rate": 1e-3,
    "device": "cpu",
    "workers": 0,
}
BATCH = {"batch_size": 12}
SEEN = 24  # images


class Witness(StudyView):
    """Keeps what it is told, and stops in some run after an update if asked to."""

    def __init__(self, stop_in=None):
        self.began, self.skips, self.finds = [], [], []
        self.stop_in = stop_in

    def run(self, number, count, name):
        self.began.append((number, count, name))
        return Stopping() if number == self.stop_in else TrainView()

    def skipped(self, number, count, name):
        self.skips.append((number, count, name))

    def found(self, findings):
        self.finds.append(list(findings.outcomes))


class Stopping(TrainView):
    """Ends the run as a person would, after its second update."""

    def update(self, update, metrics):
        if update == 2:
            raise KeyboardInterrupt


def plan(name, photos, out, given=None, **options):
    options = {"images": SEEN, "seeds": 1, "validations": 2} | options
    return plan_study(STUDIES[name], photos, out, GIVEN | (given or {}), **options)


def saved(made, variant, seed=0, rate=None):
    folder = made.folder(variant, seed, rate or made.rates[0])
    return yaml.safe_load((folder / "config.yaml").read_text())


def differing(first, second):
    return {name for name in first if first[name] != second[name]}


@pytest.fixture(scope="module")
def balance(photos, tmp_path_factory):
    """A finished study of two variants and two seeds."""
    made = plan("balance", photos, tmp_path_factory.mktemp("balance") / "out", BATCH, seeds=2)
    witness = Witness()
    findings = run_study(made, witness, on_found=witness.found)
    return made, findings, witness


def test_runs_differ_only_in_what_is_varied(balance):
    made, findings, witness = balance
    weighted, unweighted = (saved(made, variant) for variant in made.variants)
    assert differing(weighted, unweighted) == {"class_weights"}
    assert differing(weighted, saved(made, made.variants[0], seed=1)) == {"seed"}
    prints = {
        json.loads(path.read_text())["data_fingerprint"] for path in made.out.rglob("run.json")
    }
    assert prints == {made.plan.fingerprint()}  # the same validation classes whatever the seed
    assert [name for _, _, name in witness.began] == [
        "weighted, seed 0", "unweighted, seed 0", "weighted, seed 1", "unweighted, seed 1",
    ]  # fmt: skip
    assert [len(found) for found in witness.finds] == [1, 2, 3, 4]
    assert all(run.backwards == SEEN and run.updates == 2 for run in findings.outcomes)


def test_finished_runs_are_not_made_again(balance, photos):
    made, findings, _ = balance
    witness = Witness()
    again = plan("balance", photos, made.out, BATCH, seeds=3)
    found = run_study(again, witness).outcomes
    assert len(witness.skips) == 4
    assert [name for _, _, name in witness.began] == ["weighted, seed 2", "unweighted, seed 2"]
    assert found[:4] == findings.outcomes
    assert not list(made.out.rglob("checkpoint.safetensors"))


def test_an_interrupted_study_goes_on_to_the_same_results(balance, photos, tmp_path):
    _, findings, _ = balance
    broken = plan("balance", photos, tmp_path / "out", BATCH)
    with pytest.raises(KeyboardInterrupt):
        run_study(broken, Witness(stop_in=2))
    second = broken.folder(broken.variants[1], 0, broken.rates[0])
    assert (second / "checkpoint.safetensors").exists()
    assert not (second / OUTCOME_FILE).exists()
    witness = Witness()
    found = run_study(plan("balance", photos, tmp_path / "out", BATCH), witness)
    assert [number for number, _, _ in witness.skips] == [1]
    assert [number for number, _, _ in witness.began] == [2]
    for ours, theirs in zip(found.outcomes, findings.outcomes[:2], strict=True):
        assert ours.model_copy(update={"seconds": 0}) == theirs.model_copy(update={"seconds": 0})


def test_other_settings_photos_or_studies_are_not_mixed(balance, photos, tmp_path):
    made, _, _ = balance
    with pytest.raises(InputError, match=r"other settings \(updates 2, now 4\)"):
        plan("balance", photos, made.out, BATCH, images=2 * SEEN)
    with pytest.raises(InputError, match=r"other settings \(bins 20, now 10\)"):
        plan("balance", photos, made.out, BATCH | {"bins": 10})
    (tmp_path / "photos").mkdir()
    for folder in photos.iterdir():
        (tmp_path / "photos" / f"other-{folder.name}").symlink_to(folder)
    with pytest.raises(InputError, match="other photos"):
        plan("balance", tmp_path / "photos", made.out, BATCH)
    with pytest.raises(InputError, match="holds the study balance"):
        plan("ties", photos, made.out, BATCH)
    (tmp_path / "study.json").write_text("{}")
    with pytest.raises(InputError, match=r"study\.json was not written by a study"):
        plan("balance", photos, tmp_path, BATCH)
    with pytest.raises(InputError, match="is a file: give a folder"):
        plan("balance", photos, tmp_path / "study.json", BATCH)


def test_learning_rates_may_be_added_to_a_finished_study(balance, photos):
    made, findings, _ = balance
    shared = {key: value for key, value in GIVEN.items() if key != "learning_rate"} | BATCH
    witness = Witness()
    more = plan_study(
        STUDIES["balance"], photos, made.out, shared, variants=["weighted"],
        images=SEEN, seeds=1, rates=(GIVEN["learning_rate"], 1e-5), validations=2,
    )  # fmt: skip
    found = run_study(more, witness).outcomes
    assert [name for _, _, name in witness.skips] == ["weighted, seed 0, learning rate 0.001"]
    assert [name for _, _, name in witness.began] == ["weighted, seed 0, learning rate 1e-05"]
    assert found[0].validation_map == findings.outcomes[0].validation_map


def test_settings_of_the_study_itself_are_refused(photos, tmp_path):
    for given, name in (
        ({"bins": 10}, "bins"),
        ({"updates": 9}, "updates"),
        ({"seed": 1}, "seed"),
        ({"patience": None}, "patience"),
    ):
        with pytest.raises(InputError, match=f"`{name}` cannot be given"):
            plan("bins", photos, tmp_path, given)
    with pytest.raises(InputError, match=r"`triplet.tuples` cannot be given"):
        plan("losses", photos, tmp_path, {"triplet": {"tuples": 3}})
    with pytest.raises(InputError, match="cannot be given together"):
        plan("bins", photos, tmp_path, rates=(1e-3,))
    with pytest.raises(InputError, match="fewer than one update of tl-64, which has 192 images"):
        plan("losses", photos, tmp_path, images=48)
    with pytest.raises(InputError, match="larger than the 36 training photos"):
        plan("batch-size", photos, tmp_path, variants=["64"])
    with pytest.raises(InputError, match="whole numbers, not 'x'"):
        plan("bins", photos, tmp_path, variants=["x"])
    with pytest.raises(InputError, match="no variant 'tl-7': choose from ap"):
        plan("losses", photos, tmp_path, variants=["tl-7"])
    with pytest.raises(InputError, match="a variant twice"):
        plan("bins", photos, tmp_path, variants=["5", "05"])


def test_every_batch_size_sees_as_many_images(photos, tmp_path):
    made = plan("batch-size", photos, tmp_path / "out", variants=["6", "12", "24"])
    configs = [made.config(variant, 0, 1e-3) for variant in made.variants]
    assert [config.updates for config in configs] == [4, 2, 1]
    assert all(config.updates * config.images_per_update == SEEN for config in configs)
    assert [config.validate_every for config in configs] == [2, 1, 1]
    assert {config.learning_rate for config in configs} == {1e-3}
    found = run_study(made)
    assert [run.backwards for run in found.outcomes] == [SEEN] * 3
    scheduled = {"batch_size", "updates", "warmup", "validate_every", "checkpoint_every"}
    for variant in made.variants[1:]:
        assert differing(saved(made, made.variants[0]), saved(made, variant)) <= scheduled


def test_the_best_learning_rate_of_the_first_seed_goes_on(photos, tmp_path):
    given = {key: value for key, value in GIVEN.items() if key != "learning_rate"} | BATCH
    made = plan_study(
        STUDIES["bins"], photos, tmp_path / "out", given, variants=["5"],
        images=SEEN, seeds=2, rates=(1e-5, 1e-2), validations=2,
    )  # fmt: skip
    witness = Witness()
    found = run_study(made, witness)
    assert len(found.outcomes) == made.count == 3
    for variant in made.variants:
        runs = [run for run in found.outcomes if run.variant == variant.name]
        first = [run for run in runs if run.seed == 0]
        best = max(first, key=lambda run: run.validation_map)
        assert [run.learning_rate for run in runs if run.kept] == [best.learning_rate] * 2
        assert {run.learning_rate for run in first} == {1e-5, 1e-2}
        low, high = (saved(made, variant, 0, rate) for rate in made.rates)
        assert differing(low, high) == {"learning_rate"}
    assert {run.seed for run in found.kept("bins-5")} == {0, 1}
    write_outputs(made, found)
    text = (made.out / "table.md").read_text()
    assert (
        "Learning rates 1e-05, 0.01; each variant uses the one that is best in validation" in text
    )


def test_losses_at_an_equal_number_of_images(photos, tmp_path):
    given = {"batch_size": 32, "micro_batch": 64}
    given |= {"triplet": {"pool": 40}, "contrastive": {"tuples": 8}}
    made = plan("losses", photos, tmp_path / "out", given, variants=["ap", "tl-64", "contrastive"],
                images=192)  # fmt: skip
    assert made.variants[2].settings == {"loss": "contrastive"}
    found = {run.variant: run for run in run_study(made).outcomes}
    per = {"ap": 32, "tl-64": 192, "contrastive": 56}
    for name, run in found.items():
        assert run.updates == 192 // per[name]
        assert run.backwards == run.updates * per[name]
    assert found["tl-64"].forwards > found["ap"].forwards  # mining
    assert [found[name].hyper_parameters for name in per] == [2, 6, 5]
    usual = STUDIES["losses"].usual
    assert usual(TrainingSet(714, 51)) == ("ap", "tl-64", "contrastive")
    assert usual(TrainingSet(6049, 159)) == ("ap", "tl-64", "tl-512", "tl-1024", "contrastive")
    assert STUDIES["classes"].usual(TrainingSet(714, 51)) == ("8", "16", "32", "all")
    assert STUDIES["batch-size"].usual(TrainingSet(714, 51))[-1] == "512"


def test_no_query_wants_more_negatives_than_there_are_other_classes(photos, tmp_path):
    for asked, had in ((500, 5), (3, 3)):
        given = {"contrastive": {"negatives": asked}}
        made = plan("losses", photos, tmp_path / "out", given, variants=["ap", "contrastive"],
                    images=48)  # fmt: skip
        assert len(made.plan.train.class_names) == 6
        assert made.config(made.variants[1], 0, 1e-3).contrastive.negatives == had
        noted = [note for note in made.plan.notes if "exceeds the number of other classes" in note]
        assert len(noted) == (asked != had)


def test_the_benchmark_is_searched_plain_and_whitened(balance, photos, tmp_path):
    shutil.copytree(balance[0].out, tmp_path / "out")
    made = plan("balance", photos, tmp_path / "out", BATCH, variants=["weighted"])
    held = made.plan.validation
    benchmark = Benchmark.of_labels("held out", held)
    judging = StudyBenchmark(benchmark, made.plan.train, dim=8, workers=0)
    found = run_study(made, Witness(), judging)  # a benchmark may be added to finished runs
    (run,) = found.outcomes
    assert list(run.judged) == list(found.untrained) == ["Labels plain", "Labels whitened"]
    folder = made.folder(made.variants[0], 0, made.rates[0])
    model = load_model(folder / "model", "cpu")
    described = describe_benchmark(model, benchmark, workers=0)
    plain = described.evaluate()["Labels"].mAP
    assert run.judged["Labels plain"] == pytest.approx(plain, abs=1e-6)
    whitening = Whitening.learn([model.describe(made.plan.train, workers=0).descriptors], 8)
    rows = whitening.apply(described.database)
    white = replace(described, queries=rows, database=rows).evaluate()["Labels"].mAP
    assert run.judged["Labels whitened"] == pytest.approx(white, abs=1e-6)
    assert run.validation_map == read_outcome(folder).validation_map
    write_outputs(made, found, "listwise study balance photos")
    text = (made.out / "table.md").read_text()
    assert f"| weighted | 1 | {100 * run.validation_map:.1f} | {100 * plain:.1f} |" in text
    assert "listwise study balance photos" in text
    assert "Labels whitened mAP" in (made.out / "plot.svg").read_text()


def test_tables_of_a_study(balance):
    made, findings, _ = balance
    write_outputs(made, findings)
    with (made.out / "results.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["variant"], row["seed"], row["kept"]) for row in rows] == [
        ("weighted", "0", "True"), ("unweighted", "0", "True"),
        ("weighted", "1", "True"), ("unweighted", "1", "True"),
    ]  # fmt: skip
    maps = {
        name: np.array([float(r["validation_map"]) for r in rows if r["variant"] == name])
        for name in ("weighted", "unweighted")
    }
    lines = (made.out / "table.md").read_text().splitlines()
    for name, values in maps.items():
        (line,) = (line for line in lines if line.startswith(f"| {name} |"))
        shown = f"| 2 | {100 * values.mean():.1f} ± {100 * values.std(ddof=1):.1f} |"
        assert shown in line
    gains = 100 * (maps["weighted"] - maps["unweighted"])
    (line,) = (line for line in lines if line.startswith("| weighted − unweighted |"))
    assert f"| {gains.mean():+.1f} ± {gains.std(ddof=1):.1f} |" in line
    assert not any("So far" in line for line in lines)
    write_outputs(made, replace(findings, outcomes=findings.outcomes[:3]))
    assert "So far 3 of 4 runs are finished." in (made.out / "table.md").read_text()


def test_a_damaged_outcome_is_named(tmp_path):
    known = dict.fromkeys(Outcome.model_fields, 0)
    for content in ("{", "[]", '{"variant": "a"}', json.dumps(known | {"another": 0})):
        (tmp_path / OUTCOME_FILE).write_text(content)
        with pytest.raises(InputError, match=OUTCOME_FILE):
            read_outcome(tmp_path)
    assert read_outcome(tmp_path / "nowhere") is None


def test_rivals_have_the_effort_of_the_paper(photos, tmp_path):
    made = plan("rivals", photos, tmp_path / "out", BATCH, images=600, validations=1)
    ap, triplet, contrastive = (made.config(variant, 0, 1e-3) for variant in made.variants)
    # A batch of 12 has less than 64 images, so an update has one triplet of three images.
    assert (ap.updates, ap.batch_size) == (50, 12)
    assert (triplet.updates, triplet.triplet.tuples) == (600 * 1.92 // 3, 1)
    assert contrastive.updates == 600 * 1.92 // contrastive.images_per_update
    assert contrastive.contrastive.tuples == 5


def test_rivals_have_the_numbers_of_table_1_with_the_batches_of_the_paper():
    ap, triplet, contrastive = STUDIES["rivals"].variants(None, TrainingSet(40_000, 500))
    assert triplet.settings == {"loss": "triplet", "triplet": {"tuples": 64}}
    images = 200 * 4096 * triplet.effort
    assert images == 8192 * 3 * 64
    assert round(images / 1000) == 1573
    assert (ap.effort, contrastive.effort) == (1.0, triplet.effort)
