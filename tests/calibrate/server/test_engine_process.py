"""The engine behind `sim serve`: every request gets all its tokens and its end, also when the history is trimmed."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest
from servesim.calibrate.device.backend import MODELS
from servesim.calibrate.device.fake import FakeBackend
from servesim.calibrate.server import engine_process
from servesim.config.scenario import scenario_from

POLICIES = [{"name": "llm-serving", "decode_batch": 4}, {"name": "vllm-v1", "max_num_seqs": 4}]


def serve(policy: dict[str, Any], lengths: list[tuple[int, int]]) -> tuple[dict[int, int], dict[int, str]]:
    """Serve prompts of these lengths and limits; return the token count and the outcome of each."""
    scenario = scenario_from({"policy": policy, "engine": {"num_blocks": 200, "block_size": 4, "max_model_len": 64}})
    backend = FakeBackend({})
    backend.load(MODELS["micro"], 201, 4)
    client, connection = socket.socketpair()
    args = {"policy": scenario.policy, "engine": scenario.engine.model_dump(mode="json"), "pace": {"base": 1e-4}}
    engine = threading.Thread(target=engine_process.EngineLoop(backend, args, connection).run, daemon=True)
    engine.start()
    tokens: dict[int, int] = dict.fromkeys(range(len(lengths)), 0)
    outcomes: dict[int, str] = {}
    client.settimeout(300)
    with client, client.makefile("r", encoding="utf-8") as lines:
        for id, (prompt, limit) in enumerate(lengths):
            client.sendall((json.dumps({"submit": [id, [1] * prompt, limit]}) + "\n").encode())
        while len(outcomes) < len(lengths):
            message = json.loads(lines.readline())
            for id, _ in message["tokens"]:
                tokens[id] += 1
            outcomes.update({id: outcome for id, outcome, *_ in message["finished"]})
        client.sendall(b'{"stop": true}\n')
        engine.join(300)
    return tokens, outcomes


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["name"])
@pytest.mark.parametrize("calls", [1, 2, 7])
def test_trimming_the_history_loses_no_end(monkeypatch: pytest.MonkeyPatch, policy: dict[str, Any], calls: int) -> None:
    monkeypatch.setattr(engine_process, "CALLS_KEPT", calls)
    lengths = [(3 + k % 5, 1 + k % 6) for k in range(12)]
    tokens, outcomes = serve(policy, lengths)
    assert outcomes == dict.fromkeys(range(12), "finished")
    assert tokens == {id: limit for id, (_, limit) in enumerate(lengths)}
