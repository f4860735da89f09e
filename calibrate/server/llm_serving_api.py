"""llm-serving's endpoints, as its clients know them: bare JSON lines in an event stream, errors inside a 200."""

from __future__ import annotations

import json
from typing import Any, Callable, Optional

from aiohttp import web

from .engine_client import End, Ticket
from .http import Front, Refused, Stream, answered
from .word_tokenizer import event, partial, piece, tokens_of, whole

PATHS = ("/models/llama2", "/models/internlm")
ERRORS = {"refused": "Error202: prompt out of range", "empty": "Error203: prompt token empty"}
REASONS = {"refused": "prompt_out_of_range", "empty": "prompt_token_ids_empty"}
ABNORMAL = "error304: generation task stop abnormally!, please retry!"
DEFAULT_LIMIT = 300


class ServingApi:
    """The handlers of llm-serving's paths."""

    def __init__(self, front: Front) -> None:
        self.front = front

    def routes(self) -> list[web.RouteDef]:
        return [
            *(web.post(path + end, self.generate) for path in PATHS for end in ("", "/generate", "/generate_stream")),
            web.get("/serving/get_bs", self.batch_size),
            web.get("/serving/get_request_numbers", self.request_numbers),
            web.get("/serving/get_serverd_model_info", self.model_info),
        ]

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer token by token or with one JSON line, as the path says, else the body's stream flag."""
        body = await self._body(request)
        streamed = truth(body.get("stream")) if request.path in PATHS else request.path.endswith("_stream")
        return await (self._stream(request, body) if streamed else self._whole(body))

    async def _body(self, request: web.Request) -> dict[str, Any]:
        body = await self.front.json_body(request, invalid_json)
        if not isinstance(body.get("inputs"), str):
            if "inputs" in body:
                raise unprocessable(["body", "inputs"], "str type expected", "type_error.str")
            raise unprocessable(["body", "inputs"], "field required", "value_error.missing")
        parameters = body.get("parameters") or {}
        limit = parameters.get("max_new_tokens") if isinstance(parameters, dict) else None
        if not isinstance(parameters, dict) or (limit is not None and whole_number(limit) is None):
            place = ["body", "parameters", "max_new_tokens"]
            raise unprocessable(place, "value is not a valid integer", "type_error.integer")
        return body

    def _hand_over(self, body: dict[str, Any]) -> Optional[Ticket]:
        """Hand a request over; None when it has nothing in it."""
        tokens = tokens_of(body["inputs"], self.front.vocab)
        limit = whole_number((body.get("parameters") or {}).get("max_new_tokens"))
        return self.front.post(tokens, DEFAULT_LIMIT if limit is None else limit) if tokens else None

    async def _whole(self, body: dict[str, Any]) -> web.Response:
        ticket = self._hand_over(body)
        tokens: list[dict[str, Any]] = []
        end = End("empty")
        if ticket is not None:
            async with self.front.following(ticket):
                numbers, end = await answered(ticket)
                tokens = [piece(number, place == len(numbers)) for place, number in enumerate(numbers, 1)]
        text = json.dumps({**self._answer(tokens, end), "details": None}) + "\n"
        return web.Response(text=text, content_type="application/json")

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Send an event a token, and the whole answer at the end if that is wanted."""
        parameters = body.get("parameters") or {}
        bare = parameters.get("return_protocol", "sse") == "sse"
        ticket = self._hand_over(body)
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"} if bare else {}
        line = bare_line if bare else data_line
        full = truth(parameters.get("return_full_text", True))
        async with self.front.following(ticket), self.front.stream(request, headers) as stream:
            if ticket is None:
                await stream.write(self._ending([], End("empty"), full, line))
            else:
                await self._tokens(ticket, stream, full, line)
        return stream.response

    async def _tokens(self, ticket: Ticket, stream: Stream, full: bool, line: Callable[[Any], bytes]) -> None:
        """Pass tokens on as they come, then the end."""
        tokens: list[dict[str, Any]] = []
        while True:
            data = b""
            for news in await stream.news(ticket):
                if isinstance(news, End):
                    await stream.write(data + self._ending(tokens, news, full, line))
                    return
                tokens.append(piece(news, len(tokens) + 1 == ticket.limit))
                data += line(partial(tokens[-1]))
            await stream.write(data)

    def _ending(self, tokens: list[dict[str, Any]], end: End, full: bool, line: Callable[[Any], bytes]) -> bytes:
        answer = self._answer(tokens, end)
        if end.outcome == "finished":
            return line(answer) if full else b""
        return line(partial(answer["tokens"][-1])) + line(answer)

    def _answer(self, tokens: list[dict[str, Any]], end: End) -> dict[str, Any]:
        if end.outcome == "finished":
            return whole(tokens, "length", len(tokens))
        text = ERRORS.get(end.outcome, ABNORMAL)
        return whole([piece(0, False, text)], REASONS.get(end.outcome, "predict_failed"), 0)

    async def batch_size(self, request: web.Request) -> web.Response:
        """Answer the number of slots."""
        return server_sent(event(self.front.batch))

    async def request_numbers(self, request: web.Request) -> web.Response:
        """Answer how many requests wait."""
        return server_sent(event(self.front.counter.state.get("waiting", 0)))

    async def model_info(self, request: web.Request) -> web.Response:
        """Answer what is served."""
        return server_sent(
            {
                "docker_label": "",
                "max_batch_total_tokens": self.front.batch * self.front.context,
                "max_concurrent_requests": self.front.counter.most,
                "max_input_length": self.front.context,
                "max_total_tokens": self.front.context,
                "model_device_type": self.front.device,
                "model_dtype": self.front.dtype,
                "model_id": self.front.model,
                "model_pipeline_tag": "text-generation",
                "version": "2.3",
            }
        )


def bare_line(data: Any) -> bytes:
    """Return an event as llm-serving writes it, without a name before it."""
    return (json.dumps(event([{"details": None, **data}])) + "\n").encode()


def data_line(data: Any) -> bytes:
    """Return what other protocols than sse get."""
    return ("data:" + json.dumps({**data, "details": None}) + "\n").encode()


def server_sent(value: Any) -> web.Response:
    """Return a proper server-sent event."""
    return web.Response(
        text=f"data: {json.dumps(value)}\n\n", content_type="text/event-stream", headers={"Cache-Control": "no-cache"}
    )


def truth(value: Any) -> bool:
    """Read true, "True" and the like."""
    return value.strip().lower() in ("true", "1", "yes", "on") if isinstance(value, str) else bool(value)


def whole_number(value: Any) -> Optional[int]:
    """Read a whole number, also as text; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number == value or isinstance(value, str) else None


def unprocessable(place: list[Any], message: str, kind: str) -> Refused:
    """Return the 422 that FastAPI would give."""
    return Refused(422, {"detail": [{"loc": place, "msg": message, "type": kind}]})


def invalid_json(error: str, place: int) -> Refused:
    """Return the 422 for a body that is no JSON."""
    fault = {"type": "json_invalid", "loc": ["body", place], "msg": "JSON decode error", "input": {}}
    return Refused(422, {"detail": [{**fault, "ctx": {"error": error}}]})
