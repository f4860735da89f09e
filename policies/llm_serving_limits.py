"""llm-serving's answer to requests that are out of range: seen when they get a place, told before anything runs."""

from __future__ import annotations

from typing import Optional

from servesim.core import Queue, Rejection, Request


def is_out_of_range(request: Request, longest: Optional[int]) -> bool:
    """Whether a prompt and all it may write do not stay below the longest sequence."""
    return longest is not None and request.prompt + request.limit >= longest


def refused(prompts: Queue, longest: Optional[int]) -> list[Rejection]:
    """Return the prompts too long for the engine: all of them leave, only the first is answered."""
    strangers = [request for request in prompts if is_out_of_range(request, longest)]
    reason = f"prompt + limit >= seq_length {longest}"
    return [Rejection(r, reason, "unanswered" if i else "refused") for i, r in enumerate(strangers)]
