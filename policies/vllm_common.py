"""Rules that all versions of vLLM share: budgets that it refuses, priorities, the order of the running queue."""

from __future__ import annotations

from typing import Optional

from servesim.core import Queue, Request, View


def requests_in(view: View) -> list[Request]:
    """Return all requests of a server."""
    return [*view.running, *view.swapped, *view.waiting]


def budget_refusals(
    max_num_batched_tokens: int, max_num_seqs: int, whole_prompts: bool, max_model_len: Optional[int]
) -> list[str]:
    """Return what vLLM refuses at its start (SchedulerConfig, the same rules in v0 and V1)."""
    refusals = []
    if max_num_batched_tokens < max_num_seqs:
        refusals.append(f"max_num_batched_tokens ({max_num_batched_tokens}) is below max_num_seqs ({max_num_seqs})")
    if whole_prompts and max_model_len is not None and max_num_batched_tokens < max_model_len:
        refusals.append(
            f"max_num_batched_tokens ({max_num_batched_tokens}) is below max_model_len ({max_model_len}), "
            "which needs chunked prefill"
        )
    return refusals


def priority_key(request: Request) -> tuple[int, float]:
    """Return the sort key of `policy: priority`: lower priority number first, then the older request."""
    return (request.priority, request.arrival)


def prefilling_is_last(running: Queue, prefilling: Queue) -> bool:
    """Return whether the partly computed prompts are at the end of the running queue."""
    if not len(prefilling):
        return True
    first = len(running) - len(prefilling)
    return all(running[first + index] is request for index, request in enumerate(prefilling))
