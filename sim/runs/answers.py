"""Several answers to one request in an engine that runs each as a request of its own, such as vLLM V1.

The front end sends a copy of the request to the engine for each answer, with the ids 0_ID, 1_ID and so on. All copies
have the same prompt, so a prefix cache shares its whole blocks. For metrics, the request is one again: its first token
is the first one of all answers, and it ends with the last answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from servesim.core import BadInput, Content, Request, SequenceGroup
from servesim.core.request import CLIENT_FIELDS
from servesim.engine.rules import EngineRules
from servesim.traces.contents import own_answer, own_text

LAST_ANSWER = (  # what the request has of its last answer, so that its seconds in the states add up
    "sent", "arrival", "status", "visible_at", "last_token", "finish", "client_end", "queued", "prefilling",
    "decoding", "swapped", "state_since",
)  # fmt: skip
Answers = Mapping[Any, Sequence[Request]]  # id of a request -> one request per answer


def split_answers(requests: Sequence[Request], rules: EngineRules) -> Answers:
    """Return the requests that the engine gets for those with several answers; nothing if it runs them itself."""
    several = [request for request in requests if request.sampling is not None]
    if rules.sequence_groups or not several:
        return {}
    answers = {request.id: split(request) for request in several}
    for request in requests:
        if request.follows in answers:
            raise BadInput(
                f"request {request.id}: follows: expected a request with one answer, got {request.follows} with "
                f"{len(answers[request.follows])} (n); this policy runs each answer as a request of its own"
            )
    return answers


def split(request: Request) -> list[Request]:
    """Return one request for each answer to a request with several."""
    sampling, content = request.sampling, request.content
    assert sampling is not None
    advice = "the preset vllm-0.6.1 has it"
    if sampling.beam_search:
        raise BadInput(f"request {request.id}: beam_width: this policy has no beam search; {advice}")
    if sampling.best_of != sampling.n:
        raise BadInput(f"request {request.id}: best_of: expected {sampling.n} (n) with this policy; {advice}")
    names, ends = ([own_text(request.id)], [request.prompt]) if content is None else (content.names, content.ends)
    answers = []
    for index, tokens in enumerate(sampling.outputs or [request.output] * sampling.n):
        id = f"{index}_{request.id}"
        answer = content.answer if content is not None and not index else None
        text = Content(names, ends, own_answer(id) if answer is None else answer)
        fields = {**dict(zip(CLIENT_FIELDS, request.client_fields())), "sampling": None}
        answers.append(Request(**{**fields, "id": id, "output": tokens, "content": text}))
    return answers


def with_answers(requests: Sequence[Request], answers: Answers) -> Sequence[Request]:
    """Return the requests that the engine gets, in order."""
    if not answers:
        return requests
    return [answer for request in requests for answer in answers.get(request.id, (request,))]


def join_answers(request: Request, answers: Sequence[Request]) -> None:
    """Record the times of the answers in their request."""
    last = max(answers, key=lambda answer: math.inf if answer.client_end is None else answer.client_end)
    for name in LAST_ANSWER:
        setattr(request, name, getattr(last, name))
    bad = [answer for answer in answers if answer.outcome != "finished"]
    request.outcome, request.reason = (bad[0].outcome, bad[0].reason) if bad else (last.outcome, last.reason)
    firsts = [answer.first_token for answer in answers if answer.first_token is not None]
    request.first_token = min(firsts, default=None)
    starts = [answer.scheduled for answer in answers if answer.scheduled is not None]
    request.scheduled = min(starts, default=None)
    request.preemptions = sum(answer.preemptions for answer in answers)
    request.cached_tokens = sum(answer.cached_tokens for answer in answers)
    request._written = max(answer.written for answer in answers)
    assert request.sampling is not None
    request.sampling = group = SequenceGroup(request.sampling)
    group.generated = sum(answer.written for answer in answers)
