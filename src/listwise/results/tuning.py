"""Choose the settings of a model by its mAP on validation photos."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from listwise.calibration import fit_calibration
from listwise.data import LabelledImages
from listwise.data.catalog import labelled_of
from listwise.descriptors import Model, Whitening, load_model
from listwise.descriptors.choosing import (
    Fold,
    choose_whitening,
    learn_directions,
    select,
    validation_folds,
    without_test_split,
)
from listwise.descriptors.loading import find_model_folder
from listwise.errors import InputError
from listwise.evaluation import Gain, JudgedQueries, compare_ap, evaluate_descriptors
from listwise.models.pooling import GeM
from listwise.models.storage import ModelSettings
from listwise.pages import percent
from listwise.progress import aligned, counting
from listwise.results.scaling import ScaledDescriptors, describe_at_scales
from listwise.search import database_augmentation
from listwise.settings import Expansion

SCALE_SETS = (
    (1.0,),
    (1.0, 0.7071),
    (1.4142,),
    (1.0, 1.4142),
    (1.0, 0.7071, 1.4142),
    (2.0,),
    (1.0, 1.4142, 2.0),
    (1.0, 0.7071, 1.4142, 2.0),
)
# Test-time powers of GeM, as multiples of the learned power.
GEM_FACTORS = (0.75, 1.25, 1.5, 2.0)
EXPANSIONS = tuple(Expansion(k=k, alpha=alpha) for k in (3, 5, 10, 20) for alpha in (1.0, 2.0, 3.0))
# Photos are not enlarged beyond this side: the time and memory grow with its square.
LARGEST_SIDE = 2048
# More photos make a whitening hardly better.
MOST_LEARNED = 20_000

AP = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TuningStep:
    """One setting that was tried.

    Attributes:
        setting: "scales", "GeM power", "whitening" or "αQE".
        before: the value before.
        best: the best other value.
        validation_map: validation mAP with `best`.
        gain: this mAP minus the mAP before, with its standard error.
        cost: the time to describe a photo with `best`, relative to one scale.
        taken: whether `best` was kept.
    """

    setting: str
    before: str
    best: str
    validation_map: float
    gain: Gain
    cost: float
    taken: bool


@dataclass(frozen=True, eq=False)
class Tuning:
    """The result of `tune`.

    Attributes:
        model: the model with the settings that were kept.
        steps: what was tried, in order.
        start_map: validation mAP of the model before.
        validation_map: validation mAP of `model`; never lower than `start_map`.
        queries: the number of validation photos that were searched for.
        classes: the number of their classes.
        start_seconds: the time of the network for a photo before, in seconds.
        seconds: the time of the network for a photo with `model`, in seconds.
        parts: the number of parts of the photos; each photo is searched in its part.
    """

    model: Model
    steps: tuple[TuningStep, ...]
    start_map: float
    validation_map: float
    queries: int
    classes: int
    start_seconds: float
    seconds: float
    parts: int = 1

    @property
    def changed(self) -> bool:
        """Whether any setting was changed."""
        return any(step.taken for step in self.steps)

    def table(self) -> str:
        """Format the steps as a plain text table, mAP in percent."""
        rows = [["setting", "value", "mAP", "gain", "cost", ""]]
        rows.append(["start", "", percent(self.start_map), "", "", ""])
        for step in self.steps:
            gain = f"{100 * step.gain.value:+.1f} ± {100 * step.gain.error:.1f}"
            verdict = "kept" if step.taken else f"not clearly better: stays {step.before}"
            value = percent(step.validation_map)
            rows.append([step.setting, step.best, value, gain, f"{step.cost:.1f}", verdict])
        return "\n".join(aligned(rows, left=len(rows[0])))

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.table())}</pre>"


def tune(
    model: Model | str | Path,
    photos: LabelledImages | str | Path,
    *,
    max_side: int | None = None,
    max_cost: float | None = None,
    device: str = "auto",
    workers: int | None = None,
    progress: bool | None = None,
    on_note: Callable[[str], object] = lambda note: None,
) -> Tuning:
    """Choose the test-time settings of a model by its mAP on validation photos.

    Scales, GeM power, whitening and α query expansion are tried one after the other. A value is
    kept only if its mAP is higher by more than two standard errors, so that the model never becomes
    worse on the validation photos; between equal values the cheaper one stays. Each photo is
    decoded once, and its feature map of each scale is pooled with all powers.

    The settings become part of the model: `Model.encode`, `extract`, `evaluate`, a new index and
    its searches use them where you give none. A model given as a folder is saved in the folder if
    a setting has changed. A new GeM power or whitening changes the fingerprint of the model, so
    upgrade its indexes.

    Args:
        model: a model, or the folder of a model or run.
        photos: labelled photos: class folders, a table or list, or the name of a data set. A table
            with the split "val" is validated on this split, and a whitening is learned from its
            other photos, except the split "test".
        max_side: reduce photos whose longer side has more pixels than this; 0 keeps the original
            size. By default the size that the model records, or 1024 on a GPU and 512 on a CPU. It
            is stored if one of the settings changes.
        max_cost: maximum number of pixels of a photo at all scales together, as a multiple of one
            scale; by default there is no limit.
        device: device: cpu, cuda, cuda:1, or auto, which uses a GPU if one is available.
        workers: number of processes that decode photos; by default from the number of CPU cores.
        progress: show a progress bar; by default on a terminal.
        on_note: called with a sentence about what was left out, and if the model loses its
            calibration.

    Raises:
        InputError: the photos have no labels, or too few photos per class.

    Examples:
        >>> tuning = listwise.tune("runs/photos/model", "photos.csv")   # doctest: +SKIP
        >>> print(tuning.table())                                       # doctest: +SKIP
    """
    opened = model if isinstance(model, Model) else load_model(find_model_folder(model), device)
    if not isinstance(model, Model) and opened.folder is None:
        raise InputError(
            f"{model} is the name of a backbone, and tuned settings are kept in a model folder: "
            "save the model in a folder first"
        )
    opened.trainable("tuned")
    name = str(Path(photos).resolve()) if isinstance(photos, str | Path) else "photos"
    labelled = photos if isinstance(photos, LabelledImages) else labelled_of(photos)
    images = without_test_split(labelled)
    search = _Search(opened, images, name, max_side, max_cost, workers, progress, on_note)
    tuning = search.run()
    if tuning.changed and not isinstance(model, Model) and opened.folder is not None:
        tuning.model.save(opened.folder)
    return tuning


class _Chosen(NamedTuple):
    """Values of the settings; `whitenings` is one for all photos, one for each fold, or none."""

    scales: tuple[float, ...]
    gem: float | None
    whitenings: tuple[Whitening, ...]
    expansion: Expansion | None


@dataclass(eq=False)
class _Search:
    """A greedy search, one setting after the other."""

    model: Model
    images: LabelledImages
    source: str
    max_side: int | None
    max_cost: float | None
    workers: int | None
    progress: bool | None
    on_note: Callable[[str], object]
    steps: list[TuningStep] = field(default_factory=list)

    def run(self) -> Tuning:
        folds, final = validation_folds(self.images)
        chosen = np.concatenate([fold.validate for fold in folds])
        self.settings = self.model.settings(self.max_side)
        self.on_note(self.model.size_note(self.max_side))
        self.found = self._describe(chosen)
        # Fold by fold, as choose_whitening takes them.
        self.chosen = chosen[self.found.kept]
        self.labels = self.images.labels[self.chosen]
        folds = [Fold(f.learn, f.validate[np.isin(f.validate, self.chosen)]) for f in folds]
        ends = np.cumsum([len(fold.validate) for fold in folds])
        self.lists = np.split(np.arange(len(self.chosen)), ends[:-1])
        self.whitening = self.model.whitening
        whitenings = () if self.whitening is None else (self.whitening,)
        tuned = None if self.model.tuned is None else self.model.tuned.expansion
        first = _Chosen(self.settings.scales, self.found.powers[0], whitenings, tuned)
        self.now, self.ap = first, self._measure(first)
        start = self.ap
        by_scales = {_listed(each): first._replace(scales=each) for each in self.sets[1:]}
        self._try("scales", _listed(first.scales), by_scales, stepwise=True)
        powers = [power for power in self.found.powers[1:] if power is not None]
        by_power = {f"{power:g}": self.now._replace(gem=power) for power in powers}
        self._try("GeM power", f"{first.gem:g}" if first.gem else "", by_power)
        self._try_whitening(folds, final)
        self._try_expansion()
        return Tuning(
            model=self._tuned_model(float(np.nanmean(start))),
            steps=tuple(self.steps),
            start_map=float(np.nanmean(start)),
            validation_map=float(np.nanmean(self.ap)),
            queries=int((~np.isnan(start)).sum()),
            classes=len(np.unique(self.labels)),
            start_seconds=self.found.seconds(first.scales),
            seconds=self.found.seconds(self.now.scales),
            parts=len(folds),
        )

    def _describe(self, chosen: npt.NDArray[np.int64]) -> ScaledDescriptors:
        images = self.images.subset(chosen)
        self.sets = self._scale_sets(images)
        pooling = self.model.net.pooling
        powers: list[float | None] = [None]
        if isinstance(pooling, GeM):
            learned = float(pooling.p.detach())
            powers = [learned, *(round(learned * factor, 3) for factor in GEM_FACTORS)]
        scales = sorted({1.0, *(scale for each in self.sets for scale in each)})
        with counting("describing", len(images), self.progress) as advance:
            found = describe_at_scales(
                self.model, images, self.settings, scales, powers, self.workers, advance
            )
        if found.errors:
            self.on_note(f"{len(found.errors)} photos cannot be read; the first: {found.errors[0]}")
        return found

    def _scale_sets(self, images: LabelledImages) -> list[tuple[float, ...]]:
        """Return the sets of scales to try: the present one, then the others by cost."""
        longest = 0
        for file in images.files():
            with suppress(InputError, OSError):
                longest = max(longest, *file.size())
        if self.settings.max_side is not None:
            longest = min(longest, self.settings.max_side)
        first = self.settings.scales
        others = [each for each in SCALE_SETS if sorted(each) != sorted(first)]
        if self.max_cost is not None:
            others = [each for each in others if pixels(each) <= self.max_cost]
        fitting = [e for e in others if max(e) <= 1 or max(e) * longest <= LARGEST_SIDE]
        if len(fitting) < len(others):
            self.on_note(
                f"the largest photo has {longest} pixels, so it is not enlarged beyond "
                f"{LARGEST_SIDE}: give a smaller `max_side` to try larger scales"
            )
        return [first, *sorted(fitting, key=pixels)]

    def _try(
        self, setting: str, before: str, options: Mapping[str, _Chosen], stepwise: bool = False
    ) -> bool:
        """Keep the best of some values, by their names, if it is clearly better.

        With `stepwise`, the values become more expensive, and each must be clearly better than the
        last one that was.
        """
        tried = {name: self._measure(each) for name, each in options.items()}
        if not tried:
            return False
        candidates, last = tried, self.ap
        for name, ap in tried.items() if stepwise else ():
            if compare_ap(ap, last, self.labels).clear:
                candidates, last = {name: ap}, ap
        best, ap, gain = select(candidates, self.ap, self.labels)
        cost = self.found.seconds(options[best].scales) / max(self.found.seconds((1.0,)), 1e-9)
        value = float(np.nanmean(ap))
        self.steps.append(TuningStep(setting, before, best, value, gain, cost, gain.clear))
        if gain.clear:
            self.now, self.ap = options[best], ap
        return gain.clear

    def _try_whitening(self, folds: Sequence[Fold], final: npt.NDArray[np.int64]) -> None:
        plain = self._rows(self.now._replace(whitenings=()))
        wanted = np.unique(np.concatenate([final, *(fold.learn for fold in folds)]))
        others = np.setdiff1d(wanted, self.chosen)
        if len(others) > MOST_LEARNED:
            others = np.sort(np.random.default_rng(0).permutation(others)[:MOST_LEARNED])
        rows = np.zeros((len(self.images), plain.shape[1]), np.float32)
        known = np.zeros(len(self.images), bool)
        rows[self.chosen], known[self.chosen] = plain, True
        if len(others):
            some = self.images.subset(others)
            model = replace(self._with_gem(), whitening=None)
            how = {**self.settings.arguments(), "scales": self.now.scales}
            with counting("describing", len(some), self.progress) as advance:
                found = model.describe(some, **how, workers=self.workers, on_progress=advance)
            rows[others[found.kept]], known[others[found.kept]] = found.descriptors, True
        folds = [Fold(*(part[known[part]] for part in fold)) for fold in folds]
        choice = choose_whitening(
            folds, lambda at: [rows[at]], self.images.labels, current=self.whitening
        )
        best = choice.best
        # Each photo with a whitening that was learned without it. The choice is made without query
        # expansion, the model may be used with it.
        unseen = tuple(best.whitening(each) for each in choice.directions)
        before = "none" if self.whitening is None else f"{self.whitening.dim} dimensions"
        if self._try("whitening", before, {str(best): self.now._replace(whitenings=unseen)}):
            learned = best.whitening(learn_directions([rows[final[known[final]]]], None))
            self.whitening = learned.learned_at(self.settings.max_side, self.now.scales)

    def _try_expansion(self) -> None:
        before, most = self.now.expansion, min(map(len, self.lists))
        candidates = [None, *(each for each in EXPANSIONS if each.k < most)]
        options = {
            _shown(each): self.now._replace(expansion=each) for each in candidates if each != before
        }
        self._try("αQE", _shown(before), options)

    def _rows(self, chosen: _Chosen) -> npt.NDArray[np.float32]:
        """Return the descriptors; those of each fold with its own whitening, if there are such."""
        rows = self.found.combine(chosen.scales, chosen.gem, self.settings.power)
        if len(chosen.whitenings) == len(self.lists):
            parts = zip(chosen.whitenings, self.lists, strict=True)
            return np.concatenate([whitening.apply(rows[part]) for whitening, part in parts])
        for whitening in chosen.whitenings:
            rows = whitening.apply(rows)
        return rows

    def _measure(self, chosen: _Chosen) -> AP:
        """Search each photo among the others of its fold; return its average precision [n]."""
        rows, expansion, found = self._rows(chosen), chosen.expansion, []
        for part in self.lists:
            own, judged = rows[part], JudgedQueries.labelled(self.labels[part])
            queries: npt.NDArray[np.floating] = own
            if expansion is not None:
                queries = database_augmentation(own, expansion.k, expansion.alpha)
            found.append(evaluate_descriptors(queries, own, judged)["Labels"].per_query_ap)
        return np.concatenate(found)

    def _with_gem(self) -> Model:
        """Return the model with the chosen GeM power."""
        learned, gem = self.found.powers[0], self.now.gem
        if gem is None or gem == learned:
            return self.model
        net = copy.deepcopy(self.model.net)
        assert isinstance(net.pooling, GeM)
        with torch.no_grad():
            net.pooling.p.fill_(gem)
        net.config.provenance.setdefault("learned_gem_power", learned)
        return Model(net, self.whitening, self.model.folder)

    def _tuned_model(self, start: float) -> Model:
        if not any(step.taken for step in self.steps):
            return self.model
        model = replace(self._with_gem(), whitening=self.whitening)
        settings = ModelSettings(
            max_side=self.settings.max_side or 0,
            scales=self.now.scales,
            power=self.settings.power,
            expansion=self.now.expansion,
            source=self.source,
            photos=int((~np.isnan(self.ap)).sum()),
            start_map=start,
            validation_map=float(np.nanmean(self.ap)),
        )
        calibration, reason = None, "its whitening was learned from the validation photos"
        if len(self.now.whitenings) <= 1:
            try:
                calibration = fit_calibration(self._rows(self.now), self.labels, self.source)
            except InputError as error:
                reason = str(error)
        if calibration is None:
            self.on_note(f"the model is not calibrated: {reason}")
        return replace(model, tuned=settings, calibration=calibration)


def pixels(scales: Sequence[float]) -> float:
    """Return the pixels of a photo at all scales together, relative to one scale."""
    return sum(scale**2 for scale in scales)


def _listed(scales: Sequence[float]) -> str:
    return ",".join(f"{scale:g}" for scale in scales)


def _shown(expansion: Expansion | None) -> str:
    return "off" if expansion is None else f"k {expansion.k}, α {expansion.alpha:g}"
