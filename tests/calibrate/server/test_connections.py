"""`sim serve` and unusual clients: gone ones, malformed requests, keys, and ports in use."""

from __future__ import annotations

import gzip
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from servesim.calibrate.client.load_generator import send
from servesim.calibrate.client.protocols import OpenAI
from servesim.calibrate.client.server_counters import served_model
from servesim.calibrate.server import http
from servesim.calibrate.server.http import is_local
from servesim.calibrate.server.service import Service
from servesim.cli import main
from servesim.core import BadInput, Request
from servesim.web import bound

from ...events import PATIENCE_S, wait_until
from .serving import ENDLESS, ask, idle_state, post, raw, service, wait_for_state

OPENAI, LLM_SERVING = "/v1/completions", "/models/llama2/generate"


@pytest.fixture(scope="module")
def shared_service() -> Iterator[Service]:
    with service() as served:
        yield served


def read_all(client: socket.socket) -> bytes:
    with client:
        return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.mark.parametrize("path", [OPENAI, LLM_SERVING])
@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "x", "inputs": "x", "max_tokens": %s}' % (b"9" * 5000),
        b'{"prompt": [%s], "inputs": "x"}' % (b"9" * 5000),
        b'{"prompt": "\\ud800 a", "inputs": "\\ud800 a"}',
        b'{"prompt": "\xed\xa0\x80 a", "inputs": "\xed\xa0\x80 a"}',
        b'{"\\udfff": 1, "prompt": "a", "inputs": "a"}',
        b"[" * 100_000,
    ],
    ids=["long integer", "long token", "surrogate", "surrogate in UTF-8", "surrogate in a key", "deep"],
)
def test_bodies_that_are_no_text_or_number_are_a_400(shared_service: Service, path: str, body: bytes) -> None:
    status, answer = ask(shared_service, path, body)
    assert status == 400
    assert json.loads(answer)["error"]["message"]


