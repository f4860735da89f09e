"""The fields of OpenAI's requests that have an effect. A wrong value is a 400 with one clear message.

Other fields are ignored: temperature, stop, tools and so on do not change the times of a server. A request that
forces a tool call is refused, because its client could not read an answer that is text. A priority is refused if the
policy does not use it, as vLLM documents the field; `best_of` above `n` too: the further answers would take time.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any, Optional

from servesim.web import Refused

from .tokenizers import Tokenizer

UNSUPPORTED = ("echo", "logprobs", "prompt_logprobs", "top_logprobs", "use_beam_search")  # null, false and 0 are fine
MAX_PRIORITY = (1 << 63) - 1  # as in vLLM
MAX_PROMPT_TOKENS = 1 << 20  # of all prompts of a request, times n


@dataclass(frozen=True)
class Generation:
    """What a request asks, besides its prompts."""

    max_tokens: Optional[int]  # None: the model decides when the answer ends
    min_tokens: int
    ignore_eos: bool
    n: int  # answers per prompt
    streamed: bool
    final_usage: bool  # token counts at the end of a stream
    running_usage: bool  # token counts in every line of a stream
    priority: int = 0  # lower is served first

    def answer(self, room: int, usual: int) -> tuple[int, str]:
        """Return the tokens of an answer and why it ends there.

        `room` is the context that the prompt leaves. Without a limit, an answer has `usual` tokens.
        """
        if self.max_tokens is not None:
            return max(1, min(self.max_tokens, room)), "length"
        wanted = room if self.ignore_eos else max(usual, self.min_tokens)
        return max(1, min(wanted, room)), "stop" if wanted < room else "length"


def read_generation(
    body: dict[str, Any], limits: tuple[str, ...], default: Optional[int], max_n: int, has_priorities: bool
) -> Generation:
    """Read the fields that both interfaces have. `limits` are the names of the output limit, the first one wins."""
    for name in UNSUPPORTED:
        if body.get(name):
            raise fault(400, f"{name}: not supported, expected null or false, got {reprlib.repr(body[name])}", name)
    if body.get("tool_choice") not in (None, "none", "auto"):
        got = reprlib.repr(body["tool_choice"])
        raise fault(400, f"tool_choice: not supported, expected none or auto, got {got}", "tool_choice")
    name = next((name for name in limits if body.get(name) is not None), limits[0])
    limit = integer(body, name, 1)
    if not any(name in body for name in limits):
        limit = default
    least = integer(body, "min_tokens", 0) or 0
    if limit is not None and least > limit:
        raise fault(400, f"min_tokens: expected at most {name} ({limit}), got {reprlib.repr(least)}", "min_tokens")
    options = body.get("stream_options")
    if not isinstance(options, (dict, type(None))):
        raise fault(400, f"stream_options: expected an object, got {reprlib.repr(options)}", "stream_options")
    running = flag(options or {}, "continuous_usage_stats", "stream_options.")
    n, priority = integer(body, "n", 1, max_n) or 1, integer(body, "priority", -MAX_PRIORITY, MAX_PRIORITY) or 0
    if (integer(body, "best_of", 1) or n) != n:
        raise fault(400, f"best_of: not supported, expected n ({n}) or null, got {body['best_of']}", "best_of")
    if priority and not has_priorities:
        got = f"expected 0: the policy of this server does not use priorities, got {priority}"
        raise fault(400, f"priority: {got}", "priority")
    return Generation(
        max_tokens=limit,
        min_tokens=least,
        ignore_eos=flag(body, "ignore_eos"),
        n=n,
        streamed=flag(body, "stream"),
        final_usage=flag(options or {}, "include_usage", "stream_options."),
        running_usage=running,
        priority=priority,
    )


def integer(body: dict[str, Any], name: str, least: int, most: Optional[int] = None) -> Optional[int]:
    """Return an integer of the body, or None for null."""
    value = body.get(name)
    if value is None:
        return None
    valid = isinstance(value, int) and not isinstance(value, bool) and least <= value
    if valid and (most is None or value <= most):
        return int(value)
    expected = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
    raise fault(400, f"{name}: expected {expected}, got {reprlib.repr(value)}", name)


def flag(body: dict[str, Any], name: str, prefix: str = "") -> bool:
    """Return a flag of the body; null is false."""
    value = body.get(name)
    if not isinstance(value, (bool, type(None))):
        raise fault(400, f"{prefix}{name}: expected true or false, got {reprlib.repr(value)}", prefix + name)
    return bool(value)


def read_prompts(value: Any, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the prompts of a completion as token ids: one text or list of ids, or a list of these."""
    several = isinstance(value, list) and bool(value) and isinstance(value[0], (str, list))
    expected = "a text or a list of token ids, not empty, or a list of these"
    prompts = (tokenizer.encode(each) if isinstance(each, str) else each for each in (value if several else [value]))
    return [check_ids(ids, tokenizer.size, "prompt", expected) for ids in prompts]


def check_ids(value: Any, vocab: int, name: str, expected: str = "a list of token ids, not empty") -> list[int]:
    """Return a list of token ids after checking it."""
    all_ints = isinstance(value, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in value)
    if not all_ints or not value:
        raise fault(400, f"{name}: expected {expected}", name)
    if not all(0 <= token < vocab for token in value):
        raise fault(400, f"{name}: expected token ids below {vocab}", name)
    return list(value)


def read_messages(value: Any, tokenizer: Tokenizer) -> list[int]:
    """Return the texts of all messages of a chat as token ids. Roles add no tokens."""
    if not isinstance(value, list) or not value:
        raise fault(400, "messages: expected a list of messages, not empty", "messages")
    texts = [message_text(f"messages[{index}]", each) for index, each in enumerate(value)]
    tokens = tokenizer.encode(" ".join(texts))
    if not tokens:
        raise fault(400, "messages: expected a text that is not empty", "messages")
    return tokens


def message_text(name: str, message: Any) -> str:
    """Return the text of a message: a text, a list of text parts, or null (a message with tool calls)."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise fault(400, f"{name}: expected an object with role and content", "messages")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise fault(400, f"{name}.content: expected a text or a list of text parts", "messages")
    return " ".join(map(str, texts))


def fault(status: int, message: str, field: Optional[str] = None, code: Any = None) -> Refused:
    """Return an error in OpenAI's form; `field` is the wrong field of the body."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return Refused(status, {"error": {"message": message, "type": kind, "param": field, "code": code or status}})
