"""Filters: expressions over the attributes of entries, such as `price < 100 and color = 'red'`.

    expression = term {"or" term}
    term       = factor {"and" factor}
    factor     = "not" factor | "(" expression ")" | comparison
    comparison = name ("=" | "!=" | "<" | "<=" | ">" | ">=") value
               | name ["not"] "in" "(" value {"," value} ")"
               | name ["not"] "contains" 'text'
    name       = a word, or any text in double quotes
    value      = 'text' | number | true | false | null

Attributes are text. A comparison with a number holds only for texts that are numbers, a comparison
with text compares characters, `contains` ignores case, `true` and `false` stand for these words,
and `null` stands for an attribute that an entry does not have. Any other comparison with a missing
attribute is false. `!=` and `not` are true exactly where `=` or the negated expression is false.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from listwise.errors import InputError
from listwise.search.entries import UPLOADED_AS

Value = str | float | bool | None
FacetKind = Literal["number", "date", "text"]
MOST_CHARACTERS = 20_000
MOST_VALUES = 500  # comparisons in one filter
MOST_CONTAINS = 10  # each reads all values of an attribute
MOST_NESTED = 30  # parentheses and negations inside each other
FACET_VALUES = 20  # of an attribute with more distinct values they are not listed

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<end>\Z)
      | (?P<text>'(?:[^']|'')*')
      | (?P<quoted>"(?:[^"]|"")*")
      | (?P<number>[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])
      | (?P<word>[^\W\d]\w*)
      | (?P<sign><=|>=|!=|<>|==|[=<>(),])
      | (?P<other>.)
    )""",
    re.VERBOSE | re.DOTALL,
)
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_WORDS = {"and", "or", "not", "in", "contains", "true", "false", "null"}
SIGNS = ("=", "<", "<=", ">", ">=")
CONTAINS = "contains"
_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ].*)?")
_BOOLEANS = {True: ("true", "True", "TRUE"), False: ("false", "False", "FALSE")}


@dataclass(frozen=True)
class Comparison:
    """A comparison of an attribute with a value; `sign` is one of = < <= > >= contains.

    The value of `contains` is in the case of `str.casefold`.
    """

    name: str
    sign: str
    value: Value

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts that a comparison with text or a truth value names."""
        if isinstance(self.value, bool):
            return _BOOLEANS[self.value]
        return (self.value,) if isinstance(self.value, str) else ()


@dataclass(frozen=True)
class Not:
    """The negation of an expression."""

    part: "Node"


@dataclass(frozen=True)
class And:
    """An expression that holds if all its parts hold."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True)
class Or:
    """An expression that holds if one of its parts holds."""

    parts: "tuple[Node, ...]"


Node = Comparison | Not | And | Or


@dataclass(frozen=True)
class Filter:
    """A parsed filter; `parse_filter` makes one.

    Attributes:
        text: the expression as it was written.
        root: the parsed expression.
        names: the attributes that it uses.
    """

    text: str
    root: Node
    names: tuple[str, ...]


@dataclass(frozen=True)
class Facet:
    """An attribute, and what its values are.

    Attributes:
        name: the attribute.
        values: each value with the number of entries that have it, most frequent first; empty if
            there are more than 20.
        kind: "number" or "date" if all values are, such as 2024-05-01; else "text".
        lowest: the lowest number or the first date; empty for texts.
        highest: the highest number or the last date; empty for texts.
    """

    name: str
    values: tuple[tuple[str, int], ...] = ()
    kind: FacetKind = "text"
    lowest: str = ""
    highest: str = ""


class FilterError(InputError):
    """A filter that an index cannot apply, such as one with an unknown attribute."""


def parse_filter(text: str) -> Filter:
    """Parse a filter.

    Examples:
        >>> parse_filter("price < 100 and color = 'red'").names
        ('price', 'color')
    """
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"`where` has {len(text)} characters: {MOST_CHARACTERS} are allowed")
    parser = _Parser(text)
    root = parser.expression()
    parser.end()
    return Filter(text, root, tuple(dict.fromkeys(parser.names)))


