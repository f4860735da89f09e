"""`sim replay --url --check-tokens`: answers under load against the same requests sent one at a time."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Callable

import pytest

pytest.importorskip("aiohttp")
from servesim.calibrate.client.protocols import Event, LlmServing, OpenAI
from servesim.calibrate.replay.http_client import first_difference
from servesim.calibrate.replay.token_check import Difference

from ...commands.running import Said, run_sim
from ...events import PATIENCE_S
from ..server.serving import service

WORDS = ("red", "green", "blue", "grey")
Answer = Callable[[Any, bool], list[str]]  # (prompt, whether other requests were open) -> words


class AnswerServer(ThreadingHTTPServer):
    """OpenAI completions: the words come from a function of the prompt, and of whether other requests were open.

    The first requests for long answers, a burst, are open together: each is answered when all have arrived.
    """

    request_queue_size = 64

    def __init__(self, answer: Answer, burst: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.numbers = iter(range(burst))
        self.burst = threading.Barrier(burst)
        self.open: list[dict[str, bool]] = []
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: AnswerServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state = {"loaded": False}
        with self.server.lock:
            self.server.open.append(state)
            for other in self.server.open:
                other["loaded"] |= len(self.server.open) > 1
            is_of_burst = body["max_tokens"] > 8 and next(self.server.numbers, None) is not None
        if is_of_burst:
            self.server.burst.wait(PATIENCE_S)
        with self.server.lock:
            self.server.open = [other for other in self.server.open if other is not state]
        words = self.server.answer(body["prompt"], state["loaded"])[: body["max_tokens"]]
        lines = [{"choices": [{"text": " " + word}]} for word in words]
        text = "".join(f"data: {json.dumps(line)}\n\n" for line in lines) + "data: [DONE]\n\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def answering(answer: Answer, burst: int) -> Iterator[str]:
    """Run the server in a thread; yield its address."""
    with AnswerServer(answer, burst) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def greedy(prompt: Any, loaded: bool) -> list[str]:
    return [WORDS[(sum(prompt) + index) % 4] for index in range(10)]


def check(
    capsys: pytest.CaptureFixture[str], folder: Path, url: str, *options: str, api: str = "openai", requests: int = 12
) -> Said:
    """Replay a burst with a token check."""
    trace = folder / "trace.jsonl"
    rows = [{"arrival_s": 0.0, "output_tokens": 10, "prompt_tokens": 20 + 3 * k} for k in range(requests)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["replay", "--trace", str(trace), "--url", url, "--api", api, "--served-model", "m", "--live-only"]
    return run_sim(capsys, *command, "--quiet", "-o", str(folder / "out"), "--check-tokens", *options)


@pytest.mark.parametrize(("api", "unit"), [("openai", "character"), ("llm-serving", "token")])
def test_answers_of_sim_serve_are_equal(
    api: str, unit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with service(names=("m",)) as served:
        said = check(capsys, tmp_path, f"http://127.0.0.1:{served.port}", "8", api=api)
    assert said.code == 0, said.out + said.error
    assert "token check: 8 of 8 answers equal those of the same requests alone (80 tokens)" in said.out
    result = json.loads((tmp_path / "out" / "live" / "result.json").read_text())["token_check"]
    assert result["unit"] == unit  # llm-serving sends token ids


def test_an_answer_that_changes_under_load_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def under_load(prompt: Any, loaded: bool) -> list[str]:
        words = greedy(prompt, loaded)
        return [*words[:5], "yellow", *words[6:]] if loaded and len(prompt) == 20 else words

    with answering(under_load, 5) as url:
        said = check(capsys, tmp_path, url, "all", requests=5)
        assert said.code == 3, said.out + said.error
        assert "token check: 4 of 5 answers equal" in said.out
        assert "first difference at character" in said.out
        assert "'yellow" in said.out
    with answering(under_load, 5) as url:
        again = tmp_path / "again"
        again.mkdir()
        assert check(capsys, again, url, "all", "--tolerance-tokens", "1", requests=5).code == 0


def test_events_hold_the_text_and_the_token_ids() -> None:
    token = {"generated_text": " a", "tokens": {"id": 7, "text": " a"}}
    api, other = LlmServing(), OpenAI("m")
    message = json.dumps({"event": "message", "data": [token]}).encode()
    assert api.event(message) == Event(tokens=1, text=" a", token_ids=[7])
    assert api.event(b"data:" + json.dumps({"generated_text": " b"}).encode()) == Event(tokens=1, text=" b")
    assert api.event(json.dumps({"data": [{**token, "finish_reason": "length"}]}).encode()) == Event(complete=True)
    assert api.event(b": ping") == Event(ping=True)
    both = b'data: {"choices": [{"text": " c", "token_ids": [4, 5]}]}'
    assert other.event(both) == Event(tokens=1, text=" c", token_ids=[4, 5])
    assert other.event(b'data: {"choices": [{"text": " c"}]}') == Event(tokens=1, text=" c")
    assert other.event(b'data: {"choices": [], "usage": {}}') == Event()
    assert other.event(b"data: [DONE]") == Event(complete=True)


def test_the_first_difference_of_two_answers() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == Difference(1, 2, 5)
    assert first_difference("ab", "abc") == Difference(2, None, "c")
