"""OpenAI's completions, as far as load generators use them: a prompt, a number of tokens, streamed or not."""

from __future__ import annotations

import json
import time
from typing import Any

from aiohttp import web

from .engine_client import End, Ticket
from .http import Front, Refused, Stream, answered
from .word_tokenizer import text_of, tokens_of

DEFAULT_LIMIT = 16


class OpenAIApi:
    """The handlers of /v1."""

    def __init__(self, front: Front) -> None:
        self.front = front

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/completions", self.completions), web.get("/v1/models", self.models)]

    async def models(self, request: web.Request) -> web.Response:
        """List the one model."""
        card = {"id": self.front.model, "object": "model", "owned_by": "servesim", "max_model_len": self.front.context}
        return web.json_response({"object": "list", "data": [card]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Complete one prompt."""
        body = await self.front.json_body(request, lambda error, place: fault(400, f"not JSON at {place}: {error}"))
        limit = body.get("max_tokens", DEFAULT_LIMIT)
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise fault(400, f"max_tokens: expected a positive integer, got {limit!r}")
        if body.get("n", 1) != 1:
            raise fault(400, f"n: expected 1, got {body['n']!r}")
        ticket = self.front.post(self._prompt(body.get("prompt")), limit)
        async with self.front.following(ticket):
            if body.get("stream"):
                return await self._stream(request, body, ticket)
            tokens, end = await answered(ticket)
        if end.outcome != "finished":
            raise fault(400 if end.outcome == "refused" else 500, end.reason or end.outcome)
        choice = {"index": 0, "text": "".join(map(text_of, tokens)), "logprobs": None, "finish_reason": "length"}
        return web.json_response({**self._head(ticket), "choices": [choice], "usage": usage(ticket, len(tokens))})

    def _prompt(self, given: Any) -> list[int]:
        if isinstance(given, list) and len(given) == 1 and isinstance(given[0], (str, list)):
            given = given[0]
        if isinstance(given, str):
            given = tokens_of(given, self.front.vocab)
        numbers = isinstance(given, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in given)
        if not numbers or not given:
            raise fault(400, "prompt: expected a text, or a list of token ids, and something in it")
        if not all(0 <= token < self.front.vocab for token in given):
            raise fault(400, f"prompt: expected token ids below {self.front.vocab}")
        return list(given)

    async def _stream(self, request: web.Request, body: dict[str, Any], ticket: Ticket) -> web.StreamResponse:
        first = await ticket.next() or []  # a refusal is known by then, and can still be a status
        if isinstance(first[0], End) and first[0].outcome != "finished":
            raise fault(400 if first[0].outcome == "refused" else 500, first[0].reason or first[0].outcome)
        counted = bool((body.get("stream_options") or {}).get("include_usage"))
        async with self.front.stream(request, {"Content-Type": "text/event-stream; charset=utf-8"}) as stream:
            await self._tokens(stream, ticket, first, counted)
        return stream.response

    async def _tokens(self, stream: Stream, ticket: Ticket, news: list[Any], counted: bool) -> None:
        """Pass tokens on as they come, then the end."""
        count, head = 0, self._head(ticket)
        while True:
            data = b""
            for one in news:
                if isinstance(one, End):
                    await stream.write(data + self._ending(ticket, count, one, counted))
                    return
                count += 1
                reason = "length" if count >= ticket.limit else None
                choice = {"index": 0, "text": text_of(one), "logprobs": None, "finish_reason": reason}
                data += line({**head, "choices": [choice]})
            await stream.write(data)
            news = await stream.news(ticket)

    def _ending(self, ticket: Ticket, count: int, end: End, counted: bool) -> bytes:
        if end.outcome != "finished":
            return line({"error": {"message": end.reason or end.outcome, "type": "server_error"}})
        used = line({**self._head(ticket), "choices": [], "usage": usage(ticket, count)}) if counted else b""
        return used + b"data: [DONE]\n\n"

    def _head(self, ticket: Ticket) -> dict[str, Any]:
        name = f"cmpl-{ticket.id}"
        return {"id": name, "object": "text_completion", "created": int(time.time()), "model": self.front.model}


def line(value: Any) -> bytes:
    """Return a server-sent event."""
    return f"data: {json.dumps(value)}\n\n".encode()


def usage(ticket: Ticket, written: int) -> dict[str, int]:
    """Return the counts of an answer."""
    total = ticket.prompt + written
    return {"prompt_tokens": ticket.prompt, "completion_tokens": written, "total_tokens": total}


def fault(status: int, message: str) -> Refused:
    """Return an error as OpenAI words it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return Refused(status, {"error": {"message": message, "type": kind, "param": None, "code": status}})
