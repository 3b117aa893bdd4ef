"""The generations of an index in Milvus: a collection each, and the record in a property."""

import secrets
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from listwise.errors import InputError
from listwise.search.generations import GenerationRecord, Generations, IndexUpgradedError
from listwise.search.milvus.connection import Connection, Place, parse_place
from listwise.search.milvus.rows import FIELDS, fields
from listwise.search.milvus.store import HEADER, MilvusStore
from listwise.search.milvus.tuning import EXACT, SEARCH, MilvusState
from listwise.search.store import IndexHeader

_RECORD = "listwise.generations"  # property of the collection of generation 0
_OWNER = "listwise.generation_of"  # property of the collection of another generation
_PAUSE = 60.0  # seconds after which a pause is one of a killed process
_POLL = 0.1  # seconds between two looks at the record during a pause


class MilvusGenerations(Generations):
    """The generations of an index in Milvus, for the store of one of them.

    Attributes:
        base: the connection to the collection of generation 0, which has the record.
    """

    def __init__(self, place: Place, number: int, aside: bool = False) -> None:
        self.uri, self.number, self.aside = place.shown, number, aside
        self.base = Connection(place)
        self._pause = ""  # the mark of this process in the record

    @staticmethod
    def exists(place: str) -> bool:
        """Whether an index exists; an unfinished one does not count."""
        where = parse_place(place)
        if where.file is not None and not where.file.is_dir():
            return False
        with closing(Connection(where)) as connection:
            return HEADER in connection.properties()

    @staticmethod
    def open_index(place: str) -> MilvusStore:
        """Open the current generation of an index that exists."""
        with closing(MilvusGenerations(parse_place(place), 0)) as generations:
            return generations.open(generations.record().current)

    @staticmethod
    def create_index(place: str, header: IndexHeader) -> MilvusStore:
        """Create an empty index; it replaces an unfinished one."""
        with closing(MilvusGenerations(parse_place(place), 0)) as generations:
            return generations.create(0, header, aside=False)

    def record(self) -> GenerationRecord:
        """Read which generations the index has now."""
        found = self.base.properties().get(_RECORD)
        return GenerationRecord() if found is None else GenerationRecord.model_validate_json(found)

    def save_record(self, record: GenerationRecord) -> None:
        """Replace the record in one step."""
        self.base.set_properties({_RECORD: record.model_dump_json()})

    def open(self, number: int, *, aside: bool = False) -> MilvusStore:
        """Open another generation of the index."""
        generations = MilvusGenerations(self.base.place, number, aside)
        try:
            return MilvusStore(generations)
        except BaseException:
            generations.close()
            raise

    def create(self, number: int, header: IndexHeader, *, aside: bool = True) -> MilvusStore:
        """Create an empty generation and open it; it replaces an unfinished one."""
        connection = self.base.generation(number)
        if not number or connection.properties().get(_OWNER) != self.base.collection:
            _make_place(connection)
            connection.create(fields(header.dim))
            connection.load("descriptor", EXACT.type, EXACT.build)
            owner = {_OWNER: self.base.collection} if number else {}
            # Written last: a collection without a header is not an index.
            state = MilvusState().model_dump_json()
            connection.set_properties({HEADER: header.model_dump_json(), SEARCH: state, **owner})
        return self.open(number, aside=aside)

    def drop_unused(self) -> None:
        """Delete the data of the generations that the record does not name."""
        base, numbers = self.base, self.record().numbers
        kept = {base.generation(number).collection for number in numbers}
        for name in base.call("list_collections"):
            if name not in kept and name.startswith(f"{base.collection}_generation_"):
                other = base.beside(name.removeprefix(base.collection))
                if other.properties().get(_OWNER) == base.collection:
                    other.call("drop_collection")
        if 0 not in numbers:
            # The collection itself stays, because it has the record.
            base.call("load_collection", timeout=None)
            base.call("delete", filter="key >= 0", timeout=None)
            base.call("release_collection")

    @contextmanager
    def upgrading(self) -> Iterator[None]:
        """Do not lock: processes on several machines have no lock in common."""
        self.check_current()
        yield

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Hold back changes of the entries by all processes, for the moment of a switch.

        A process looks at the record before and after each of its changes. If it finds a pause, it
        waits for the end; if it then finds another generation, it repeats the change there.
        """
        record = self._current_record()
        self._pause = secrets.token_hex(8)
        self.save_record(record.model_copy(update={"paused": self._pause}))
        try:
            yield
        finally:
            now = self.record()
            if now.paused == self._pause:
                self.save_record(now.model_copy(update={"paused": ""}))

    def switch(self, to: int) -> None:
        """Make another generation the current one, in one step; call it within `pausing`."""
        record = self.record()
        if record.paused != self._pause:
            raise InputError(
                f"{self.uri} answers too slowly: another process ended the pause of its changes; "
                "run the command again"
            )
        self.save_record(record.switched(to))

    @contextmanager
    def changing(self) -> Iterator[GenerationRecord | None]:
        """Make a change that no switch to another generation can miss."""
        if self.aside:
            yield None
            return
        yield self._running_record()
        self._running_record()

    def _running_record(self) -> GenerationRecord:
        """The record, after the end of a pause; `IndexUpgradedError` for another generation."""
        started = time.monotonic()
        while True:
            record = self._current_record()
            if not record.paused:
                return record
            if time.monotonic() > started + _PAUSE:
                self.save_record(record.model_copy(update={"paused": ""}))
            time.sleep(_POLL)

    def _current_record(self) -> GenerationRecord:
        """The record; `IndexUpgradedError` if another generation is the current one."""
        record = self.record()
        if record.current != self.number:
            raise IndexUpgradedError(self.uri)
        return record

    def close(self) -> None:
        """Close the connection; milvus-lite releases its file."""
        self.base.close()


def _make_place(connection: Connection) -> None:
    """Drop the collection of an unfinished index."""
    if not connection.call("has_collection"):
        return
    found = connection.call("describe_collection")
    if HEADER in (found.get("properties") or {}):
        raise InputError(f"an index at {connection.place.shown} exists already")
    if {field["name"] for field in found["fields"]} != FIELDS:
        raise InputError(
            f"{connection.place.shown} is a collection of another program: give another name"
        )
    connection.call("drop_collection")
