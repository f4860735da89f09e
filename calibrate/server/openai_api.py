"""OpenAI's completions with the fields that load generators use: prompt, max_tokens, stream."""

from __future__ import annotations

import json
import reprlib
import time
from typing import Any

from aiohttp import web

from .engine_client import End, RequestHandle
from .http import HttpFrontEnd, Refused, Stream, collect
from .word_tokenizer import decode_token, encode

DEFAULT_LIMIT = 16


class OpenAIApi:
    """The handlers of /v1."""

    def __init__(self, front_end: HttpFrontEnd) -> None:
        self.front_end = front_end

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/completions", self.completions), web.get("/v1/models", self.models)]

    async def models(self, request: web.Request) -> web.Response:
        """List the one model."""
        model, context = self.front_end.model, self.front_end.context
        card = {"id": model, "object": "model", "owned_by": "servesim", "max_model_len": context}
        return web.json_response({"object": "list", "data": [card]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Complete one prompt."""
        body = await self.front_end.json_body(request, lambda text, offset: fault(400, f"not JSON at {offset}: {text}"))
        limit = body.get("max_tokens", DEFAULT_LIMIT)
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise fault(400, f"max_tokens: expected a positive integer, got {reprlib.repr(limit)}")
        if body.get("n", 1) != 1:
            raise fault(400, f"n: expected 1, got {reprlib.repr(body['n'])}")
        streamed, with_usage = flag("stream", body.get("stream")), include_usage(body.get("stream_options"))
        handle = self.front_end.submit(self._prompt(body.get("prompt")), limit)
        async with self.front_end.abort_on_exit(handle):
            if streamed:
                return await self._stream(request, handle, with_usage)
            tokens, end = await collect(handle)
        if end.outcome != "finished":
            raise fault(400 if end.outcome == "refused" else 500, end.reason or end.outcome)
        choice = {"index": 0, "text": "".join(map(decode_token, tokens)), "logprobs": None, "finish_reason": "length"}
        return web.json_response({**self._head(handle), "choices": [choice], "usage": usage(handle, len(tokens))})

    def _prompt(self, value: Any) -> list[int]:
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
            value = value[0]
        if isinstance(value, str):
            value = encode(value, self.front_end.vocab)
        all_ints = isinstance(value, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in value)
        if not all_ints or not value:
            raise fault(400, "prompt: expected a text or a list of token ids, not empty")
        if not all(0 <= token < self.front_end.vocab for token in value):
            raise fault(400, f"prompt: expected token ids below {self.front_end.vocab}")
        return list(value)

    async def _stream(self, request: web.Request, handle: RequestHandle, with_usage: bool) -> web.StreamResponse:
        first = await handle.next() or []  # a rejection is known now, and can still be an HTTP status
        if isinstance(first[0], End) and first[0].outcome != "finished":
            raise fault(400 if first[0].outcome == "refused" else 500, first[0].reason or first[0].outcome)
        async with self.front_end.stream(request, {"Content-Type": "text/event-stream; charset=utf-8"}) as stream:
            await self._stream_tokens(stream, handle, first, with_usage)
        return stream.response

    async def _stream_tokens(self, stream: Stream, handle: RequestHandle, events: list[Any], with_usage: bool) -> None:
        """Send the tokens as they arrive, then the end."""
        count, head = 0, self._head(handle)
        while True:
            data = b""
            for event in events:
                if isinstance(event, End):
                    await stream.write(data + self._last_lines(handle, count, event, with_usage))
                    return
                count += 1
                reason = "length" if count >= handle.limit else None
                choice = {"index": 0, "text": decode_token(event), "logprobs": None, "finish_reason": reason}
                data += line({**head, "choices": [choice]})
            await stream.write(data)
            events = await stream.next_events(handle)

    def _last_lines(self, handle: RequestHandle, count: int, end: End, with_usage: bool) -> bytes:
        if end.outcome != "finished":
            return line({"error": {"message": end.reason or end.outcome, "type": "server_error"}})
        counts = line({**self._head(handle), "choices": [], "usage": usage(handle, count)}) if with_usage else b""
        return counts + b"data: [DONE]\n\n"

    def _head(self, handle: RequestHandle) -> dict[str, Any]:
        name = f"cmpl-{handle.id}"
        return {"id": name, "object": "text_completion", "created": int(time.time()), "model": self.front_end.model}


def line(value: Any) -> bytes:
    """Return a server-sent event."""
    return f"data: {json.dumps(value)}\n\n".encode()


def include_usage(options: Any) -> bool:
    """Return whether the `stream_options` of a request ask for token counts."""
    if not isinstance(options, (dict, type(None))):
        raise fault(400, f"stream_options: expected an object, got {reprlib.repr(options)}")
    return flag("stream_options.include_usage", (options or {}).get("include_usage"))


def flag(name: str, value: Any) -> bool:
    """Return a flag of the body; null is false."""
    if not isinstance(value, (bool, type(None))):
        raise fault(400, f"{name}: expected true or false, got {reprlib.repr(value)}")
    return bool(value)


def usage(handle: RequestHandle, output: int) -> dict[str, int]:
    """Return the token counts of a response."""
    total = handle.prompt + output
    return {"prompt_tokens": handle.prompt, "completion_tokens": output, "total_tokens": total}


def fault(status: int, message: str) -> Refused:
    """Return an error in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return Refused(status, {"error": {"message": message, "type": kind, "param": None, "code": status}})
