"""What a prompt says, as pieces of named texts: two prompts are equal as far as their pieces are equal.

A simulation does not know the words of a prompt. It knows which parts two prompts share: a system prompt, the earlier
turns of a conversation, the blocks with equal hash ids in a trace. A piece is the first tokens of a named text. So a
token is (name, position in the text), and texts with different names have no token in common.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Optional


class Content:
    """The pieces of a prompt in order, and the name of its answer."""

    __slots__ = ("answer", "ends", "names")

    def __init__(self, names: Sequence[Hashable], ends: Sequence[int], answer: Optional[Hashable] = None) -> None:
        self.names = names
        self.ends = ends  # prompt tokens up to the end of each piece; the last one is the length of the prompt
        self.answer = answer  # None: a text of its own

    @property
    def pieces(self) -> list[tuple[Hashable, int]]:
        """Name and number of tokens of each piece."""
        return [(name, end - start) for name, start, end in zip(self.names, (0, *self.ends), self.ends)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Content) and (
            (list(self.names), list(self.ends), self.answer) == (list(other.names), list(other.ends), other.answer)
        )

    __hash__ = None  # type: ignore[assignment]  # it holds lists

    def __reduce__(self) -> tuple[Any, ...]:
        return Content, (self.names, self.ends, self.answer)

    def __repr__(self) -> str:
        return f"Content({self.pieces!r}{'' if self.answer is None else f', answer={self.answer!r}'})"


def content_of_pieces(pieces: Iterable[Sequence[Any]], answer: Optional[Hashable] = None) -> Content:
    """Return the content with these pieces: pairs of a name and its tokens. Pairs that come from JSON are lists."""
    names: list[Hashable] = []
    ends: list[int] = []
    end = 0
    for name, tokens in pieces:
        if tokens > 0:
            end += tokens
            names.append(name)
            ends.append(end)
    return Content(names, ends, answer)


def content_of_ids(ids: Sequence[int], tokens_per_id: int, prompt: int) -> Content:
    """Return the content of a prompt from the hash ids of its blocks. The last id stands for the rest of the prompt."""
    ends = list(range(tokens_per_id, tokens_per_id * len(ids), tokens_per_id))
    return Content(ids, [*ends, prompt])
