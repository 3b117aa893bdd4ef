"""Filters: what they mean, and that every engine finds exactly the entries that match."""

import json
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from listwise.errors import InputError
from listwise.search import Facet, Index, parse_filter
from listwise.search.entries import Entry, NewEntries
from listwise.search.filters import (
    MOST_NESTED,
    MOST_VALUES,
    FilterError,
    count_facets,
    quoted_name,
)
from listwise.search.folder import compressed, filtering
from listwise.search.folder.database import Database
from listwise.search.methods import SearchIntent
from listwise.search.opening import create_store
from listwise.search.store import IndexHeader

DIM = 16
HEADER = IndexHeader(model="f" * 64, model_folder="/models/m", whitened=True, dim=DIM)
CHAIR = {"price": "99.5", "category": "chair", "new": "True", "unit price": "3", "it's": 'a "b"'}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("price < 100", True),
        ("price<99.5", False),
        ("price <= 99.50", True),
        ("price = 9.95e1", True),
        ("price != 1", True),
        ("price > -1 and category = 'chair'", True),
        ("price > '100'", True),  # compared as text
        ("category = 'Chair'", False),
        ("category >= 'c' and category < 'd'", True),
        ("category > 5", False),  # not a number
        ("category != 5", True),
        ("category in ('table', 'chair')", True),
        ("category not in ('table', 'chair')", False),
        ("not category in ('table')", True),
        ("new = true", True),
        ("new = false", False),
        ("new != false", True),
        ("color = 'red'", False),
        ("color != 'red'", True),
        ("not color = 'red'", True),
        ("color = null", True),
        ("color != null", False),
        ("price in (1, null, 99.5)", True),
        ("category = 'table' or price < 1 or new = true", True),
        ("category = 'table' or category = 'chair' and price > 100", False),
        ("(category = 'table' or category = 'chair') and price > 1", True),
        ("NOT (price > 1 AND price < 50)", True),
        ('"unit price" = 3', True),
        ('"it\'s" = \'a "b"\'', True),
        ("category = 'chair''s'", False),
        ("category contains 'HAI'", True),
        ("category contains 'table'", False),
        ("category not contains 'hai'", False),
        ("color not contains 'red'", True),
        ("price contains '9.'", True),
        ("category == 'chair' and price <> 1", True),
    ],
)
def test_what_an_expression_means(text, holds, database):
    found = positions_of(database, text, [CHAIR, {"color": "blue"}])
    assert (0 in found) is holds


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "at the end: expected the name of an attribute"),
        ("price", "at the end: expected one of = !="),
        ("price <", "at the end: expected a value"),
        ("price < cheap", "at 'cheap': expected a value"),
        ("price < 100 category = 'a'", "expected the end, `and` or `or`"),
        ("(price < 100", "at the end: expected `\\)`"),
        ("price < 100)", "expected the end"),
        ("price in 3", "at '3': expected `\\(`"),
        ("price in ()", "expected a value"),
        ("category contains 3", "at '3': expected 'text' in single quotes"),
        (" or ".join(["a contains 'b'"] * 11), "`contains` more than 10 times"),
        ("category = 'open", 'at "\'open": expected'),
        ("price < 1; drop", "at '; drop'"),
        ("__import__('os')", "at \"\\('os'\\)\""),
        ("price < 1e999", "too large"),
        ("price < 12abc", "at '12abc'"),
        ("price < null", "by = and != only"),
        ("new >= true", "by = and != only"),
        ("(" * 2000, f"nested more than {MOST_NESTED} times"),
        ("not " * 2000 + "a = 1", f"nested more than {MOST_NESTED} times"),
        (f"a in ({', '.join('1' * (MOST_VALUES + 1))})", "more than 500 comparisons"),
        (" or ".join(["a = 1"] * (MOST_VALUES + 1)), "more than 500 comparisons"),
        ("a = '" + "x" * 30000 + "'", "30006 characters"),
    ],
)
def test_an_expression_that_cannot_be_read_is_one_line(text, reason):
    with pytest.raises(InputError, match=reason) as error:
        parse_filter(text)
    assert "\n" not in str(error.value)


