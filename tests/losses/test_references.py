"""Queries that rank references instead of their batch."""

from importlib.util import find_spec

import pytest
import torch
from loss_examples import mean_over_queries
from test_formulas import smooth_ap
from torch.nn.functional import normalize

from listwise import losses
from listwise.errors import InputError
from listwise.losses import histogram

LOSSES = {
    "ap": losses.QuantizedAPLoss(7),
    "tie-aware": losses.TieAwareAPLoss(7, "closed"),
    "recall-at-k": losses.RecallAtKLoss([1, 3], 0.2),
    "roadmap": losses.RoadmapLoss(0.2, 3.0),
    "infonce": losses.InfoNCELoss(0.3),
    "triplet": losses.TripletLoss(form="log-exp"),
    "contrastive": losses.ContrastiveLoss(1.2, negatives=3),
}
if find_spec("pytorch_metric_learning"):
    LOSSES["multi-similarity"] = losses.MultiSimilarityLoss()
LABELS = torch.tensor([0, 1, 1, 5, 2, 0])  # no reference has the label 5
REFERENCE_LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 2, 3, 4])
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0, 1.5], dtype=torch.float64)


def make_rows():
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (6, 9)]
    return [row.requires_grad_() for row in rows]


def with_gradients(function):
    """The value of a function of queries and references, and its gradients."""
    rows = make_rows()
    value = function(*(normalize(row, dim=1) for row in rows))
    value.backward()
    return value.detach(), *(row.grad for row in rows)


def assert_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def one_by_one(loss):
    """Each query in a batch of its own, which has the references as its other images."""

    def function(queries, references):
        values, weights = [], []
        for q, label in enumerate(LABELS):
            if not (label == REFERENCE_LABELS).any():
                continue
            batch = torch.cat([queries[q : q + 1], references])
            labels = torch.cat([label[None], REFERENCE_LABELS])
            alone = torch.eye(1, len(labels), dtype=torch.float64)[0]
            values.append(loss(batch, labels, alone, queries=(0, 1)))
            weights.append(WEIGHTS[q])
        weights = torch.stack(weights)
        return (weights * torch.stack(values)).sum() / weights.sum()

    return function


def call(loss, descriptors, references, **options):
    return loss(
        descriptors,
        LABELS,
        WEIGHTS,
        references=references,
        reference_labels=REFERENCE_LABELS,
        **options,
    )


@pytest.mark.parametrize("tile", [1024, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_a_query_ranks_the_references_alone(name, tile, monkeypatch):
    monkeypatch.setattr(histogram, "TILE", tile)
    loss = LOSSES[name]
    weights = WEIGHTS
    if name == "multi-similarity":  # it counts queries without a positive too
        weights = torch.where(LABELS == 5, 0, WEIGHTS)
    actual = with_gradients(
        lambda q, r: loss(q, LABELS, weights, references=r, reference_labels=REFERENCE_LABELS)
    )
    assert_equal(actual, with_gradients(one_by_one(loss)))


def test_smooth_ap_of_references_is_its_formula():
    def formula(queries, references):
        scores = queries @ references.T
        return mean_over_queries(
            scores, LABELS, WEIGHTS, smooth_ap, (0.2,), ranked=REFERENCE_LABELS
        )

    loss = losses.SmoothAPLoss(0.2)
    assert_equal(with_gradients(lambda q, r: call(loss, q, r)), with_gradients(formula))


@pytest.mark.parametrize("name", LOSSES)
def test_shares_add_up_and_detached_references_change_nothing(name):
    loss = LOSSES[name]
    value, gradient, _ = with_gradients(lambda q, r: call(loss, q, r))
    parts = ((0, 1), (1, 4), (4, 6))
    shares = with_gradients(lambda q, r: sum(call(loss, q, r.detach(), queries=p) for p in parts))
    assert_equal(shares[:2], (value, gradient))
    assert shares[2] is None


def test_one_query_is_enough_and_tuples_have_rows_of_references():
    queries, references = (normalize(row.detach(), dim=1) for row in make_rows())
    labels = {"references": references, "reference_labels": REFERENCE_LABELS}
    assert losses.QuantizedAPLoss()(queries[:1], LABELS[:1], **labels) >= 0
    value = losses.TripletLoss(2.0)(
        queries[:1], LABELS[:1], tuples=torch.tensor([[0, 3, 8]]), **labels
    )
    near, far = (queries[0] - references[i] for i in (3, 8))
    assert value == pytest.approx(((2 + near @ near - far @ far) / 2).item())


def test_what_makes_no_sense_is_refused():
    queries, references = (normalize(row.detach(), dim=1) for row in make_rows())
    loss = losses.InfoNCELoss()
    whole = {"references": references, "reference_labels": REFERENCE_LABELS}
    for given, says in (
        ({"reference_labels": None}, "reference_labels is missing"),
        ({"references": None}, "references is missing"),
        ({"references": references[:, :3]}, "the same dimension and type"),
        ({"references": references[:4]}, "4 references but 9 reference_labels"),
        ({"references": 2 * references}, "references must have unit length"),
        ({"reference_labels": REFERENCE_LABELS + 9}, "no reference has the label of a query"),
        ({"references": references[0], "reference_labels": LABELS}, "must be a tensor"),
    ):
        with pytest.raises(InputError, match=says):
            loss(queries, LABELS, **(whole | given))
    if find_spec("pytorch_metric_learning"):
        with pytest.raises(InputError, match="FastAPLoss does not take references"):
            call(losses.FastAPLoss(), queries, references)