def as_filter(where: "str | Filter | None") -> Filter | None:
    """The filter of a `where` argument; None without one."""
    return parse_filter(where) if isinstance(where, str) else where


def number_in(text: str) -> float | None:
    """The number that a text is; None if it is not a finite number."""
    if not _NUMBER.fullmatch(text):
        return None
    number = float(text)
    return number if math.isfinite(number) else None


def unknown_attribute(name: str, known: Iterable[str]) -> FilterError:
    """The error for an attribute that no entry of an index has."""
    names = sorted(known)
    more = ", ..." if len(names) > 20 else ""
    shown = ", ".join(map(quoted_name, names[:20])) or "none"
    return FilterError(
        f"`where`: no entry has the attribute {quoted_name(name)}; known attributes: {shown}{more}"
    )


def quoted_name(name: str) -> str:
    """The name of an attribute as it is written in a filter."""
    if re.fullmatch(r"[^\W\d]\w*", name) and name.lower() not in _WORDS:
        return name
    return '"' + name.replace('"', '""') + '"'


def count_facets(attributes: Iterable[tuple[Mapping[str, str], int]]) -> list[Facet]:
    """The attributes of entries by name; see `Store.attributes`."""
    columns: defaultdict[str, _Column] = defaultdict(_Column)
    for values, times in attributes:
        for name, value in values.items():
            columns[name].count(value, times)
    return [columns[name].facet(name) for name in sorted(columns.keys() - {UPLOADED_AS})]


def _date_in(text: str) -> str | None:
    return text if _DATE.fullmatch(text) else None


_KINDS: dict[FacetKind, Callable[[str], Any]] = {"number": number_in, "date": _date_in}


class _Column:
    """The values of an attribute, which are counted until there are too many."""

    def __init__(self) -> None:
        self.counts: Counter[str] | None = Counter()
        self.kind: FacetKind | None = None  # of the values so far
        self.ends: list[tuple[Any, str]] = []  # the lowest and the highest of them

    def count(self, value: str, times: int) -> None:
        if self.counts is not None:
            self.counts[value] += times
            if len(self.counts) > FACET_VALUES:
                self.counts = None
        if not value or self.kind == "text":
            return
        if self.kind is None:
            kinds = (kind for kind, read in _KINDS.items() if read(value) is not None)
            self.kind = next(kinds, "text")
        found = _KINDS[self.kind](value) if self.kind in _KINDS else None
        if found is None:
            self.kind, self.ends = "text", []
        elif not self.ends:
            self.ends = [(found, value), (found, value)]
        elif found < self.ends[0][0]:
            self.ends[0] = found, value
        elif found > self.ends[1][0]:
            self.ends[1] = found, value

    def facet(self, name: str) -> Facet:
        counts = (self.counts or {}).items()
        values = tuple(sorted(counts, key=lambda pair: (-pair[1], pair[0])))
        if not self.ends:
            return Facet(name, values)
        (_, low), (_, high) = self.ends
        return Facet(name, values, self.kind or "text", low, high)


