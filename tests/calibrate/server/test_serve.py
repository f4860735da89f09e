"""`sim serve`: the interfaces of llm-serving and OpenAI, and isolation from faulty clients."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from servesim.calibrate.client.load_generator import send
from servesim.calibrate.client.protocols import LlmServing, OpenAI
from servesim.calibrate.device.backend import OutOfMemory
from servesim.calibrate.endpoint.steps import median_slope
from servesim.calibrate.server.service import Service
from servesim.core import Request

from ...events import PATIENCE_S, wait_until
from ...warm import sim
from ..client.test_load_generator import captured, outcomes
from ..endpoint.endpoints import late_sleeps
from .serving import ENDLESS, ask, gather_bursts, idle_state, post, raw, service, wait_for_state

RESET = struct.pack("ii", 1, 0)  # linger 0 s: close() sends a reset, as a killed process does


@pytest.fixture(scope="module")
def shared_service() -> Iterator[Service]:
    with service() as served:
        yield served


def shape(value: Any) -> Any:
    """Return the structure of a JSON value: its keys in order and its types."""
    if isinstance(value, dict):
        return [(key, shape(item)) for key, item in value.items()]
    if isinstance(value, list):
        return ["list", *({json.dumps(shape(item)): shape(item) for item in value}.values())]
    return type(value).__name__


RECORDED = {
    "generate_stream sse default full_text": ("/models/llama2/generate_stream", {"max_new_tokens": 3}),
    "generate_stream sse no full text": (
        "/models/llama2/generate_stream", {"max_new_tokens": 2, "return_full_text": False},
    ),
    "generate_stream raw": ("/models/llama2/generate_stream", {"max_new_tokens": 2, "return_protocol": "raw"}),
    "llama2 stream=false": ("/models/llama2", {"max_new_tokens": 2}),
    "internlm/generate": ("/models/internlm/generate", {"max_new_tokens": 1}),
    "unknown param ignored (topk_k)": ("/models/llama2/generate", {"max_new_tokens": 1, "topk_k": 3}),
    "out of range": ("/models/llama2/generate", {"max_new_tokens": 5000}),
    "out of range stream": ("/models/llama2/generate_stream", {"max_new_tokens": 5000}),
}  # fmt: skip


@pytest.mark.parametrize("case", RECORDED)
def test_responses_have_the_structure_of_recorded_ones(shared_service: Service, case: str) -> None:
    path, parameters = RECORDED[case]
    status, body = ask(shared_service, path, {"inputs": "hello there", "parameters": parameters})
    recorded = captured()[case]
    ours = [line for line in body.split(b"\n") if line.strip()]
    assert status == 200
    assert len(ours) == len(recorded)
    for mine, theirs in zip(ours, recorded):
        assert mine.startswith(b"data:") == theirs.startswith(b"data:")
        assert shape(json.loads(mine.removeprefix(b"data:"))) == shape(json.loads(theirs.removeprefix(b"data:")))


@pytest.mark.parametrize(
    ("case", "path", "body"),
    [
        ("missing inputs", "/models/llama2/generate", {"parameters": {}}),
        ("bad json", "/models/llama2/generate", b'{"inputs":'),
        ("wrong type", "/models/llama2/generate", {"inputs": "x", "parameters": {"max_new_tokens": "abc"}}),
        ("404", "/nowhere", None),
        ("405", "/models/llama2/generate", None),
        ("get_bs", "/serving/get_bs", None),
        ("get_request_numbers", "/serving/get_request_numbers", None),
        ("get_serverd_model_info", "/serving/get_serverd_model_info", None),
    ],
)
def test_errors_and_server_info_have_the_structure_of_recorded_ones(
    shared_service: Service, case: str, path: str, body: Any
) -> None:
    _, ours = ask(shared_service, path, body)
    theirs = captured()[case][0].removeprefix(b"data: ")
    assert shape(json.loads(ours.removeprefix(b"data: "))) == shape(json.loads(theirs))


def test_a_response_has_the_requested_tokens_and_ends_with_length(shared_service: Service) -> None:
    _, body = ask(shared_service, "/models/llama2/generate", {"inputs": "a b c", "parameters": {"max_new_tokens": "7"}})
    answer = json.loads(body)
    assert answer["generated_tokens"] == len(answer["tokens"]) == 7
    assert answer["finish_reason"] == "length"
    assert [token["special"] for token in answer["tokens"]] == [False] * 6 + [True]
    _, body = ask(shared_service, "/models/llama2/generate", {"inputs": "   "})
    assert json.loads(body)["finish_reason"] == "prompt_token_ids_empty"


@pytest.mark.parametrize("api", [LlmServing(), OpenAI("fake")], ids=["llm-serving", "openai"])
def test_500_streams_at_once_lose_nothing(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Request(id, 0.0, 5 + id % 20, 3 + id % 5) for id in range(500)]
    gather_bursts(monkeypatch, 500)
    with service() as served:
        load = send(f"http://127.0.0.1:{served.port}", api, requests, timeout=PATIENCE_S)
        state = idle_state(served)
    assert outcomes(load) == {"finished": 500}
    assert load.max_open == 500
    assert [sent.written for sent in load.sent_requests] == [3 + id % 5 for id in range(500)]
    assert state["free_blocks"] == state["total_blocks"] == 399


def test_requests_of_killed_clients_free_their_blocks_and_disturb_no_other_client() -> None:
    long = post({"inputs": "w " * 20, "parameters": {"max_new_tokens": 4000}})
    other = post({"prompt": "w " * 20, "max_tokens": 4000}, "/v1/completions")
    requests = [Request(id, 0.0, 9, 10) for id in range(30)]
    with service(cost={"base": 0.01}, engine=ENDLESS) as served, ThreadPoolExecutor() as pool:
        clients = [raw(served, long) for _ in range(40)]
        clients += [raw(served, other) for _ in range(20)]
        for client in clients[:40:2]:
            assert client.recv(100)
        others = pool.submit(send, f"http://127.0.0.1:{served.port}", LlmServing(), requests, PATIENCE_S)
        for client in clients:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            client.close()
        assert outcomes(others.result()) == {"finished": 30}
        state = idle_state(served)
    assert state["open"] == state["running"] == state["waiting"] == 0
    assert state["free_blocks"] == state["total_blocks"]


def test_half_sent_requests_block_only_their_own_connection(
    shared_service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = post({"inputs": "hello", "parameters": {"max_new_tokens": 3}})
    halves = [raw(shared_service, whole[: len(whole) * part // 10]) for part in range(1, 10) for _ in range(5)]
    load = send(f"http://127.0.0.1:{shared_service.port}", LlmServing(), [Request(1, 0.0, 5, 5)], timeout=PATIENCE_S)
    assert outcomes(load) == {"finished": 1}
    state = idle_state(shared_service)
    assert state["free_blocks"] == state["total_blocks"]
    monkeypatch.setattr("servesim.calibrate.server.http.CHECK_INTERVAL_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr("servesim.calibrate.server.http.HEAD_SECONDS", 0.1)
        silent = raw(shared_service, b"POST /models/llama2 HTTP/1.1\r\nHost: x\r\n")
        assert silent.recv(100) == b""  # closed as idle
    monkeypatch.setattr("servesim.calibrate.server.http.BODY_SECONDS", 0.1)
    late = raw(shared_service, whole[:-5])
    assert b" 408 " in late.recv(100)
    for client in [*halves, silent, late]:
        client.close()


def test_every_client_gets_an_error_when_the_engine_dies() -> None:
    def kill_when_busy() -> None:
        wait_for_state(served, lambda state: state["running"] == 10, "ten running requests")
        os.killpg(served.session.worker._process.pid, signal.SIGKILL)

    with service(cost={"base": 0.05}, engine=ENDLESS, process=True) as served:
        requests = [Request(id, 0.0, 5, 4000) for id in range(10)]
        threading.Thread(target=kill_when_busy).start()
        load = send(f"http://127.0.0.1:{served.port}", LlmServing(), requests, timeout=PATIENCE_S)
        assert set(outcomes(load)) <= {"failed", "broken"}
        assert sum(outcomes(load).values()) == 10
    assert "killed by SIGKILL" in str(served.failure)


def test_an_out_of_memory_step_fails_its_requests_only() -> None:
    with service(options={"limit": 40}) as served:
        for limit in (1, 5):
            body = {"inputs": "w " * 60, "parameters": {"max_new_tokens": limit}}
            answer = json.loads(ask(served, "/models/llama2/generate", body)[1])
            assert answer["finish_reason"] == "predict_failed"
        assert ask(served, "/v1/completions", {"prompt": "x", "max_tokens": 3})[0] == 200
        state = idle_state(served)
        assert state["free_blocks"] == state["total_blocks"]


def test_out_of_memory_outside_a_step_ends_the_server_as_other_failures_of_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_engine = Service._run_engine

    def fail(served: Service, path: str) -> dict[str, Any]:
        run_engine(served, path)
        raise OutOfMemory("no memory is left")

    monkeypatch.setattr(Service, "_run_engine", fail)
    with service() as served:
        assert ask(served, "/v1/completions", {"prompt": "x", "max_tokens": 3})[0] == 200
    assert str(served.failure) == "no memory is left"


@pytest.mark.live
def test_fake_backend_generates_tokens_at_the_speed_of_its_cost_model() -> None:
    with service(cost={"base": 0.02, "prefill_token": 0.002}, process=True) as served, late_sleeps(0.02) as delays:
        load = send(f"http://127.0.0.1:{served.port}", LlmServing(), [Request(0, 0.0, 20, 60)], timeout=PATIENCE_S)
    step = median_slope(np.array(load.sent_requests[0].times))  # some tokens come late, more on a busy machine
    assert 0.02 * 0.97 < step < 0.02 * (1.2 + 2 * float(np.quantile(delays, 0.9)))


def kill_when_busy(server: subprocess.Popen[str], port: int) -> None:
    """Kill a server as soon as it has ten open requests."""

    def is_busy() -> bool:
        with urlopen(f"http://127.0.0.1:{port}/serving/state", timeout=PATIENCE_S) as answer:
            return bool(json.load(answer)["open"] >= 10)

    wait_until(is_busy, "ten open requests")
    server.kill()


def test_client_of_a_killed_server_counts_all_requests_without_a_hang() -> None:
    command = [sim(), "serve", "--backend", "fake", "--port", "0", "--policy", "vllm"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with server.stdout:
        port = int(server.stdout.readline().rsplit(":", 1)[1])
        threading.Thread(target=kill_when_busy, args=(server, port), daemon=True).start()
        requests = [Request(id, 0.0, 20, 300) for id in range(20)]
        requests += [Request(id, id * 0.01, 20, 300) for id in range(20, 150)]
        load = send(f"http://127.0.0.1:{port}", OpenAI("fake"), requests, timeout=PATIENCE_S)
        server.wait(PATIENCE_S)
    assert sum(outcomes(load).values()) == 150
    assert outcomes(load).get("broken", 0) > 0
