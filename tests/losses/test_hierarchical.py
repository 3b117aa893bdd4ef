"""HAPPIER against its formulas written down as loops."""

import pytest
import torch
from loss_examples import assert_same, step
from torch.nn.functional import normalize

from listwise.errors import InputError
from listwise.losses import HierarchicalAPLoss, RoadmapLoss
from listwise.settings import make_config
from listwise.training.objective import make_loss

# Five classes of three levels: 0 and 1 share two levels, 2 shares one with them.
LEVELS = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [1, 3, 4]])
LABELS = torch.tensor([0, 1, 1, 2, 0, 3, 3, 4, 2, 0])
WEIGHTS = torch.linspace(0.5, 2, 10, dtype=torch.float64)


def shared(a, b):
    """How many levels two classes share, from the coarsest on."""
    count = 0
    for first, second in zip(LEVELS[a].tolist(), LEVELS[b].tolist(), strict=True):
        if first != second:
            return count
        count += 1
    return count


def formula(descriptors, references, reference_labels, alpha, tau, rho, delta):
    """Ramzi et al., Eq. 2 to 5 and their surrogate; references None: the rest of the batch."""
    above, below = 0.0, 0.0
    for q, x in enumerate(descriptors):
        if references is None:
            others = [i for i in range(len(LABELS)) if i != q]
            s, level = descriptors @ x, [shared(LABELS[q], LABELS[i]) for i in range(len(LABELS))]
        else:
            others = list(range(len(references)))
            s, level = references @ x, [shared(LABELS[q], label) for label in reference_labels]
        alike = {n: sum(level[i] == n for i in others) for n in range(4)}
        rel = {i: (level[i] / 3) ** alpha / alike[level[i]] if level[i] else 0 for i in others}
        relevant = [i for i in others if level[i]]
        if not relevant:
            continue
        total = 0.0
        for k in relevant:
            hrank, rank = rel[k], 1.0
            for j in others:
                if j == k:
                    continue
                hrank = hrank + min(rel[k], rel[j]) * float(s[j] > s[k])
                if level[j] < level[k]:
                    rank = rank + step(s[j] - s[k], tau, rho, delta)
                else:
                    rank = rank + float(s[j] > s[k])
            total = total + hrank / rank
        above = above + WEIGHTS[q] * (1 - total / sum(rel.values()))
        below = below + WEIGHTS[q]
    return above / below


def raw(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 5, generator=generator, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(("alpha", "slope"), [(1.0, 100.0), (0.5, 2.0)])
def test_equals_the_formula(alpha, slope):
    rows = raw(10, 0)
    loss = HierarchicalAPLoss(LEVELS, alpha=alpha, temperature=0.1, slope=slope)
    value = loss(normalize(rows, dim=1), LABELS, WEIGHTS)
    expected = formula(normalize(rows, dim=1), None, None, alpha, 0.1, slope, 0.05)
    assert_same(value, expected, (rows,))


def test_references_are_ranked_instead():
    rows, others = raw(10, 0), raw(7, 1)
    labels = torch.tensor([0, 0, 1, 2, 3, 3, 2])
    loss = HierarchicalAPLoss(LEVELS, temperature=0.1)
    descriptors, references = normalize(rows, dim=1), normalize(others, dim=1)
    value = loss(descriptors, LABELS, WEIGHTS, references=references, reference_labels=labels)
    expected = formula(descriptors, references, labels, 1.0, 0.1, 100.0, 0.05)
    assert_same(value, expected, (rows, others))


def test_with_one_level_it_is_the_bound_of_roadmap():
    descriptors, flat = normalize(raw(10, 2), dim=1), torch.arange(5)[:, None]
    value = HierarchicalAPLoss(flat)(descriptors, LABELS, WEIGHTS)
    torch.testing.assert_close(value, RoadmapLoss(calibration=0)(descriptors, LABELS, WEIGHTS))


def test_the_clustering_term_is_a_cross_entropy():
    rows = raw(10, 3)
    torch.manual_seed(0)
    loss = HierarchicalAPLoss(LEVELS, dim=5, clustering=0.3).double()
    plain = HierarchicalAPLoss(LEVELS)
    descriptors = normalize(rows, dim=1)
    logits = descriptors @ normalize(loss.centers, dim=1).T / 0.05
    terms = -logits.log_softmax(1)[torch.arange(10), LABELS]
    cluster = (WEIGHTS * terms).sum() / WEIGHTS.sum()
    expected = 0.7 * plain(descriptors, LABELS, WEIGHTS) + 0.3 * cluster
    assert_same(loss(descriptors, LABELS, WEIGHTS), expected, (rows, loss.centers))
    assert list(loss.state_dict()) == ["centers"]


def test_the_names_of_classes_give_the_levels():
    config = make_config({"loss": "hierarchical-ap", "hierarchical_ap": {"alpha": 2.0}})
    loss = make_loss(config, ["a/x", "a/y", "b/z"], 7)
    assert loss.levels.tolist() == [[0, 0], [0, 1], [1, 2]]
    assert loss.centers.shape == (3, 7)
    assert loss.alpha == 2.0
    assert config.rate_factor == 100


def test_what_makes_no_sense_is_refused():
    for given, says in (
        ({"levels": LEVELS[0]}, r"levels must be a tensor \[K, L\]"),
        ({"levels": LEVELS.float()}, "levels must be integers"),
        ({"alpha": -1}, "alpha must be at least zero"),
        ({"clustering": 2}, "clustering must be from 0 to 1"),
        ({"clustering_temperature": 0}, "clustering_temperature must be above zero"),
        ({"temperature": 0}, "temperature must be above zero"),
        ({"dim": 0}, "dim must be a whole number of at least 1"),
    ):
        with pytest.raises(InputError, match=says):
            HierarchicalAPLoss(**({"levels": LEVELS} | given))
    loss = HierarchicalAPLoss(LEVELS)
    with pytest.raises(InputError, match="labels must be from 0 to 4"):
        loss(torch.eye(2), torch.tensor([0, 5]))
