"""llm-serving's endpoints: bare JSON lines in an event stream, and errors inside a 200 response."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Callable, Optional

from aiohttp import web
from servesim.web import Refused

from .engine_client import End, Job, RequestHandle
from .http import EVENT_STREAM, HttpFrontEnd
from .tokenizers import decode

PATHS = ("/models/llama2", "/models/internlm")
ERRORS = {"refused": "Error202: prompt out of range", "empty": "Error203: prompt token empty"}
REASONS = {"refused": "prompt_out_of_range", "empty": "prompt_token_ids_empty"}
ABNORMAL = "error304: generation task stop abnormally!, please retry!"
EMPTY = End("empty")  # of a request without a prompt
DEFAULT_LIMIT = 300
BOS = 1  # the tokenizers of llm-serving's models add it at the start of a text


class ServingApi:
    """The handlers of llm-serving's paths."""

    def __init__(self, front_end: HttpFrontEnd) -> None:
        self.front_end = front_end

    def routes(self) -> list[web.RouteDef]:
        return [
            *(web.post(path + end, self.generate) for path in PATHS for end in ("", "/generate", "/generate_stream")),
            web.get("/serving/get_bs", self.batch_size),
            web.get("/serving/get_request_numbers", self.request_numbers),
            web.get("/serving/get_serverd_model_info", self.model_info),
        ]

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Stream the response or send one JSON line: the path decides, or the `stream` flag of the body."""
        body = await self._body(request)
        streamed = parse_bool(body.get("stream")) if request.path in PATHS else request.path.endswith("_stream")
        return await (self._stream(request, body) if streamed else self._generate(body))

    async def _body(self, request: web.Request) -> dict[str, Any]:
        body = await self.front_end.json_body(request, invalid_json)
        if not isinstance(body.get("inputs"), str):
            if "inputs" in body:
                raise unprocessable(["body", "inputs"], "str type expected", "type_error.str")
            raise unprocessable(["body", "inputs"], "field required", "value_error.missing")
        parameters = body.get("parameters") or {}
        limit = parameters.get("max_new_tokens") if isinstance(parameters, dict) else None
        if not isinstance(parameters, dict) or (limit is not None and parse_int(limit) is None):
            location = ["body", "parameters", "max_new_tokens"]
            raise unprocessable(location, "value is not a valid integer", "type_error.integer")
        return body

    async def _jobs(self, body: dict[str, Any]) -> list[Job]:
        """Return the request for the engine; none when the prompt is empty."""
        front_end = self.front_end
        tokens = await front_end.encoded(lambda: front_end.tokenizer.encode(body["inputs"]))
        if not tokens:
            return []
        limit = parse_int((body.get("parameters") or {}).get("max_new_tokens"))
        limit = DEFAULT_LIMIT if limit is None else limit
        prompt = [BOS, *tokens]
        return [Job(prompt, max(1, min(limit, front_end.context - len(prompt))), "length")]

    async def _generate(self, body: dict[str, Any]) -> web.Response:
        async with self.front_end.requests(await self._jobs(body)) as group:
            answers = await group.collect()
        numbers, end = answers[0] if answers else ([], EMPTY)
        tokens = [token_event(number, count == len(numbers)) for count, number in enumerate(numbers, 1)]
        response = full_response(tokens) if end.outcome == "finished" else error_response(end)
        return web.Response(text=json.dumps({**response, "details": None}) + "\n", content_type="application/json")

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Send one event per token, and the full response at the end if `return_full_text` is set."""
        parameters = body.get("parameters") or {}
        bare = parameters.get("return_protocol", "sse") == "sse"
        full = parse_bool(parameters.get("return_full_text", True))
        async with self.front_end.requests(await self._jobs(body)) as group:
            lines = TokenLines(group.handles, full, bare_line if bare else data_line)
            return await self.front_end.stream(
                request, EVENT_STREAM if bare else {}, group, lines, [] if group.handles else [(0, EMPTY)]
            )

    async def batch_size(self, request: web.Request) -> web.Response:
        """Return the number of slots."""
        return server_sent(wrap_event(self.front_end.batch))

    async def request_numbers(self, request: web.Request) -> web.Response:
        """Return the number of waiting requests."""
        return server_sent(wrap_event(self.front_end.engine.state.get("waiting", 0)))

    async def model_info(self, request: web.Request) -> web.Response:
        """Return the served model and its limits."""
        return server_sent(
            {
                "docker_label": "",
                "max_batch_total_tokens": self.front_end.batch * self.front_end.context,
                "max_concurrent_requests": self.front_end.engine.max_open,
                "max_input_length": self.front_end.context,
                "max_total_tokens": self.front_end.context,
                "model_device_type": self.front_end.device,
                "model_dtype": self.front_end.dtype,
                "model_id": self.front_end.model,
                "model_pipeline_tag": "text-generation",
                "version": "2.3",
            }
        )


