"""The text of a request as the prefix cache compares it: pieces of named texts, cut into blocks.

Two texts are equal as far as the names and the lengths of their pieces are. So texts are compared piece by piece, not
token by token: a piece starts at the beginning of its named text, so two texts that continue after pieces of different
lengths are different there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable
from typing import Any

from servesim.core import FOREVER, ClientRequest


class Text:
    """The text of a request: the pieces of its prompt, then its answer. A piece is a name and its end, in tokens."""

    __slots__ = ("ends", "names")

    def __init__(self, request: ClientRequest) -> None:
        content = request.content
        if content is None:
            self.names: list[Hashable] = [object(), object()]  # texts of its own
            self.ends: list[int] = [request.prompt, FOREVER]
        else:
            self.names = [*content.names, object() if content.answer is None else content.answer]
            self.ends = [*content.ends, FOREVER]
            assert len(self.ends) == 1 or self.ends[-2] == request.prompt, f"{request}: content of another length"


def block_key(text: Text, start: int, size: int) -> Hashable:
    """Return what the block at token `start` says. Two blocks are equal if their keys are."""
    names, ends = text.names, text.ends
    piece = bisect_right(ends, start)  # it has this token
    offset = start - ends[piece - 1] if piece else start
    if ends[piece] >= start + size:
        return names[piece], offset
    key: list[Any] = [names[piece], offset]
    while ends[piece] < start + size:
        key.append(ends[piece] - start)
        piece += 1
        key.append(names[piece])
    return tuple(key)


def equal_tokens(text: Text, other: Text, start: int, limit: int) -> int:
    """Return how many tokens two texts share, counted up to the piece that has token `limit`.

    They are known to share those before `start`.
    """
    names, ends, other_names, other_ends = text.names, text.ends, other.names, other.ends
    piece = bisect_right(ends, start) if start else 0
    if piece and ends[piece - 1] != other_ends[piece - 1]:
        return ends[piece - 1]
    while True:
        if names[piece] != other_names[piece]:
            return ends[piece - 1] if piece else 0
        end, other_end = ends[piece], other_ends[piece]
        if end != other_end or end >= limit:
            return end if end < other_end else other_end
        piece += 1
