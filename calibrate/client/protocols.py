"""The two HTTP interfaces a server may speak, from the client's side: what to send, and what the lines of a stream say.

llm-serving streams bare JSON lines under the name of an event stream, puts errors inside a 200, and pings after 600 s.
OpenAI-compatible servers (vLLM, vllm-ascend, SGLang) stream `data:` lines that end with [DONE].
"""

from __future__ import annotations

import json
import re
import zlib
from typing import Any, NamedTuple, Optional, Protocol

from servesim.core import Request

ERROR = re.compile(r"^(Error20\d|error304)")  # how llm-serving's error texts begin
VOCABULARY = range(100, 10_000)  # token ids that any model has


class Event(NamedTuple):
    """What a line of a stream says."""

    tokens: int = 0  # written with this line
    total: Optional[int] = None  # written in all, where the server counts
    over: bool = False  # the answer is complete
    error: Optional[str] = None
    ping: bool = False
    prompt: Optional[int] = None  # tokens of the prompt, where the server counts


class Api(Protocol):
    """One interface."""

    path: str
    closes: bool  # whether a connection serves one request only

    def body(self, request: Request) -> dict[str, Any]:
        """Return what to post for a request."""

    def event(self, line: bytes) -> Event:
        """Read a line of the answer's stream."""


class LlmServing:
    """MindSpore llm-serving's generate_stream, asked as performance_serving asks."""

    path = "/models/llama2/generate_stream"
    closes = True

    def body(self, request: Request) -> dict[str, Any]:
        parameters = {"do_sample": "False", "return_full_text": "True", "max_new_tokens": length(request)}
        return {"inputs": words(request), "stream": True, "parameters": parameters}

    def event(self, line: bytes) -> Event:
        if line.startswith(b":"):
            return Event(ping=True)
        if line.startswith(b"data:"):
            line = line[5:]
        found = json.loads(line)
        if "detail" in found:
            return Event(error=str(found["detail"])[:200])
        data = found.get("data", found)
        answer = data[0] if isinstance(data, list) else data
        text = str(answer.get("generated_text", ""))
        if ERROR.match(text):
            return Event(error=text)
        if "finish_reason" in answer:
            return Event(total=answer.get("generated_tokens"), over=True)
        return Event(tokens=1)


class OpenAI:
    """OpenAI's completions; token ids for a prompt, so that its length is exact."""

    path = "/v1/completions"
    closes = False

    def __init__(self, model: str) -> None:
        self.model = model

    def body(self, request: Request) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": ids(request),
            "max_tokens": length(request),
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
            return Event(over=True)
        found = json.loads(data)
        if "error" in found:
            return Event(error=str(found["error"])[:200])
        usage = found.get("usage") or {}
        wrote = any(choice.get("text") is not None for choice in found.get("choices", ()))
        return Event(tokens=int(wrote), total=usage.get("completion_tokens"), prompt=usage.get("prompt_tokens"))


def length(request: Request) -> int:
    """Return how much a request is to write: a server that is not told goes on to its limit."""
    return min(request.output, request.limit)


def ids(request: Request) -> list[int]:
    """Return a prompt of just so many token ids, the same for the same request."""
    start, span = zlib.crc32(str(request.id).encode()), len(VOCABULARY)
    return [VOCABULARY[(start + 7919 * place) % span] for place in range(request.prompt)]


def words(request: Request) -> str:
    """Return a prompt of just so many words, the same for the same request."""
    return " ".join(f"w{id}" for id in ids(request))