class _Parser:
    """A parser of filters by recursive descent."""

    def __init__(self, text: str) -> None:
        self.names: list[str] = []
        self._text = text
        self._end = 0  # of the token
        self._depth = 0
        self._contains = 0
        self._value: Value = None  # of the token, if it is a value or a name
        self._next()

    def expression(self) -> Node:
        return self._joined("or", lambda: self._joined("and", self._factor, And), Or)

    def end(self) -> None:
        if self._kind != "end":
            self._fail("the end, `and` or `or`")

    def _joined(self, word: str, part: Callable[[], Node], kind: type[And | Or]) -> Node:
        parts = [part()]
        while self._skipped(word):
            parts.append(part())
        return parts[0] if len(parts) == 1 else kind(tuple(parts))

    def _factor(self) -> Node:
        negated = self._skipped("not")
        if not negated and not self._skipped("("):
            return self._comparison()
        self._depth += 1
        if self._depth > MOST_NESTED:
            raise InputError(f"`where` is nested more than {MOST_NESTED} times")
        found: Node = Not(self._factor()) if negated else self.expression()
        if not negated:
            self._take(")")
        self._depth -= 1
        return found

    def _comparison(self) -> Node:
        if self._kind not in ("word", "quoted"):
            self._fail("the name of an attribute")
        name = str(self._value)
        self._count(name)
        self._next()
        negated = self._skipped("not")
        if self._skipped(CONTAINS):
            if self._kind != "text":
                self._fail("'text' in single quotes")
            self._contains += 1
            if self._contains > MOST_CONTAINS:
                raise InputError(f"`where` has `contains` more than {MOST_CONTAINS} times")
            part = Comparison(name, CONTAINS, str(self._take_value()).casefold())
            return Not(part) if negated else part
        if negated or self._is("in"):
            found = self._listed(name)
            return Not(found) if negated else found
        sign = {"<>": "!=", "==": "="}.get(self._token, self._token)
        if self._kind != "sign" or sign not in (*SIGNS, "!="):
            self._fail("one of = != < <= > >=, `in` or `contains`")
        self._next()
        value = self._take_value()
        if isinstance(value, bool | None) and sign not in ("=", "!="):
            shown = "null" if value is None else str(value).lower()
            raise InputError(f"`where`: {name} can be compared with {shown} by = and != only")
        if sign == "!=":
            return Not(Comparison(name, "=", value))
        return Comparison(name, sign, value)

    def _listed(self, name: str) -> Node:
        self._take("in")
        self._take("(")
        values = [self._take_value()]
        while self._skipped(","):
            values.append(self._take_value())
            self._count(name)
        self._take(")")
        return Or(tuple(Comparison(name, "=", value) for value in values))

    def _count(self, name: str) -> None:
        """Count a comparison of an attribute."""
        self.names.append(name)
        if len(self.names) > MOST_VALUES:
            raise InputError(f"`where` has more than {MOST_VALUES} comparisons")

    def _take_value(self) -> Value:
        if self._kind not in ("text", "number", "literal"):
            self._fail("a value: 'text' in single quotes, a number, true, false or null")
        value = self._value
        self._next()
        return value

    def _take(self, token: str) -> None:
        if not self._skipped(token):
            self._fail(f"`{token}`")

    def _skipped(self, token: str) -> bool:
        """Whether this is the token; the next one is then read."""
        found = self._is(token)
        if found:
            self._next()
        return found

    def _is(self, token: str) -> bool:
        return self._kind in ("sign", "keyword") and self._token == token

    def _next(self) -> None:
        """Read the next token: its kind, its characters, and its value."""
        found = _TOKEN.match(self._text, self._end)
        assert found is not None
        self._kind = str(found.lastgroup)
        self._token = self._value = found[self._kind]
        self._start, self._end = found.span(self._kind)
        word = self._token.lower()
        if self._kind == "other":
            self._fail("a name, a value or a sign")
        elif self._kind in ("text", "quoted"):
            quote = self._token[0]
            self._value = self._token[1:-1].replace(quote * 2, quote)
        elif self._kind == "number":
            self._value = float(self._token)
            if not math.isfinite(self._value):
                raise InputError(f"`where`: the number {self._token[:40]} is too large")
        elif self._kind == "word" and word in ("true", "false", "null"):
            self._kind, self._value = "literal", {"true": True, "false": False}.get(word)
        elif self._kind == "word" and word in _WORDS:
            self._kind, self._token = "keyword", word

    def _fail(self, expected: str) -> NoReturn:
        rest = self._text[self._start : self._start + 20]
        place = f"at {rest!r}" if rest else "at the end"
        raise InputError(f"`where` cannot be read {place}: expected {expected}")
