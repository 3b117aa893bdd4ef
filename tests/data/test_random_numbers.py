"""Numbers of many generators against NumPy's own generators."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from listwise.data import CropDataset, CropSettings, read_labelled
from listwise.data.crops import plan_crops
from listwise.data.random_numbers import uniform_draws


@given(
    prefix=st.lists(st.integers(0, 2**80), min_size=1, max_size=3),
    keys=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5),
    count=st.integers(1, 12),
)
def test_numbers_are_those_of_numpy(prefix, keys, count):
    expected = [np.random.default_rng([*prefix, key]).random(count) for key in keys]
    assert (uniform_draws(prefix, np.array(keys), count) == np.stack(expected)).all()


@pytest.mark.parametrize("prefix", [[0], [0, 0], [0, 2**32], [2**32 - 1, 2**64]])
def test_numbers_at_the_limits_of_words(prefix):
    keys = np.array([0, 1, 2**31, 2**32 - 1])
    expected = [np.random.default_rng([*prefix, key]).random(3) for key in keys.tolist()]
    assert (uniform_draws(prefix, keys, 3) == np.stack(expected)).all()


def test_a_batch_is_planned_as_each_crop_alone(photos):
    """The GPU plans the crops of a batch together, a worker process each crop alone."""
    options = CropSettings(size=32, flip=0.5)
    dataset = CropDataset(read_labelled(photos), options, seed=11)
    indices = np.array([4, 0, 31, 4])
    widths, heights = np.array([90, 40, 333, 90]), np.array([60, 80, 500, 60])
    together = plan_crops(widths, heights, options, dataset.draws(6, indices))
    for row, index in enumerate(indices.tolist()):
        draws = dataset.generator((6, index)).random((1, 10))
        alone = plan_crops([widths[row]], [heights[row]], options, draws)
        for many, one in zip(together, alone, strict=True):
            assert (many[row] == one[0]).all()
