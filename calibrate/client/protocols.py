"""The two HTTP interfaces of servers, client side: the key, request bodies, and the lines of a stream.

llm-serving streams bare JSON lines as an event stream, puts errors inside a 200 response, and pings after 600 s.
OpenAI-compatible servers (vLLM, vllm-ascend, SGLang) stream `data:` lines that end with [DONE].
"""

from __future__ import annotations

import json
import os
import re
from typing import Any, NamedTuple, Optional

from servesim.core import BadInput, Request

from .prompts import UNSEEDED, Prompts

ERROR = re.compile(r"^(Error20\d|error304)")  # how llm-serving's error texts begin
KEY_VARIABLE = "SERVESIM_API_KEY"  # environment: the key of a server, which `ps` does not show there
RUNNING_COUNT = "continuous_usage_stats"  # option of vLLM and others; old versions refuse it
BOS_TOKENS = 1  # the tokenizers of llm-serving's models (Llama, InternLM) add one token at the start of a text


class Event(NamedTuple):
    """The content of one line of a stream."""

    tokens: int = 0  # generated with this line, at least
    output_tokens: Optional[int] = None  # of the response so far, if the server counts them
    complete: bool = False  # the response is complete
    error: Optional[str] = None
    ping: bool = False
    prompt_tokens: Optional[int] = None  # if the server counts them
    text: str = ""  # of these tokens
    token_ids: Optional[list[int]] = None  # if the server sends them


class Api:
    """One HTTP interface."""

    path = ""
    closes = False  # whether the server closes the connection after one request
    model: Optional[str] = None  # that requests name

    def __init__(self, prompts: Prompts = UNSEEDED) -> None:
        self.prompts = prompts

    def body(self, request: Request) -> dict[str, Any]:
        """Return the body of a request."""
        raise NotImplementedError

    def adapt_to(self, refusal: str) -> None:
        """Leave out of later bodies an option that the server refused with this text."""

    def event(self, line: bytes) -> Event:
        """Parse one line of the response stream."""
        return Event(ping=True) if line.startswith(b":") else self.parse(line)

    def parse(self, line: bytes) -> Event:
        """Parse a line that is not a ping."""
        raise NotImplementedError


class LlmServing(Api):
    """MindSpore llm-serving's generate_stream, with the request body of performance_serving."""

    path = "/models/llama2/generate_stream"
    closes = True

    def body(self, request: Request) -> dict[str, Any]:
        parameters = {"do_sample": "False", "return_full_text": "True", "max_new_tokens": output_length(request)}
        return {"inputs": self.prompts.words(request, BOS_TOKENS), "stream": True, "parameters": parameters}

    def parse(self, line: bytes) -> Event:
        message = json.loads(line[5:] if line.startswith(b"data:") else line)
        if "detail" in message:
            return Event(error=str(message["detail"])[:200])
        data = message.get("data", message)
        response = data[0] if isinstance(data, list) else data
        text = str(response.get("generated_text", ""))
        if ERROR.match(text):
            return Event(error=text)
        if "finish_reason" in response:
            return Event(output_tokens=response.get("generated_tokens"), complete=True)
        token = response.get("tokens")
        number = token.get("id") if isinstance(token, dict) else None
        return Event(tokens=1, text=text, token_ids=[number] if isinstance(number, int) else None)


class OpenAI(Api):
    """OpenAI's completions. The prompt is a list of token ids, so its length is exact."""

    path = "/v1/completions"
    running_count = True  # ask for the number of tokens so far: an event can have several

    def __init__(self, model: str, prompts: Prompts = UNSEEDED) -> None:
        super().__init__(prompts)
        self.model = model

    def adapt_to(self, refusal: str) -> None:
        self.running_count = self.running_count and RUNNING_COUNT not in refusal

    def body(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": self.prompts.token_ids(request),
            "max_tokens": output_length(request),
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, **({RUNNING_COUNT: True} if self.running_count else {})},
        }
        # vLLM then sends the token ids of the answer, which the next prompt of the conversation contains.
        return {**body, "return_token_ids": True} if has_named_answer(request) else body

    def parse(self, line: bytes) -> Event:
        if not line.startswith(b"data:"):
            return Event()
        data = line[5:].strip()
        if data == b"[DONE]":
            return Event(complete=True)
        message = json.loads(data)
        if "error" in message:
            return Event(error=str(message["error"])[:200])
        usage = message.get("usage") or {}
        counted = Event(output_tokens=usage.get("completion_tokens"), prompt_tokens=usage.get("prompt_tokens"))
        choice = next((choice for choice in message.get("choices", ()) if choice.get("text") is not None), None)
        if choice is None:
            return counted
        ids = choice.get("token_ids")
        return counted._replace(tokens=1, text=str(choice["text"]), token_ids=ids if isinstance(ids, list) else None)


class TextCompletions(OpenAI):
    """OpenAI's completions for servers that do not accept token ids: the prompt is text, one word per token."""

    added_tokens = 0  # by the server at the start of a text; known after its first response

    def body(self, request: Request) -> dict[str, Any]:
        return {**super().body(request), "prompt": self.prompts.words(request, self.added_tokens)}


def has_named_answer(request: Request) -> bool:
    """Whether other prompts may contain the answer."""
    return request.content is not None and request.content.answer is not None


def output_length(request: Request) -> int:
    """Return the output tokens to request: without a number, a server generates up to its own limit."""
    return min(request.output, request.limit)


def api_key(option: Optional[str] = None) -> Optional[str]:
    """Return the key of the option `--api-key`, else of the environment; None without one."""
    name, key = ("--api-key", option) if option is not None else (KEY_VARIABLE, os.environ.get(KEY_VARIABLE))
    if key is None:
        return None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise BadInput(f"{name}: expected printable ASCII characters without spaces")
    return key


def key_header() -> dict[str, str]:
    """Return the header that a client sends; empty without a key in the environment."""
    key = api_key()
    return {} if key is None else {"Authorization": f"Bearer {key}"}
