"""Rows of a trace read one by one, for formats whose requests are nested or hold text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Optional

from servesim.core import BadInput
from servesim.core.content import Content
from servesim.files.checked import Missing
from servesim.files.read import quote
from servesim.traces.contents import ID_SIZES, Name, Pieces
from servesim.traces.trace import Columns

from .source import Source, Table
from .tokens import ESTIMATE_NOTE, estimate

NO_LENGTH = "no output length"


class Row:
    """One JSON object, its row number, and checked access to its values."""

    def __init__(self, source: Source, number: int, values: Any, where: str = "") -> None:
        if type(values) is not dict:
            raise BadInput(f"{source.name}: row {number}: {where or 'row'}: expected an object, got {quote(values)}")
        self.source = source
        self.number = number
        self.values: Mapping[str, Any] = values
        self.where = where

    def error(self, key: str, expected: str) -> BadInput:
        """Return the error for one value."""
        return self._cell(key).error(0, self._path(key), expected)

    def _path(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def _cell(self, key: str) -> Table:
        """Return one value as a table of one row, which checks it."""
        value = self.values.get(key, Missing())
        return Table(self.source.name, {self._path(key): [value]}, [self.number], typed=True)

    def has(self, key: str) -> bool:
        """Return whether the key has a value other than null."""
        return self.values.get(key) is not None

    def row(self, key: str) -> Row:
        """Return an object inside this one."""
        return Row(self.source, self.number, self.values.get(key), self._path(key))

    def rows(self, key: str) -> list[Row]:
        """Return the objects of a list inside this one."""
        values = self.values.get(key)
        if type(values) is not list or not values:
            raise self.error(key, "a list of objects")
        return [Row(self.source, self.number, value, f"{key}[{i}]") for i, value in enumerate(values)]

    def tokens(self, key: str, minimum: int = 0) -> int:
        """Return a length in tokens."""
        return self._cell(key).tokens(self._path(key), minimum)[0]

    def seconds(self, key: str, unit: float) -> float:
        """Return a time in seconds; the file counts in units of `unit` seconds."""
        return self._cell(key).seconds(self._path(key), unit)[0]

    def name(self, key: str) -> Optional[str]:
        """Return a name or a whole number as text, or None if there is none."""
        return self._cell(key).text(self._path(key))[0] if self.has(key) else None

    def ids(self, key: str) -> Sequence[int]:
        """Return hash ids, or () if there are none."""
        return self._cell(key).id_lists(self._path(key))[0] if self.has(key) else ()

    def text_piece(self, key: str) -> tuple[Name, int]:
        """Return a text, or all texts in a list, as a piece of a prompt: equal texts have equal names."""
        value = self.values.get(key)
        if type(value) is list:
            value = "\n".join(_text(part) for part in value)
        if type(value) is not str:
            raise self.error(key, "a text or a list of them")
        return f"text:{blake2b(value.encode(errors='surrogatepass'), digest_size=8).hexdigest()}", self.source.count(
            value
        )

    def message_pieces(self) -> Pieces:
        """Return chat messages as pieces of a prompt, without the chat template."""
        return [message.text_piece("content") for message in self.rows("messages") if message.has("content")]

    def body(self) -> tuple[Pieces, Optional[int]]:
        """Return prompt and output limit of an OpenAI-style request body."""
        prompt = self.message_pieces() if self.has("messages") else [self.text_piece("prompt")]
        for key in ("max_completion_tokens", "max_tokens"):
            if self.has(key):
                return prompt, self.tokens(key)
        return prompt, None


def _text(part: Any) -> str:
    """Return the text of one part of a message; images have none."""
    if type(part) is dict:
        part = part.get("text", "")
    return part if type(part) is str else ""


def total_tokens(pieces: Pieces) -> int:
    """Return the length of a prompt."""
    return sum(tokens for _, tokens in pieces)


class ParsedRequest(NamedTuple):
    """One request of a file; its index in the list is its id."""

    row: Row
    prompt: int
    output: Optional[int]
    arrival: Optional[float] = None
    limit: Optional[int] = None
    priority: int = 0
    session: Optional[str] = None
    hash_ids: Sequence[int] = ()
    follows: Optional[int] = None
    think_time: float = 0.0
    content: Optional[Content] = None
    unusable: Optional[str] = None


def to_columns(
    source: Source,
    requests: list[ParsedRequest],
    id_sizes: Sequence[int] = ID_SIZES,
    notes: Sequence[str] = (),
    text: bool = False,
) -> Columns:
    """Return the requests as columns; `text`: lengths were counted from text."""
    estimated = [ESTIMATE_NOTE] if text and source.count is estimate else []
    columns = Columns(
        [request.prompt for request in requests],
        [request.output or 0 for request in requests],
        think_time=[request.think_time for request in requests],
        numbers=[request.row.number for request in requests],
        id_sizes=id_sizes,
        notes=[*notes, *estimated],
    )
    columns.content = shared_contents([request.content for request in requests])
    for name in ("arrival", "limit", "priority", "session", "hash_ids", "follows"):
        values = [getattr(request, name) for request in requests]
        zero_counts = name in ("arrival", "follows")
        if any(value is not None if zero_counts else value for value in values):
            setattr(columns, name, values)
    for i, request in enumerate(requests):
        if request.unusable is not None or request.output is None:
            columns.unusable[i] = request.unusable or NO_LENGTH
    return columns


def shared_contents(contents: Sequence[Optional[Content]]) -> list[Optional[Content]]:
    """Return the contents whose first text is that of another prompt too. The others share nothing."""
    uses = Counter(content.names[0] for content in contents if content is not None and content.names)
    return [
        content if content is not None and content.names and uses[content.names[0]] > 1 else None
        for content in contents
    ]


def read_rows(source: Source) -> list[Row]:
    """Return every object of a JSON file."""
    source.reject_columns()
    return [Row(source, number, record) for number, record in zip(source.numbers, source.records)]
