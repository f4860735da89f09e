"""The engine behind `sim serve` has no end, so it must release everything that a run keeps for its result."""

from __future__ import annotations

import socket

import pytest
from servesim.calibrate.device.backend import MODELS
from servesim.calibrate.device.fake import FakeBackend
from servesim.calibrate.server import engine_process
from servesim.config.scenario import scenario_from

CALLS_KEPT, ROWS = 5, 4


def test_a_long_running_server_releases_calls_requests_and_token_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "CALLS_KEPT", CALLS_KEPT)
    policy = {"name": "llm-serving", "decode_batch": ROWS}
    scenario = scenario_from({"policy": policy, "engine": {"num_blocks": 200, "block_size": 4, "max_model_len": 64}})
    backend = FakeBackend({})
    backend.load(MODELS["micro"], 201, 4)
    client, connection = socket.socketpair()
    args = {"policy": scenario.policy, "engine": scenario.engine.model_dump(mode="json"), "pace": {"base": 1e-5}}
    with client, connection:
        engine = engine_process.EngineLoop(backend, args, connection)
        for id in range(40):
            engine._handle({"submit": [id, [1] * 3, 6, 0]})
        largest = [0, 0, 0]
        while engine.open:  # as EngineLoop.run, without its thread
            engine.loop.step()
            engine._send_results()
            if len(engine.calls) >= CALLS_KEPT:
                engine._trim_history()
            server = engine.loop.server
            sizes = (len(engine.calls), len(server.done), len(server.token_gaps.seconds))
            largest = [max(pair) for pair in zip(largest, sizes)]
    assert engine.loop.calls > 50
    assert largest[0] < CALLS_KEPT
    assert largest[1] <= CALLS_KEPT * ROWS
    assert 0 < largest[2] <= CALLS_KEPT * ROWS
    assert not engine.prompts and not engine.aborted
