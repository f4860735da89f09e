"""Code that several policies share: constant plans, and admission with reserved blocks."""

from __future__ import annotations

from typing import Callable

from servesim.core import FOREVER, Chunk, Plan, Rejection, Request, View

IDLE_PLAN = Plan()
# The first is held until a request arrives or finishes, or blocks are missing; the second also while requests finish.
DECODE_UNTIL_FINISH = Plan(decode=True, hold=FOREVER)
DECODE_PAST_FINISH = DECODE_UNTIL_FINISH._replace(hold_past_finish=True)


def too_long(request: Request, view: View) -> bool:
    """Return whether a request is longer than max_model_len.

    With `rejects_oversized`, the server has already rejected it on arrival.
    """
    return view.max_model_len is not None and request.length > view.max_model_len


def reject_too_long(request: Request, view: View) -> Rejection:
    """Return the rejection of a request that is longer than max_model_len."""
    return Rejection(request, f"longer than max_model_len {view.max_model_len}")


def admit_reserved(
    view: View, free: int, max_admitted: int, blocks_to_reserve: Callable[[Request, View], int]
) -> tuple[list[Chunk], list[Rejection]]:
    """Admit whole prompts from the head of waiting. Each request gets all blocks that it can ever need."""
    chunks: list[Chunk] = []
    reject: list[Rejection] = []
    for request in view.waiting:
        if too_long(request, view):
            reject.append(reject_too_long(request, view))
            continue
        blocks = blocks_to_reserve(request, view)
        if blocks > free or len(chunks) == max_admitted:
            break
        free -= blocks
        chunks.append(Chunk(request, request.pending, blocks))
    return chunks, reject