def test_escaped_text_outside_ascii_is_accepted(shared_service: Service) -> None:
    body = '{"prompt": "\\ud83d\\ude00 \N{GRINNING FACE} ä", "max_tokens": 2}'.encode()
    status, answer = ask(shared_service, OPENAI, body)
    assert status == 200
    assert json.loads(answer)["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stream_options": [1]}, "stream_options: expected an object, got [1]"),
        ({"stream_options": True}, "stream_options: expected an object, got True"),
        ({"stream_options": {"include_usage": "no"}}, "stream_options.include_usage: expected true or false, got 'no'"),
        ({"stream": "false"}, "stream: expected true or false, got 'false'"),
        ({"n": 10**4000}, "n: expected an integer from 1 to 1000, got 1000"),
    ],
)
def test_wrong_fields_are_rejected_before_the_stream_starts(
    shared_service: Service, fields: dict[str, Any], message: str
) -> None:
    served = json.loads(ask(shared_service, "/serving/state")[1])["served"]
    status, answer = ask(shared_service, OPENAI, {"prompt": "x", "max_tokens": 2, "stream": True, **fields})
    assert status == 400
    assert json.loads(answer)["error"]["message"].startswith(message)
    assert len(answer) < 1000
    assert idle_state(shared_service)["served"] == served  # the engine got no request


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\nhello\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello",
    ],
    ids=["version", "two lengths", "long header", "chunks", "gzip"],
)
def test_malformed_http_is_a_400_and_one_line_in_the_log(
    shared_service: Service, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert b" 400 " in read_all(raw(shared_service, data)).partition(b"\r\n")[0]
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.exc_info is None
    assert record.getMessage().startswith("malformed request: ")
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 300


def test_compressed_bodies_are_read(shared_service: Service) -> None:
    body = gzip.compress(json.dumps({"prompt": "a b", "max_tokens": 1}).encode())
    assert ask(shared_service, OPENAI, body, {"Content-Encoding": "gzip"})[0] == 200


class IdleClock:
    """The clock by which the server finds idle connections. It goes on only if a test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.read = 0  # times

    def monotonic(self) -> float:
        self.read += 1
        return self.now

    def pass_time(self, seconds: float) -> None:
        """Go on, and wait until the server has looked for idle connections before and after it."""
        for step in (0.0, seconds):
            self.now += step
            after = self.read + 2  # one check may have begun before
            wait_until(lambda after=after: self.read >= after, "a check for idle connections")


@pytest.fixture
def idle_clock(monkeypatch: pytest.MonkeyPatch) -> IdleClock:
    clock = IdleClock()
    monkeypatch.setattr(http, "time", SimpleNamespace(monotonic=clock.monotonic, time=time.time))
    monkeypatch.setattr(http, "CHECK_INTERVAL_S", 0.01)
    return clock


def test_a_connection_in_use_stays_open(idle_clock: IdleClock) -> None:
    with service() as served:
        client = HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)
        client.connect()
        client.auto_open = 0  # a closed connection is an error, not a new connection
        for _ in range(3):
            client.request("POST", OPENAI, json.dumps({"prompt": "x", "max_tokens": 1}))
            with client.getresponse() as answer:
                assert answer.status == 200
                answer.read()
            idle_clock.pass_time(0.6 * http.HEAD_SECONDS)
        idle_clock.pass_time(0.6 * http.HEAD_SECONDS)
        assert client.sock.recv(1) == b""  # closed when it is idle
        client.close()


def test_a_long_response_is_not_idle(idle_clock: IdleClock) -> None:
    with service(engine=ENDLESS) as served, raw(served, post({"prompt": "x", "max_tokens": 50_000}, OPENAI)) as client:
        wait_for_state(served, lambda state: state["running"] == 1, "a running request")
        idle_clock.pass_time(3 * http.HEAD_SECONDS)
        client.setblocking(False)
        with pytest.raises(BlockingIOError):  # a closed connection would return nothing
            client.recv(1)


@pytest.mark.slow  # the next test finds the same fault faster
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_a_suspended_worker_does_not_keep_the_server_from_stopping() -> None:
    command = [sys.executable, "-m", "servesim", "serve", "--backend", "fake", "--port", "0", "--policy", "vllm"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    server.stdout.readline()  # it serves
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    workers = [int(pid) for pid in children if "worker.py" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(workers) == 1
    os.kill(workers[0], signal.SIGSTOP)
    server.send_signal(signal.SIGTERM)
    _, errors = server.communicate(timeout=PATIENCE_S)
    assert server.returncode == 1
    assert errors == "sim: fake worker: did not stop within 10 s; it was killed\n"
    assert not Path(f"/proc/{workers[0]}").exists()


def test_an_open_request_of_a_suspended_worker_does_not_keep_the_server_from_stopping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("servesim.calibrate.server.service.DRAIN_TIMEOUT_S", 0.5)
    monkeypatch.setattr("servesim.calibrate.server.service.STOP_TIMEOUT_S", 0.5)
    with service(process=True) as served:
        os.kill(served.session.worker._process.pid, signal.SIGSTOP)
        client = raw(served, post({"prompt": "x", "max_tokens": 5}, OPENAI))
        wait_for_state(served, lambda state: state["open"] == 1, "an open request")
    assert "did not stop within 0.5 s" in str(served.failure)
    assert read_all(client) == b""


def test_waiting_requests_of_clients_that_closed_are_aborted() -> None:
    with service(policy={"name": "llm-serving", "decode_batch": 1}, cost={"base": 0.05}, engine=ENDLESS) as served:
        first = raw(served, post({"inputs": "w", "parameters": {"max_new_tokens": 4000}}))
        assert first.recv(1)
        stream = post({"inputs": "w", "parameters": {"max_new_tokens": 150}})
        whole = post({"prompt": "w", "max_tokens": 150}, OPENAI)
        waiting = [raw(served, data) for data in (stream, whole)]
        wait_for_state(served, lambda state: state["waiting"] == 2, "two waiting requests")
        for client in waiting:
            client.close()  # nothing is unread: the host sends no reset, only the end of the input
        assert wait_for_state(served, lambda state: state["open"] == 1, "one open request")["running"] == 1
        first.close()
        state = idle_state(served)
        assert state["free_blocks"] == state["total_blocks"]


def test_a_key_is_needed_everywhere_but_for_the_health_check() -> None:
    with service(api_key="s3cret") as served:
        body = {"prompt": "x", "max_tokens": 1}
        for header in ("", "Bearer", "Bearer s3cre", "Bearer s3cretx", "Basic s3cret", "s3cret", "Bearer \xff"):
            headers = {"Authorization": header} if header else {}
            status, answer = ask(served, OPENAI, body, headers)
            assert status == 401
            assert json.loads(answer)["error"]["code"] == "invalid_api_key"
            assert b"s3cret" not in answer
        assert ask(served, "/serving/state")[0] == ask(served, "/nowhere")[0] == 401
        assert ask(served, "/health")[0] == 200
        for header in ("Bearer s3cret", "bearer s3cret"):
            assert ask(served, OPENAI, body, {"Authorization": header})[0] == 200


@pytest.mark.parametrize(("key", "outcome"), [("s3cret", "finished"), ("other", "refused")])
def test_the_load_generator_sends_the_key_of_the_environment(
    key: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVESIM_API_KEY", key)
    with service(api_key="s3cret") as served:
        url = f"http://127.0.0.1:{served.port}"
        load = send(url, OpenAI("fake"), [Request(0, 0.0, 3, 2)], timeout=PATIENCE_S)
        assert load.sent_requests[0].outcome == outcome
        if key == "s3cret":
            assert served_model(url, None)[0] == "fake"
        else:
            with pytest.raises(BadInput, match="cannot list the models"):
                served_model(url, None)


SERVE = ["serve", "--backend", "fake", "--policy", "vllm"]


def test_the_key_can_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SERVESIM_API_KEY", "two words")
    assert main(SERVE) == 2
    assert capsys.readouterr().err.startswith("sim: SERVESIM_API_KEY: expected printable")


def test_local_addresses() -> None:
    assert [is_local(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost")] == [True] * 4
    assert [is_local(host) for host in ("0.0.0.0", "::", "", "10.0.0.1", "example.org")] == [False] * 5


def test_a_host_name_listens_on_all_its_addresses_with_one_port() -> None:
    with bound("localhost", 0) as sockets:
        assert len({each.getsockname()[1] for each in sockets}) == 1
        addresses = {each.getsockname()[0] for each in sockets}
        assert addresses <= {"127.0.0.1", "::1"}
