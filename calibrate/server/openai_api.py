"""OpenAI's paths as clients of vLLM use them: completions, chat, models, and the token counts of a text."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, Optional

from aiohttp import web
from servesim.web import Refused

from .engine_client import End, Job, RequestGroup, RequestHandle
from .http import EVENT_STREAM, HttpFrontEnd
from .openai_fields import MAX_PROMPT_TOKENS, Generation, check_ids, fault, read_generation, read_messages, read_prompts
from .tokenizers import decode

COMPLETION_LIMIT = 16  # OpenAI's default of max_tokens
DONE = b"data: [DONE]\n\n"


class Form:
    """How an interface names and nests the text of an answer; of /v1/completions: the text continues the prompt."""

    id_prefix = "cmpl"
    whole = "text_completion"  # type of a complete answer
    line = "text_completion"  # type of a line of a stream

    def text(self, tokens: Sequence[int], first: bool) -> str:
        """Return the text of tokens; `first` says whether the answer begins with them."""
        return decode(tokens)

    def choice(self, text: str) -> dict[str, Any]:
        """Return the text of a complete answer."""
        return {"text": text}

    def piece(self, text: str, first: bool) -> dict[str, Any]:
        """Return the text of one token in a stream."""
        return {"text": text}


class ChatForm(Form):
    """The answers of /v1/chat/completions: a message of the assistant."""

    id_prefix = "chatcmpl"
    whole = "chat.completion"
    line = "chat.completion.chunk"

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

    def error_lines(self, end: End) -> bytes:
        """Return the end of a stream after a request that failed."""
        return event_line({"error": {"message": end.reason or end.outcome, "type": "server_error"}})

    def usage(self) -> dict[str, int]:
        """Return the token counts so far."""
        output = sum(self.counts)
        total = self.prompt_tokens + output
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": output, "total_tokens": total}

    def _stream_head(self) -> dict[str, Any]:
        return {**self.head, "object": self.form.line}

    @staticmethod
    def _choice(index: int, text: dict[str, Any], reason: Optional[str]) -> dict[str, Any]:
        return {"index": index, **text, "logprobs": None, "finish_reason": reason}


class OpenAIApi:
    """The handlers of /v1."""

    def __init__(self, front_end: HttpFrontEnd) -> None:
        self.front_end = front_end
        self.started = int(time.time())

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/completions", self.completions),
            web.post("/v1/chat/completions", self.chat),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{model:.+}", self.model),
            web.post("/tokenize", self.tokenize),
            web.post("/detokenize", self.detokenize),
        ]

    async def models(self, request: web.Request) -> web.Response:
        """List the names of the model."""
        cards = [self._card(name) for name in self.front_end.names]
        return web.json_response({"object": "list", "data": cards})

    async def model(self, request: web.Request) -> web.Response:
        """Describe the model under one of its names."""
        name = request.match_info["model"]
        self._check_model({"model": name})
        return web.json_response(self._card(name))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Complete one prompt or several."""
        body = await self._body(request)
        asked = self._generation(body, ("max_tokens",), COMPLETION_LIMIT)
        tokenizer = self.front_end.tokenizer
        prompts = await self.front_end.encoded(lambda: read_prompts(body.get("prompt"), tokenizer))
        return await self._answer(request, prompts, asked, Form())

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer the messages of a chat."""
        body = await self._body(request)
        asked = self._generation(body, ("max_completion_tokens", "max_tokens"), None)
        tokenizer = self.front_end.tokenizer
        prompt = await self.front_end.encoded(lambda: read_messages(body.get("messages"), tokenizer))
        return await self._answer(request, [prompt], asked, ChatForm())

    async def tokenize(self, request: web.Request) -> web.Response:
        """Return the token ids of a text or of messages."""
        body, tokenizer = await self._body(request), self.front_end.tokenizer
        prompt = body.get("prompt")
        if "messages" not in body and not isinstance(prompt, str):
            raise fault(400, "prompt: expected a text", "prompt")

        def read() -> list[int]:
            return read_messages(body["messages"], tokenizer) if "messages" in body else tokenizer.encode(str(prompt))

        tokens = await self.front_end.encoded(read)
        context = self.front_end.context
        return web.json_response({"count": len(tokens), "max_model_len": context, "tokens": tokens})

    async def detokenize(self, request: web.Request) -> web.Response:
        """Return the text of token ids."""
        tokenizer = self.front_end.tokenizer
        tokens = check_ids((await self._body(request)).get("tokens"), tokenizer.size, "tokens")
        return web.json_response({"prompt": tokenizer.decode(tokens)})

    async def _body(self, request: web.Request) -> dict[str, Any]:
        body = await self.front_end.json_body(request, lambda text, offset: fault(400, f"not JSON at {offset}: {text}"))
        self._check_model(body)
        return body

    def _generation(self, body: dict[str, Any], limits: tuple[str, ...], default: Optional[int]) -> Generation:
        return read_generation(body, limits, default, self.front_end.engine.max_open, self.front_end.has_priorities)

    def _check_model(self, body: dict[str, Any]) -> None:
        """Reject another model. A request without one means the only model there is."""
        model = body.get("model")
        if not isinstance(model, (str, type(None))):
            raise fault(400, "model: expected a name", "model")
        if model is not None and model not in self.front_end.names:
            known = ", ".join(self.front_end.names)
            message = f"The model `{model[:200]}` does not exist; this server has {known}"
            raise fault(404, message, "model", "model_not_found")

    def _card(self, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self.started, "owned_by": "servesim"}
        return {**card, "root": self.front_end.model, "parent": None, "max_model_len": self.front_end.context}

    async def _answer(
        self, request: web.Request, prompts: Sequence[Sequence[int]], asked: Generation, form: Form
    ) -> web.StreamResponse:
        """Submit n requests per prompt, and send their answers as one response."""
        if asked.n * sum(map(len, prompts)) > MAX_PROMPT_TOKENS:
            raise fault(400, f"n: expected at most {MAX_PROMPT_TOKENS} prompt tokens in total, times n", "n")
        front_end = self.front_end
        jobs = [self._job(prompt, asked) for prompt in prompts for _ in range(asked.n)]
        async with front_end.requests(jobs) as group:
            answers = Answers(form, front_end.names[0], group.handles, asked)
            if asked.streamed:
                return await self._stream(request, group, answers)
            results = await group.collect()
        for _, end in results:
            if end.outcome != "finished":
                raise failure(end)
        return web.json_response(answers.complete([tokens for tokens, _ in results]))

    def _job(self, prompt: Sequence[int], asked: Generation) -> Job:
        """Return a prompt with the length of its answer and why the answer ends there."""
        front_end = self.front_end
        if len(prompt) > front_end.context:
            raise fault(400, f"prompt: expected at most {front_end.context} tokens (the context), got {len(prompt)}")
        most = front_end.max_length
        if asked.max_tokens is None:  # what the server chooses must fit into its memory
            most = min(most, front_end.capacity)
        return Job(prompt, *asked.answer(most - len(prompt), front_end.usual_output), asked.priority)

    async def _stream(self, request: web.Request, group: RequestGroup, answers: Answers) -> web.StreamResponse:
        events = await group.next() or []  # a rejection is known now, and can still be an HTTP status
        for _, event in events:
            if isinstance(event, End) and event.outcome != "finished":
                raise failure(event)
        return await self.front_end.stream(request, EVENT_STREAM, group, answers, events)


def failure(end: End) -> Refused:
    """Return the error for a request that the engine rejected or that failed."""
    return fault(400 if end.outcome == "refused" else 500, end.reason or end.outcome)


def event_line(value: Any) -> bytes:
    """Return a server-sent event."""
    return f"data: {json.dumps(value)}\n\n".encode()
