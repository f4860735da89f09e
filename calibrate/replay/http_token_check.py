"""The token check over HTTP: send requests of a run again, one at a time, and compare the answers.

A server generates greedily (temperature 0). Token ids are compared if the server sends them, else the texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional, Union

from servesim.calibrate.client.load_generator import LoadGenerator, SentRequest, send
from servesim.calibrate.client.protocols import Api
from servesim.core import BadInput, Request
from servesim.runs.simulate import copy_requests

from .token_check import CheckedAnswer, Difference, TokenCheck

Answer = Union[list[int], str]  # token ids or text

REPEATED_REQUESTS = 4  # sent twice before the run, to see whether the server repeats its answers
REPEATED_TOKENS = 8  # of each
SHOWN_CHARACTERS = 20  # of a text at its first difference


def one_after_another(requests: Sequence[Request], max_tokens: Optional[int] = None) -> list[Request]:
    """Return copies in a chain: each is sent when the answer to the one before is complete."""
    copies = copy_requests(requests)
    before = None
    for request in copies:
        request.arrival = request.sent = request.think_time = 0.0
        request.follows, before = before, request.id
        if max_tokens is not None:
            request.limit = min(max_tokens, request.limit)
    return copies


def check_repeatable(url: str, api: Api, requests: Sequence[Request], timeout: float) -> None:
    """Raise BadInput if the server answers the same request in two ways, without any load.

    A near tie can change one answer, so more than half must differ.
    """
    pairs = []
    for _ in range(2):
        chain = one_after_another(requests[:REPEATED_REQUESTS], REPEATED_TOKENS)
        pairs.append([answer_of(sent, api) for sent in send(url, api, chain, timeout, None, chain).sent_requests])
    both = [(first, second) for first, second in zip(*pairs) if first is not None and second is not None]
    different = sum(first != second for first, second in both)
    if different * 2 > len(both):
        raise BadInput(
            f"--check-tokens: expected a server that repeats its answers at temperature 0, but {url} answered "
            f"{different} of {len(both)} requests in two ways, each sent alone"
        )


def check_over_http(
    url: str,
    api: Api,
    load: LoadGenerator,
    sample: Sequence[Request],
    timeout: float,
    progress: Callable[[Mapping[str, Any]], None] = lambda state: None,
) -> TokenCheck:
    """Send the sample again, one request at a time, and compare the answers with those of the run."""
    in_run = {sent.request: sent for sent in load.sent_requests}
    chain = one_after_another(sample)
    report = {"to_check": len(sample)}
    again = send(
        url, api, chain, timeout, lambda state: progress({**report, "t": state["t"], "checked": state["done"]}), chain
    )
    answers, failed, unit = [], Counter[str](), "token"
    for request, sent in zip(sample, again.sent_requests):
        live, alone = answer_of(in_run[request], api), answer_of(sent, api)
        if live is None or alone is None:
            failed["without a complete answer " + ("in the run" if live is None else "alone")] += 1
            continue
        if isinstance(live, str) or isinstance(alone, str):
            unit = "character"
        difference = first_difference(live, alone)
        number = int(difference is not None)
        answers.append(
            CheckedAnswer(request.id, request.prompt, sent.written, (), number, number, difference, difference)
        )
    seconds = max((sent.ended_at or 0.0 for sent in again.sent_requests), default=0.0)
    return TokenCheck(answers, len(sample), seconds, unit, stopped=again.stopped, failed=dict(failed))


def answer_of(sent: SentRequest, api: Api) -> Optional[Answer]:
    """Return the token ids of a response, or its text if it has no ids; None if it is not complete."""
    if sent.outcome != "finished" or not sent.lines:
        return None
    pieces = [piece for piece in map(api.piece, sent.lines) if piece is not None]
    if pieces and all(piece.token_ids is not None for piece in pieces):
        return [token for piece in pieces for token in piece.token_ids or ()]
    return "".join(piece.text for piece in pieces) or None


def first_difference(live: Answer, alone: Answer) -> Optional[Difference]:
    """Return where two answers differ first; None if they are equal."""
    if live == alone:
        return None
    pairs = enumerate(zip(live, alone))
    index = next((index for index, (a, b) in pairs if a != b), min(len(live), len(alone)))
    return Difference(index, at(live, index), at(alone, index))


def at(answer: Answer, index: int) -> Union[int, str, None]:
    """Return the token or the text at an index; None after the end."""
    if index >= len(answer):
        return None
    return answer[index : index + SHOWN_CHARACTERS] if isinstance(answer, str) else answer[index]
