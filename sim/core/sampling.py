"""Several answers to one request: parallel sampling and beam search, and their sequences in a server.

`n` answers are wanted, `best_of` sequences are sampled. In beam search `best_of` is the beam width. All live sequences
of a request have the same length: they start with the first token and get one token per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Optional

MAX_SEQUENCES: Final = 1024  # per request


class Sampling:
    """How many sequences a client asks for, and what is known of them."""

    __slots__ = ("beam_search", "best_of", "n", "outputs", "parents")

    def __init__(
        self,
        n: int = 1,
        best_of: Optional[int] = None,
        beam_search: bool = False,
        outputs: Sequence[int] = (),
        parents: Optional[Sequence[Sequence[int]]] = None,
    ) -> None:
        self.n = n  # answers that the client gets; the best ones
        self.best_of = n if best_of is None else best_of  # sequences
        if self.best_of < 2:
            raise ValueError(f"best_of: expected at least 2, got {self.best_of}; a request with one answer has None")
        self.beam_search = beam_search
        self.outputs = outputs  # tokens of each sequence; empty: all generate the tokens of the request
        # Beam search, after each token: for every beam that goes on, the position of its parent in the live beams.
        # None: drawn at random.
        self.parents = parents

    @property
    def values(self) -> tuple[Any, ...]:
        """The arguments of the constructor."""
        return self.n, self.best_of, self.beam_search, self.outputs, self.parents

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sampling) and self.values == other.values

    __hash__ = None  # type: ignore[assignment]  # it holds lists

    def __reduce__(self) -> tuple[Any, ...]:
        return Sampling, self.values

    def __repr__(self) -> str:
        return f"Sampling(n={self.n}, best_of={self.best_of}, beam_search={self.beam_search})"


class SequenceGroup(Sampling):
    """The sequences of one request in a server, as policies see them. The engine has the rest in `Group`."""

    __slots__ = ("blocks", "first_ended", "generated", "members", "sequences")

    def __init__(self, sampling: Sampling) -> None:
        super().__init__(sampling.n, sampling.best_of, sampling.beam_search, sampling.outputs, sampling.parents)
        self.sequences = 1  # live ones; before its first token a request has one
        self.members = 1  # sequences so far, with those that ended (not counted in beam search)
        self.first_ended = False  # whether the first sequence has ended
        self.blocks = 0  # different blocks of the live sequences, on the device or on the host
        self.generated = 0  # tokens of all sequences

    def __reduce__(self) -> tuple[Any, ...]:
        return restored_group, (self.values, self.generated)  # a copy of a request is not in a server

    @property
    def seats(self) -> int:
        """The sequences that count for max_num_seqs: all, before the first token and in beam search."""
        raise NotImplementedError

    def freed_blocks(self) -> int:
        """Return the blocks that become free if the request is preempted: all, except those that the engine loses."""
        raise NotImplementedError

    def new_blocks(self, length: int) -> int:
        """Return the blocks that the next token of all live sequences takes, copies of shared blocks included."""
        raise NotImplementedError


def restored_group(values: tuple[Any, ...], generated: int) -> SequenceGroup:
    """Return the group of a copied request."""
    group = SequenceGroup(Sampling(*values))
    group.generated = generated
    return group
