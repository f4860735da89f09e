"""KV cache groups of vLLM V1: which blocks a window needs, which of them get names, and which a lookup can use.

Layers with the same window are of one kind and have one or more groups. Numbers are blocks, unless they are tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Final, NamedTuple, Optional

from servesim.core import FOREVER
from servesim.engine.texts import Text

from .drafting import Drafting

MOST_BLOCKS: Final = 1 << 32  # of a text


class Kind:
    """The groups with the same window."""

    __slots__ = ("groups", "in_row", "most", "reach", "window")

    def __init__(self, window: Optional[int], size: int, drafting: Drafting, in_flight: int, longest: int) -> None:
        self.window = window  # tokens; None: full attention
        self.groups: list[int] = []
        # tokens before the next one that stay; the drafters of several modules compute some of them again
        self.reach = 0 if window is None else window - 1 + max(0, drafting.prefill_lookahead - 1)
        self.in_row = 0 if window is None else -(-(window - 1) // size)  # that a hit needs, one after another
        # that a request holds in a group, with this number of tokens in flight
        self.most = FOREVER if window is None else -(-min(self.reach + in_flight, longest) // size) + 1


class Hit(NamedTuple):
    """What the cache has of a request."""

    blocks: int
    gone: tuple[int, ...]  # by group: blocks at the beginning that a window does not need
    junction: int  # the longer beginning that full attention has; 0: none


class WindowRules:
    """The groups of one server."""

    def __init__(
        self, windows: Sequence[Optional[int]], block_size: int, interval: Optional[int], drafting: Drafting,
        in_flight: int, longest: int,
    ) -> None:  # fmt: skip
        self.windows, self.block_size = windows, block_size
        self.drops = drafting.drops_last_hit
        self.unnamed = max(0, drafting.prefill_lookahead - 1)  # tokens at the end whose block gets no name
        self.kinds: list[Kind] = []  # in the order of lookups: full attention first
        for group, window in enumerate(windows):
            kind = next((kind for kind in self.kinds if kind.window == window), None)
            if kind is None:
                kind = Kind(window, block_size, drafting, in_flight, longest)
                self.kinds.insert(0 if window is None else len(self.kinds), kind)
            kind.groups.append(group)
        self.sliding = [kind for kind in self.kinds if kind.window is not None]
        self.segment = None if interval is None else interval // block_size  # 0: only the ends of prompts

    def out(self, kind: Kind, tokens: int) -> int:
        """Return how many blocks are out of the window of the token after these."""
        return 0 if kind.window is None else max(0, (tokens - kind.reach) // self.block_size)

    def ends(self, prompt: int, junction: int) -> list[int]:
        """Return the blocks before which a window keeps names: where a later request can go on."""
        size = self.block_size
        if not self.drops:
            ends = [(prompt - 1) // size]
        else:
            ends = [max((prompt - 1) // size - 1, 0) + 1, max(prompt // size - 1, 0) + 1]
        return [*ends, junction + self.drops] if junction else ends

    def names(self, kind: Kind, block: int, ends: Sequence[int]) -> bool:
        """Whether a full block of a window gets a name."""
        need, segment = kind.in_row + self.drops, 1 if self.segment is None else self.segment
        if segment and (need >= segment or (block >= self.drops and (block - self.drops) % segment >= segment - need)):
            return True
        return self.segment is not None and any(end - need <= block < end for end in ends)


Names = Sequence[Mapping[int, object]]  # by group: the keys of the blocks that have a name


def find_hit(rules: WindowRules, names: Names, keys: Sequence[int], length: int) -> Hit:
    """Return what the cache has of a request with this number of known tokens. Its last token is always computed."""
    size = rules.block_size
    hit, full, longest = (length - 1) // size, length // size, 0
    starts: dict[int, int] = {}  # by kind
    found: dict[int, int] = {}
    dropped: set[int] = set()
    alone = len(rules.windows) == 1
    while True:
        current = hit
        for number, kind in enumerate(rules.kinds):
            if kind.window is None and number in found:
                current = min(current, found[number])
                continue
            drop = rules.drops and number not in dropped  # a kind looks one block further, and drops it
            limit = min(current + 1, full) if drop and not alone else current
            starts[number], length = longest_run(kind, names, keys, limit, drop)
            if drop:
                dropped.add(number)
            elif length < current:
                dropped.clear()
            current = found[number] = length
            longest = max(longest, current)
        if current >= hit:
            break
        hit = current
        if len(rules.kinds) < 2 or (len(rules.kinds) == 2 and rules.kinds[0].window is None):
            break
    gone = [0] * len(rules.windows)
    for number, kind in enumerate(rules.kinds):
        for group in kind.groups:
            gone[group] = max(starts[number], rules.out(kind, hit * size))
    return Hit(hit, tuple(gone), longest if longest > hit and not alone else 0)


def longest_run(kind: Kind, names: Names, keys: Sequence[int], limit: int, drop: bool) -> tuple[int, int]:
    """Return the first block and the end of what the groups of a kind have of the first blocks of a text."""
    first, others = names[kind.groups[0]], [names[group] for group in kind.groups[1:]]
    if kind.window is None:
        end = 0
        while end < limit and keys[end] in first and (not others or all(keys[end] in group for group in others)):
            end += 1
        return 0, end - 1 if drop and end else end
    need, row = max(1, kind.in_row + drop), 0
    for block in range(limit - 1, -1, -1):
        key = keys[block]
        row = row + 1 if key in first and all(key in group for group in others) else 0
        if row >= need:
            return block, block + row - drop
    return 0, row - 1 if drop and row else row


class Keys:
    """What the blocks of a text say up to their end, as numbers: equal for two texts as far as their pieces are."""

    __slots__ = ("_before", "_number", "_piece", "_text", "keys")

    def __init__(self, text: Text) -> None:
        self._text = text
        self._piece = self._before = 0  # the piece of the next block, and the number of those before it
        self._number = 0  # of this piece after those; 0: it has none yet
        self.keys: list[int] = []

    def extend(self, blocks: int, size: int, known: dict[Hashable, int]) -> list[int]:
        """Return the keys of at least these blocks. `known`: the numbers of all pieces after those before them."""
        names, ends, keys = self._text.names, self._text.ends, self.keys
        while len(keys) < blocks:
            end = (len(keys) + 1) * size
            while ends[self._piece] < end:
                piece = (self._before, names[self._piece], ends[self._piece])
                self._before = known.setdefault(piece, len(known) + 1)
                self._piece += 1
                self._number = 0
            if not self._number:
                self._number = known.setdefault((self._before, names[self._piece]), len(known) + 1)
            keys.append(self._number * MOST_BLOCKS + len(keys))
        return keys
