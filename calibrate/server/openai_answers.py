"""The answers of OpenAI's two interfaces: JSON objects, and the lines of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, Optional, Protocol

from .engine_client import End, RequestHandle
from .openai_fields import Generation
from .word_tokenizer import decode


class Form(Protocol):
    """How one interface names and nests the text of an answer."""

    id_prefix: str
    whole: str  # type of a complete answer
    part: str  # type of a line of a stream

    def text(self, tokens: Sequence[int], first: bool) -> str:
        """Return the text of tokens; `first` says whether the answer begins with them."""

    def choice(self, text: str) -> dict[str, Any]:
        """Return the text of a complete answer."""

    def piece(self, text: str, first: bool) -> dict[str, Any]:
        """Return the text of one token in a stream."""


class CompletionForm:
    """The answers of /v1/completions: the text continues the prompt."""

    id_prefix = "cmpl"
    whole = part = "text_completion"

    def text(self, tokens: Sequence[int], first: bool) -> str:
        return decode(tokens)

    def choice(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def piece(self, text: str, first: bool) -> dict[str, Any]:
        return {"text": text}


class ChatForm:
    """The answers of /v1/chat/completions: a message of the assistant."""

    id_prefix = "chatcmpl"
    whole = "chat.completion"
    part = "chat.completion.chunk"

    def text(self, tokens: Sequence[int], first: bool) -> str:
        return decode(tokens)[1:] if first else decode(tokens)

    def choice(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def piece(self, text: str, first: bool) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": text} if first else {"content": text}}


class Answers:
    """The answers to one HTTP request, in the form of its interface."""

    def __init__(self, form: Form, model: str, handles: Sequence[RequestHandle], asked: Generation) -> None:
        self.form = form
        self.handles = handles
        self.asked = asked
        self.counts = [0] * len(handles)  # tokens so far
        self.prompt_tokens = sum(handle.prompt for handle in handles[:: asked.n])
        self.head = {"id": f"{form.id_prefix}-{handles[0].id}", "created": int(time.time()), "model": model}

    def complete(self, tokens: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Return the response with all answers; `tokens` are those of each request."""
        self.counts = list(map(len, tokens))
        choices = [
            self._choice(index, self.form.choice(self.form.text(each, True)), self.handles[index].finish_reason)
            for index, each in enumerate(tokens)
        ]
        return {**self.head, "object": self.form.whole, "choices": choices, "usage": self.usage()}

    def token_line(self, index: int, token: int) -> bytes:
        """Return the line of the next token of a request."""
        first = self.counts[index] == 0
        self.counts[index] += 1
        handle = self.handles[index]
        reason = handle.finish_reason if self.counts[index] >= handle.limit else None
        piece = self.form.piece(self.form.text([token], first), first)
        usage = {"usage": self.usage()} if self.asked.running_usage else {}
        return event_line({**self._stream_head(), "choices": [self._choice(index, piece, reason)], **usage})

    def last_lines(self) -> bytes:
        """Return the end of a stream in which every answer is complete."""
        if not self.asked.final_usage:
            return DONE
        return event_line({**self._stream_head(), "choices": [], "usage": self.usage()}) + DONE

    def usage(self) -> dict[str, int]:
        """Return the token counts so far."""
        output = sum(self.counts)
        total = self.prompt_tokens + output
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": output, "total_tokens": total}

    def _stream_head(self) -> dict[str, Any]:
        return {**self.head, "object": self.form.part}

    @staticmethod
    def _choice(index: int, text: dict[str, Any], reason: Optional[str]) -> dict[str, Any]:
        return {"index": index, **text, "logprobs": None, "finish_reason": reason}


DONE = b"data: [DONE]\n\n"


def event_line(value: Any) -> bytes:
    """Return a server-sent event."""
    return f"data: {json.dumps(value)}\n\n".encode()


def error_line(end: End) -> bytes:
    """Return the last line of a stream whose request failed."""
    return event_line({"error": {"message": end.reason or end.outcome, "type": "server_error"}})