# Texts that JSON, SQL and Milvus write differently, and numbers that are hard to read.
DIGITS = "0123456789."
NAMES = [
    "price",
    "category",
    "a b",
    "it's",
    'say "x"',
    "ключ",
    "$meta",
    "a.b",
    "[0]",
    "\\",
    "and",
    "",
]
TEXTS = ["", "a", "A", "b", "'", "''", '"', "\\", "\\n", "\n", "%", "_", "é", "😀", "null", "true"]
TEXTS += [
    "True",
    "0",
    "-0",
    "1",
    "01",
    "1.0",
    "1e3",
    "1000",
    "+5",
    ".5",
    "5.",
    "1e999",
    "nan",
    "1_0",
]
TEXTS += ["2024-05-01", "2024-05-01T10:00:00", "9007199254740993", "-1e-300", " 1", "١"]
names = st.sampled_from(NAMES) | st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), max_size=6
)
texts = st.sampled_from(TEXTS) | st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), max_size=8
)
numbers = st.sampled_from([0.0, 1.0, -1.0, 5.0, 0.5, 1000.0, 9007199254740992.0]) | st.floats(
    allow_nan=False, allow_infinity=False, width=64
)


def written(value):
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value) if isinstance(value, float) else "'" + value.replace("'", "''") + "'"


@st.composite
def expressions(draw, depth=3, contains=True):
    """The text of an expression, and what it means in Python."""
    simple = ["compare", "in", *["contains"] * contains]
    kind = draw(st.sampled_from([*simple, "not", "and", "or"] if depth else simple))
    if kind == "not":
        text, meaning = draw(expressions(depth - 1, contains))
        return f"not ({text})", lambda entry: not meaning(entry)
    if kind in ("and", "or"):
        parts = draw(st.lists(expressions(depth - 1, contains), min_size=2, max_size=3))
        join = all if kind == "and" else any
        text = f" {kind} ".join(f"({part})" for part, _ in parts)
        return text, lambda entry: join(meaning(entry) for _, meaning in parts)
    name = draw(names)
    written_name = '"' + name.replace('"', '""') + '"'
    if kind == "in":
        values = draw(st.lists(texts | numbers | st.booleans() | st.none(), min_size=1, max_size=3))
        text = f"{written_name} in ({', '.join(map(written, values))})"
        return text, lambda entry: any(plain(entry.get(name), "=", value) for value in values)
    if kind == "contains":
        part = draw(texts)
        folded = part.casefold()
        text = f"{written_name} contains {written(part)}"
        return text, lambda entry: name in entry and folded in entry[name].casefold()
    value = draw(texts | numbers | st.booleans() | st.none())
    plain_value = isinstance(value, bool | None)
    sign = draw(st.sampled_from(["=", "!="] if plain_value else ["=", "!=", "<", "<=", ">", ">="]))
    text = f"{written_name} {sign} {written(value)}"
    return text, lambda entry: plain(entry.get(name), sign, value)


def plain(text, sign, value):
    """A comparison written out a second time."""
    if sign == "!=":
        return not plain(text, "=", value)
    if text is None or value is None:
        return text is None and value is None
    if isinstance(value, bool):
        return text in (str(value), str(value).lower(), str(value).upper())
    if isinstance(value, float):
        if (
            not text.isascii()
            or not text
            or {text[0], text[-1]} - {*DIGITS, "+", "-"}
            or "_" in text
        ):
            return False
        try:
            text = float(text)
        except ValueError:
            return False
        if text in (float("inf"), float("-inf")):
            return False
    found = {"=": text == value, "<": text < value, "<=": text <= value}
    return found[sign] if sign in found else not found["<=" if sign == ">" else "<"]


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """The tables of entries and of their attributes."""
    tables = f"CREATE TABLE entries (position INTEGER PRIMARY KEY, attributes); {filtering.TABLE}"
    return Database.create(tmp_path_factory.mktemp("filters") / "f.sqlite", "index", tables)


def positions_of(database, text, entries):
    """The entries that match a filter by the tables; None for an unknown attribute."""
    with database.writing() as connection:
        connection.execute("DELETE FROM entries")
        rows = [(json.dumps(entry, ensure_ascii=False),) for entry in entries]
        connection.executemany("INSERT INTO entries (attributes) VALUES (?)", rows)
        filtering.rebuild_attributes(connection)
        assert filtering.attributes_agree(connection)
        alive = np.arange(len(entries) + 1) > 0  # SQLite counts from 1
        try:
            found = filtering.matching_positions(connection, parse_filter(text), alive)
        except FilterError:
            return None
    return [int(place) - 1 for place in found]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(expressions(), st.lists(st.dictionaries(names, texts, max_size=5), max_size=8))
