"""The two HTTP interfaces of servers, client side: build request bodies and parse the lines of a stream.

llm-serving streams bare JSON lines as an event stream, puts errors inside a 200 response, and pings after 600 s.
OpenAI-compatible servers (vLLM, vllm-ascend, SGLang) stream `data:` lines that end with [DONE].
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, Optional, Protocol

from servesim.core import Request

from .prompts import UNSEEDED, Prompts

ERROR = re.compile(r"^(Error20\d|error304)")  # how llm-serving's error texts begin
BOS_TOKENS = 1  # the tokenizers of llm-serving's models (Llama, InternLM) add one token at the start of a text


class Event(NamedTuple):
    """The content of one line of a stream."""

    tokens: int = 0  # generated with this line
    output_tokens: Optional[int] = None  # of the whole response, if the server counts them
    complete: bool = False  # the response is complete
    error: Optional[str] = None
    ping: bool = False
    prompt_tokens: Optional[int] = None  # if the server counts them


class Piece(NamedTuple):
    """The part of an answer in one line of a stream."""

    text: str = ""
    token_ids: Optional[list[int]] = None  # if the server sends them


class Api(Protocol):
    """One HTTP interface."""

    path: str
    closes: bool  # whether the server closes the connection after one request

    def body(self, request: Request) -> dict[str, Any]:
        """Return the body of a request."""

    def event(self, line: bytes) -> Event:
        """Parse one line of the response stream."""

    def piece(self, line: bytes) -> Optional[Piece]:
        """Return the part of the answer in a line that `event` can parse; None if it has none."""


class LlmServing:
    """MindSpore llm-serving's generate_stream, with the request body of performance_serving."""

    path = "/models/llama2/generate_stream"
    closes = True

    def __init__(self, prompts: Prompts = UNSEEDED) -> None:
        self.prompts = prompts

    def body(self, request: Request) -> dict[str, Any]:
        parameters = {"do_sample": "False", "return_full_text": "True", "max_new_tokens": output_length(request)}
        return {"inputs": self.prompts.words(request, BOS_TOKENS), "stream": True, "parameters": parameters}

    def event(self, line: bytes) -> Event:
        if line.startswith(b":"):
            return Event(ping=True)
        if line.startswith(b"data:"):
            line = line[5:]
        message = json.loads(line)
        if "detail" in message:
            return Event(error=str(message["detail"])[:200])
        data = message.get("data", message)
        response = data[0] if isinstance(data, list) else data
        text = str(response.get("generated_text", ""))
        if ERROR.match(text):
            return Event(error=text)
        if "finish_reason" in response:
            return Event(output_tokens=response.get("generated_tokens"), complete=True)
        return Event(tokens=1)

    def piece(self, line: bytes) -> Optional[Piece]:
        if not self.event(line).tokens:
            return None
        message = json.loads(line[5:] if line.startswith(b"data:") else line)
        data = message.get("data", message)
        response = data[0] if isinstance(data, list) else data
        token = response.get("tokens")
        number = token.get("id") if isinstance(token, dict) else None
        return Piece(str(response.get("generated_text", "")), [number] if isinstance(number, int) else None)


class OpenAI:
    """OpenAI's completions. The prompt is a list of token ids, so its length is exact."""

    path = "/v1/completions"
    closes = False

    def __init__(self, model: str, prompts: Prompts = UNSEEDED) -> None:
        self.model = model
        self.prompts = prompts

    def body(self, request: Request) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": self.prompts.token_ids(request),
            "max_tokens": output_length(request),
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def event(self, line: bytes) -> Event:
        if line.startswith(b":"):
            return Event(ping=True)
        if not line.startswith(b"data:"):
            return Event()
        data = line[5:].strip()
        if data == b"[DONE]":
            return Event(complete=True)
        message = json.loads(data)
        if "error" in message:
            return Event(error=str(message["error"])[:200])
        usage = message.get("usage") or {}
        tokens = int(any(choice.get("text") is not None for choice in message.get("choices", ())))
        return Event(tokens, usage.get("completion_tokens"), prompt_tokens=usage.get("prompt_tokens"))

    def piece(self, line: bytes) -> Optional[Piece]:
        if not self.event(line).tokens:
            return None
        choice = json.loads(line[5:])["choices"][0]
        ids = choice.get("token_ids")
        return Piece(str(choice.get("text") or ""), ids if isinstance(ids, list) else None)


class TextCompletions(OpenAI):
    """OpenAI's completions for servers that do not accept token ids: the prompt is text, one word per token."""

    added_tokens = 0  # by the server at the start of a text; known after its first response

    def body(self, request: Request) -> dict[str, Any]:
        return {**super().body(request), "prompt": self.prompts.words(request, self.added_tokens)}


def output_length(request: Request) -> int:
    """Return the output tokens to request: without a number, a server generates up to its own limit."""
    return min(request.output, request.limit)
