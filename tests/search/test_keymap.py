import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from listwise.search.folder.keymap import KeyMap

numbers = st.integers(-5, 20)
changes = st.lists(st.one_of(st.dictionaries(numbers, st.integers()), st.sets(numbers)), max_size=8)


def array(values: object) -> np.ndarray:
    return np.array(list(values), np.int64)  # type: ignore[call-overload]


@given(changes.map(lambda steps: [clip(step) for step in steps]), st.lists(numbers))
def test_it_is_a_dictionary(steps: list[dict[int, int] | set[int]], asked: list[int]) -> None:
    found, model = KeyMap(), dict[int, int]()
    for step in steps:
        if isinstance(step, dict):
            found.put(array(step.keys()), array(step.values()))
            model.update(step)
        else:
            found.remove(array(step))
            model = {key: value for key, value in model.items() if key not in step}
        assert dict(zip(found.keys.tolist(), found.values.tolist(), strict=True)) == model
        assert found.keys.tolist() == sorted(model)
        assert len(found) == len(model)
    known, values = found.find(array(asked))
    assert known.tolist() == [key in model for key in asked]
    assert values.tolist() == [model[key] for key in asked if key in model]


def clip(step: dict[int, int] | set[int]) -> dict[int, int] | set[int]:
    if isinstance(step, dict):
        return {key: value % 2**62 for key, value in step.items()}
    return step