@example(("a = 1", lambda entry: entry.get("a") == "1"), [{}])
def test_tables_give_what_python_gives(database, expression, entries):
    text, meaning = expression
    found = positions_of(database, text, entries)
    if found is None:
        unknown = set(parse_filter(text).names) - {name for entry in entries for name in entry}
        assert unknown
    else:
        assert found == [place for place, entry in enumerate(entries) if meaning(entry)]


def test_many_values_take_little_longer_than_one(database):
    entries = [{"sku": str(number)} for number in range(20_000)]
    positions_of(database, "sku = 1", entries)
    values = range(MOST_VALUES)
    alive = np.ones(len(entries) + 1, bool)

    def seconds(text, count):
        where = parse_filter(text)
        with database.reading() as connection:
            start = time.process_time()
            assert len(filtering.matching_positions(connection, where, alive)) == count
            return time.process_time() - start

    one = max(seconds("sku = 7", 1), seconds("sku = 7", 1), 0.005)
    assert seconds(f"sku in ({', '.join(map(str, values))})", MOST_VALUES) < 30 * one
    assert seconds(f"sku in ({', '.join(map(repr, map(str, values)))})", MOST_VALUES) < 30 * one
    assert seconds(" or ".join(f"sku < {v}" for v in values), MOST_VALUES - 1) < 30 * one
    assert seconds(" or ".join(f"sku > '9999{v}'" for v in values), 0) < 30 * one


@given(names)
def test_a_name_is_read_as_it_was_quoted(name):
    assert parse_filter(f"{quoted_name(name)} = 1").names == (name,)


@pytest.fixture(scope="module", params=["embedded", "lite", "server"])
def store(request):
    place = request.getfixturevalue(f"{request.param}_places")()
    with create_store(place, HEADER) as made:
        yield made


def vectors(count, seed=0):
    rows = np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def fill(store, attributes):
    store.remove([entry.key for entry in store])
    entries = [
        Entry(f"{number}.jpg", f"/photos/{number}.jpg", 64, 48, None, f"digest {number}", each)
        for number, each in enumerate(attributes)
    ]
    rows = vectors(len(entries))
    store.put(NewEntries(entries, rows, [b""] * len(entries)))
    return entries, rows


