"""The engine of the server: searches that are refined one by one."""

import io
from dataclasses import replace

import pytest
from index_examples import texture

from listwise.search.entries import entry_key
from listwise.search.refinement import REFINEMENTS
from listwise.serving.batching import ClientGoneError
from listwise.serving.engine import Engine, SearchRequest
from listwise.serving.settings import Limits

KEYS = [entry_key(f"class{number}/0.jpg") for number in range(3)]


def by_key(key, refine="diffusion"):
    return SearchRequest((), (), [key], 5, None, False, refine=refine)


@pytest.fixture
def engine(index):
    engine = Engine(index, Limits())
    yield engine
    engine.close()


@pytest.fixture
def refined(monkeypatch):
    """Calls functions before each refinement, which then takes place; counts them."""
    method = REFINEMENTS["diffusion"]
    calls, before = [], []

    def score(query, short_list):
        calls.append(len(short_list))
        for function in before:
            function()
        return method.score(query, short_list)

    monkeypatch.setitem(REFINEMENTS, "diffusion", replace(method, score=score))
    return calls, before


def test_a_search_whose_client_left_is_not_refined(engine, refined):
    calls, before = refined
    first, second, third = requests = [by_key(key) for key in KEYS]
    third.finished.set()
    before.append(second.finished.set)  # the second client leaves during the first refinement
    found = engine.search([*requests, by_key(KEYS[1], refine=None)])
    assert len(calls) == 1
    assert isinstance(found[1], ClientGoneError)
    assert isinstance(found[2], ClientGoneError)
    assert len(found[0].hits) == 6
    assert all(hit.refined is not None for hit in found[0].hits)
    assert [hit.refined for hit in found[3].hits] == [None] * 6
    assert not first.finished.is_set()


def test_an_error_of_a_refinement_concerns_its_search_alone(engine, refined):
    calls, before = refined

    def fail():
        if len(calls) == 1:
            raise ValueError("the first one")

    before.append(fail)
    failed, found = engine.search([by_key(key) for key in KEYS[:2]])
    assert str(failed) == "the first one"
    assert len(found.hits) == 6


def test_refinement_counts_as_work_in_the_queue(engine):
    photo = io.BytesIO()
    texture(1).save(photo, "PNG")
    for photos in ((), [photo]):
        costs = [
            engine.cost(replace(by_key(KEYS[0], refine), photos=photos, boxes=[None] * len(photos)))
            for refine in (None, "superglobal", "diffusion")
        ]
        assert 0 < costs[0] < costs[1] < costs[2]
