"""An HTTP server that keeps the prompts it receives, with the APIs of llm-serving and OpenAI, and vLLM's counters."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Optional

LLM_SERVING_TOKEN = {"event": "message", "data": [{"generated_text": " a", "tokens": {"id": 7, "text": " a"}}]}
LLM_SERVING_END = {"data": [{"generated_text": " a", "finish_reason": "length", "generated_tokens": 1}]}


class RecordingServer(ThreadingHTTPServer):
    """Answers every request with one token and keeps the prompts."""

    def __init__(
        self,
        added_tokens: Optional[int] = 0,
        text_only: bool = False,
        models: Optional[list[dict[str, Any]]] = None,
        refused: Optional[str] = None,
        token_ids: Optional[list[int]] = None,
    ) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.refused = refused  # option that it does not know
        self.models = models  # of /v1/models; None: it has no such page
        self.token_ids = token_ids  # of an answer, if the client asks for them
        self.text_only = text_only  # refuse token ids
        self.added_tokens = added_tokens  # to the reported prompt length; None: not reported
        self.prompts: list[Any] = []
        self.delay = 0.0  # seconds until the answer
        self.metrics = ""  # text at /metrics
        self.version = ""  # at /version

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, body: dict[str, Any]) -> str:
        if "inputs" in body:
            self.prompts.append(body["inputs"].split())
            return f"{json.dumps(LLM_SERVING_TOKEN)}\n{json.dumps(LLM_SERVING_END)}\n"
        prompt = body["prompt"]
        if self.text_only and not isinstance(prompt, str):
            return ""
        self.prompts.append(prompt.split() if isinstance(prompt, str) else prompt)
        usage: dict[str, int] = {"completion_tokens": 1}
        if self.added_tokens is not None:
            usage["prompt_tokens"] = len(self.prompts[-1]) + self.added_tokens
        token: dict[str, Any] = {"choices": [{"text": " a"}]}
        if body.get("return_token_ids") and self.token_ids is not None:
            token["choices"][0]["token_ids"] = self.token_ids
        end = {"choices": [], "usage": usage}
        return f"data: {json.dumps(token)}\n\ndata: {json.dumps(end)}\n\ndata: [DONE]\n\n"


class Handler(BaseHTTPRequestHandler):
    server: RecordingServer

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.send(self.server.metrics, 404)
        elif self.path == "/version":
            self.send(self.server.version and json.dumps({"version": self.server.version}), 404)
        else:
            models = self.server.models
            self.send("" if models is None else json.dumps({"object": "list", "data": models}), 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(self.server.delay)
        refused = self.server.refused
        if refused is not None and refused in json.dumps(body):
            self.send(f"extra fields not permitted: {refused}", 400, 400)
        else:
            self.send(self.server.answer(body), 400)

    def send(self, answer: str, status_if_empty: int, status: int = 200) -> None:
        text = answer.encode()
        self.send_response(status if text else status_if_empty)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def recording_server(
    added_tokens: Optional[int] = 0, kind: type[RecordingServer] = RecordingServer, **options: Any
) -> Iterator[RecordingServer]:
    """Run the server in a thread."""
    with kind(added_tokens, **options) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