def test_every_engine_finds_what_python_finds(store):
    drawn = np.random.default_rng(1)
    attributes = [
        {name: str(drawn.choice(TEXTS)) for name in NAMES if drawn.random() < 0.5}
        for _ in range(60)
    ]
    attributes[0] = dict(zip(NAMES, TEXTS, strict=False))  # each name is known
    entries, _ = fill(store, attributes)
    known = set(NAMES)
    server = store.uri.startswith("milvus://")  # of version 2.3, which cannot search in texts

    @given(expressions(contains=not server))
    @settings(
        max_examples=40,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def check(expression):
        text, meaning = expression
        where = parse_filter(text)
        if not set(where.names) <= known:
            with pytest.raises(InputError, match="no entry has the attribute"):
                store.keys(where)
            return
        expected = {entry.key for entry in entries if meaning(entry.attributes)}
        assert set(store.keys(where).tolist()) == expected
        _, keys = store.search(vectors(1, seed=5), 60, where)
        assert set(keys[0].tolist()) == expected

    check()


def test_search_finds_the_nearest_of_those_that_match(store):
    attributes = [{"n": str(i), "kind": "even" if i % 2 == 0 else "odd"} for i in range(100)]
    entries, rows = fill(store, attributes)
    index = Index(store)
    query = vectors(1, seed=9)[0]
    order = np.argsort(-rows @ query)
    expected = [entries[i].id for i in order if i % 2 and i < 50][:10]
    assert [hit.id for hit in index.search(query, where="kind = 'odd' and n < 50")] == expected
    assert [hit.id for hit in index.search(query, where="n in (4, 71)")] == [
        entries[i].id for i in order if i in (4, 71)
    ]
    assert index.search(query, where="n > 1000") == []
    assert len(index.search(query, k=200, where="kind = 'odd'", exclude="1.jpg")) == 49
    found = index.search(query, like="3.jpg", k=3, where="kind = 'odd'")
    assert "3.jpg" not in [hit.id for hit in found]
    assert len(found) == 3


def test_entries_are_listed_and_removed_by_a_filter(store):
    fill(store, [{"n": str(i), "kind": "even" if i % 2 == 0 else "odd"} for i in range(30)])
    index = Index(store)
    listed = [entry.id for entry in index.entries(where="kind = 'odd'")]
    assert sorted(listed) == sorted(f"{i}.jpg" for i in range(1, 30, 2))
    assert [e.id for e in index.entries(where="kind = 'odd'", start=3, count=4)] == listed[3:7]
    assert len(list(index.entries())) == 30
    assert len(list(index.entries(count=7))) == 7
    numbers = Facet("n", (), "number", "0", "29")  # 30 values, which are not listed
    assert index.facets() == [Facet("kind", (("even", 15), ("odd", 15))), numbers]
    assert index.remove(["1.jpg", "2.jpg"], where="kind = 'odd'") == 1
    assert index.remove(where="n >= 10") == 20
    assert sorted(entry.id for entry in index) == sorted(f"{i}.jpg" for i in (0, *range(2, 10)))
    with pytest.raises(InputError, match="give `photos` or `where`"):
        index.remove()


def test_an_unknown_attribute_is_an_error_that_lists_the_known_ones(store):
    fill(store, [{"price": "3"}, {"a b": "x"}])
    message = 'no entry has the attribute color; known attributes: "a b", price'
    for act in (
        lambda where: Index(store).search(vectors(1)[0], where=where),
        lambda where: list(Index(store).entries(where=where)),
        lambda where: Index(store).remove(where=where),
    ):
        with pytest.raises(InputError, match=message):
            act("price < 5 or color = 'red'")
    fill(store, [{}])
    with pytest.raises(InputError, match="color; known attributes: none"):
        Index(store).search(vectors(1)[0], where="color = 'red'")


@pytest.fixture(scope="module")
def many(embedded_places):
    """2,000 entries in a folder, three of them rare, with compressed search."""
    count = 2000
    rows = vectors(count, seed=3)
    with create_store(embedded_places(), HEADER) as store:
        for start in range(0, count, 1000):
            entries = [
                Entry(f"{i}", "", 4, 4, None, f"d{i}", {"n": str(i), "rare": str(i % 750 == 11)})
                for i in range(start, start + 1000)
            ]
            store.put(NewEntries(entries, rows[start : start + 1000], [b""] * 1000))
        store.method.tune(SearchIntent(memory=40 * count))
        assert "compressed" in store.method.facts()["method"]
        yield store, rows


@pytest.mark.parametrize("few", [compressed._FEW, 0])
def test_rare_matches_are_all_found_with_compressed_search(many, few, monkeypatch):
    store, rows = many
    monkeypatch.setattr(compressed, "_FEW", few)
    index = Index(store)
    query = vectors(1, seed=8)[0]
    order = [str(i) for i in np.argsort(-rows @ query)]
    found = index.search(query, where="rare = true")
    assert [hit.id for hit in found] == sorted(("11", "761", "1511"), key=order.index)
    # Half of the entries: the share of the exact results that is found.
    found = {hit.id for hit in index.search(query, where="n < 1000")}
    expected = [name for name in order if int(name) < 1000][:10]
    assert len(found) == 10
    assert len(found & set(expected)) >= (10 if few else 8)


def test_the_kept_results_of_a_filter_follow_changes(store):
    fill(store, [{"n": "1"}, {"n": "2"}])
    where = parse_filter("n = 2")
    assert len(store.keys(where)) == 1
    changed = Entry("0.jpg", "", 4, 4, None, "d", {"n": "2"})
    store.put(NewEntries([changed], vectors(1), [b""]))
    assert len(store.keys(where)) == 2
    store.remove([changed.key])
    assert len(store.keys(where)) == 1
    store.remove(store.keys(where).tolist())
    with pytest.raises(FilterError, match="no entry has the attribute n"):
        store.keys(where)


def test_facets_are_numbers_dates_or_texts():
    days = [{"day": f"2024-02-{day:02}", "seen": f"{day}"} for day in range(1, 29)]
    days[3] |= {"day": "2024-02-04T10:00:00", "price": "9", "seen": ""}
    days[4] |= {"price": "10.5", "uploaded_as": "a.jpg", "title": "2024-02-04"}
    days[5] |= {"title": "a chair"}
    facets = {facet.name: facet for facet in count_facets((each, 2) for each in days)}
    assert list(facets) == ["day", "price", "seen", "title"]
    assert facets["day"] == Facet("day", (), "date", "2024-02-01", "2024-02-28")
    assert facets["price"] == Facet("price", (("10.5", 2), ("9", 2)), "number", "9", "10.5")
    assert facets["seen"] == Facet("seen", (), "number", "1", "28")
    assert facets["title"] == Facet("title", (("2024-02-04", 2), ("a chair", 2)))
