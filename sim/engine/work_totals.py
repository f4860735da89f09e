"""What the model calls of a run computed: sums per kind of step, from which FLOPs and bytes follow.

All counters are whole numbers, so the sums are exact. The cohort counts the decodes of all steps, and
`mixed` has those of steps that also run prompts; the difference is the decode steps. So a decode step, by far the most
frequent one, costs two additions. Standard library only, Python 3.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .cohort import Cohort

COUNTERS = (
    "steps", "prompts", "prompt_tokens", "prompt_pairs", "prompt_cached", "decode_rows", "decode_pairs",
    "draft_tokens", "draft_pairs",
)  # fmt: skip


class KindTotals:
    """Sums over the steps of one kind."""

    __slots__ = (
        "decode_pairs", "decode_rows", "draft_pairs", "draft_tokens", "prompt_cached", "prompt_pairs", "prompt_tokens",
        "prompts", "seconds", "steps",
    )  # fmt: skip

    def __init__(self) -> None:
        self.steps = 0  # model calls
        self.seconds = 0.0
        self.prompts = 0  # chunks of prompts
        self.prompt_tokens = 0
        self.prompt_pairs = 0  # pairs of a token and a token that it attends to, itself included
        self.prompt_cached = 0  # tokens cached before the chunks
        self.decode_rows = 0
        self.decode_pairs = 0
        self.draft_tokens = 0  # that decoding rows verify beside their own token
        self.draft_pairs = 0

    def add_prompt(self, tokens: int, cached: int) -> None:
        """Count a chunk of a prompt, after which this number of tokens is cached."""
        self.prompts += 1
        self.prompt_tokens += tokens
        self.prompt_pairs += tokens * cached - tokens * (tokens - 1) // 2
        self.prompt_cached += cached - tokens

    def add_decode(self, drafts: int, cached: int) -> None:
        """Count a decoding row with drafts, after which this number of tokens is cached."""
        self.decode_rows += 1
        self.decode_pairs += cached - drafts
        self.draft_tokens += drafts
        self.draft_pairs += drafts * cached - drafts * (drafts - 1) // 2

    def add(self, other: KindTotals) -> None:
        """Add the sums of another server."""
        for name in (*COUNTERS, "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def tokens(self) -> int:
        """Tokens that were computed, without padding."""
        return self.prompt_tokens + self.decode_rows + self.draft_tokens

    @property
    def rows(self) -> int:
        """Rows: each computes the logits of its last token, and of its drafts."""
        return self.prompts + self.decode_rows + self.draft_tokens

    @property
    def pairs(self) -> int:
        """Pairs of a token and a token that it attends to."""
        return self.prompt_pairs + self.decode_pairs + self.draft_pairs

    @property
    def cached(self) -> int:
        """Tokens in the KV cache that the rows read, each once for all its drafts."""
        return self.prompt_cached + self.decode_pairs - self.decode_rows


NO_WORK: Final = KindTotals()  # never changed


class WorkTotals:
    """The sums of a run. Steps that only copy blocks are not counted."""

    __slots__ = ("cohort", "mixed", "prefill")

    def __init__(self, cohort: Cohort) -> None:
        self.cohort = cohort
        self.prefill = KindTotals()
        self.mixed = KindTotals()

    def start_prompts(self, decode_rows: int, decode_pairs: int) -> KindTotals:
        """Count a step with prompts, and its decoding rows. Return the sums of its kind."""
        totals = self.prefill
        if decode_rows:
            totals = self.mixed
            totals.decode_rows += decode_rows
            totals.decode_pairs += decode_pairs
        totals.steps += 1
        return totals

    def by_kind(self) -> dict[str, KindTotals]:
        """Return the sums by kind of step, in a fixed order."""
        cohort, mixed, decode = self.cohort, self.mixed, KindTotals()
        decode.steps = cohort.steps + cohort.steps_run - mixed.steps
        decode.seconds = max(0.0, cohort.busy - mixed.seconds)
        decode.decode_rows = cohort.rows_run - mixed.decode_rows
        decode.decode_pairs = cohort.pairs_run - mixed.decode_pairs
        decode.draft_tokens = cohort.drafts_run - mixed.draft_tokens
        decode.draft_pairs = cohort.draft_pairs_run - mixed.draft_pairs
        return {"prefill": self.prefill, "decode": decode, "mixed": mixed}


def work_to_json(work: Mapping[str, KindTotals]) -> dict[str, dict[str, Any]]:
    """Return the sums by kind as JSON."""
    return {kind: {name: getattr(sums, name) for name in (*COUNTERS, "seconds")} for kind, sums in work.items()}


def work_from_json(data: Mapping[str, Mapping[str, Any]]) -> dict[str, KindTotals]:
    """Return the sums by kind of a run in another process."""
    work = {}
    for kind, counters in data.items():
        work[kind] = sums = KindTotals()
        for name, value in counters.items():
            setattr(sums, name, value)
    return work