class TokenLines:
    """The lines of one streamed answer."""

    def __init__(self, handles: Sequence[RequestHandle], full: bool, line: Callable[[Any], bytes]) -> None:
        self.handles = handles
        self.full = full  # with the full response at the end
        self.line = line  # formats an event
        self.tokens: list[dict[str, Any]] = []  # so far

    def token_line(self, index: int, token: int) -> bytes:
        self.tokens.append(token_event(token, len(self.tokens) + 1 == self.handles[index].limit))
        return self.line(partial_response(self.tokens[-1]))

    def last_lines(self) -> bytes:
        return self.line(full_response(self.tokens)) if self.full else b""

    def error_lines(self, end: End) -> bytes:
        response = error_response(end)
        return self.line(partial_response(response["tokens"][0])) + self.line(response)


def token_event(token: int, last: bool, error: str = "") -> dict[str, Any]:
    """Return a token in llm-serving's form. The last one has no text; an error is the text of token 0."""
    return {"id": token, "logprob": 0.0, "special": last, "text": "" if last else error or decode([token])}


def wrap_event(data: Any) -> dict[str, Any]:
    """Wrap data in llm-serving's event object."""
    return {"event": "message", "retry": 30000, "data": data}


def partial_response(token: dict[str, Any]) -> dict[str, Any]:
    """Return the event data of one token."""
    return {"details": None, "generated_text": token["text"], "tokens": token, "top_tokens": [token]}


def full_response(tokens: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the complete response."""
    return {
        "generated_text": "".join(token["text"] for token in tokens),
        "finish_reason": "length",
        "generated_tokens": len(tokens),
        "prefill": tokens[:1],
        "seed": 0,
        "tokens": tokens,
        "top_tokens": [tokens[:1]],
    }


def error_response(end: End) -> dict[str, Any]:
    """Return the response to a request that was rejected or failed."""
    token = token_event(0, False, ERRORS.get(end.outcome, ABNORMAL))
    reason = REASONS.get(end.outcome, "predict_failed")
    return {**full_response([token]), "finish_reason": reason, "generated_tokens": 0}


def bare_line(data: Any) -> bytes:
    """Return an event as llm-serving sends it, without the prefix `data:`."""
    return (json.dumps(wrap_event([{"details": None, **data}])) + "\n").encode()


def data_line(data: Any) -> bytes:
    """Return an event of the other protocols than `sse`."""
    return ("data:" + json.dumps({**data, "details": None}) + "\n").encode()


def server_sent(value: Any) -> web.Response:
    """Return a standard server-sent event."""
    return web.Response(
        text=f"data: {json.dumps(value)}\n\n", content_type="text/event-stream", headers={"Cache-Control": "no-cache"}
    )


def parse_bool(value: Any) -> bool:
    """Parse true, "True", "yes", "on" and "1" as true."""
    return value.strip().lower() in ("true", "1", "yes", "on") if isinstance(value, str) else bool(value)


def parse_int(value: Any) -> Optional[int]:
    """Parse an integer, also from a string; None for other values."""
    if isinstance(value, bool):
        return None
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number == value or isinstance(value, str) else None


def unprocessable(location: list[Any], message: str, kind: str) -> Refused:
    """Return FastAPI's 422 response."""
    return Refused(422, {"detail": [{"loc": location, "msg": message, "type": kind}]})


def invalid_json(error: str, offset: int) -> Refused:
    """Return FastAPI's 422 response for a body that is not JSON."""
    fault = {"type": "json_invalid", "loc": ["body", offset], "msg": "JSON decode error", "input": {}}
    return Refused(422, {"detail": [{**fault, "ctx": {"error": error}}]})
