"""What several policies share: plans that never change, and the admission of requests with reserved memory."""

from __future__ import annotations

from typing import Callable

from servesim.core import FOREVER, Chunk, Plan, Rejection, Request, View

REST = Plan()
HOLD = Plan(decode=True, hold=FOREVER)  # decode until something happens
DECODE = HOLD._replace(lasts=True)  # the same, and the end of a request changes nothing


def too_long(request: Request, view: View) -> bool:
    """Say whether a request is longer than the model takes; servers that look at arrivals have refused it by then."""
    return view.max_model_len is not None and request.length > view.max_model_len


def refusal(request: Request, view: View) -> Rejection:
    return Rejection(request, f"longer than max_model_len {view.max_model_len}")


def admit_reserved(
    view: View, free: int, places: int, reserved: Callable[[Request, View], int]
) -> tuple[list[Chunk], list[Rejection]]:
    """Admit whole prompts from the head of waiting, each with all the blocks it will ever hold."""
    chunks: list[Chunk] = []
    reject: list[Rejection] = []
    for request in view.waiting:
        if too_long(request, view):
            reject.append(refusal(request, view))
            continue
        blocks = reserved(request, view)
        if blocks > free or len(chunks) == places:
            break
        free -= blocks
        chunks.append(Chunk(request, request.pending, blocks))
    return chunks, reject
