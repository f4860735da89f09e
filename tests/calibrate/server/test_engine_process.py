"""The engine behind `sim serve`: every request gets all its tokens and its end, also when the history is trimmed."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any, Optional

import pytest
from servesim.calibrate.device.backend import MODELS
from servesim.calibrate.device.fake import FakeBackend
from servesim.calibrate.server import engine_process
from servesim.config.scenario import scenario_from

from ...events import PATIENCE_S

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
    client.settimeout(PATIENCE_S)
    with client, client.makefile("r", encoding="utf-8") as lines:
        for id, (prompt, limit) in enumerate(lengths):
            client.sendall((json.dumps({"submit": [id, [1] * prompt, limit, 0]}) + "\n").encode())
        while len(outcomes) < len(lengths):
            message = json.loads(lines.readline())
            for id, _ in message["tokens"]:
                tokens[id] += 1
            outcomes.update({id: outcome for id, outcome, *_ in message["finished"]})
        client.sendall(b'{"stop": true}\n')
        engine.join(PATIENCE_S)
    return tokens, outcomes


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["name"])
@pytest.mark.parametrize("calls", [1, 2, 7])
def test_trimming_the_history_loses_no_end(monkeypatch: pytest.MonkeyPatch, policy: dict[str, Any], calls: int) -> None:
    monkeypatch.setattr(engine_process, "CALLS_KEPT", calls)
    lengths = [(3 + k % 5, 1 + k % 6) for k in range(12)]
    tokens, outcomes = serve(policy, lengths)
    assert outcomes == dict.fromkeys(range(12), "finished")
    assert tokens == {id: limit for id, (_, limit) in enumerate(lengths)}


class Conversation:
    """A client of an engine with vllm-v1 that sends one prompt after the other."""

    def __init__(self, cache: bool = True, limit: Optional[int] = None, budget: int = 2048) -> None:
        policy = {"name": "vllm-v1", "max_num_batched_tokens": budget, "max_num_seqs": 4}
        policy["enable_prefix_caching"] = cache
        scenario = scenario_from({"policy": policy, "engine": {"num_blocks": 60, "block_size": 4}})
        backend = FakeBackend({}, limit=limit)
        backend.load(MODELS["micro"], 61, 4)
        self.client, connection = socket.socketpair()
        self.client.settimeout(PATIENCE_S)
        args = {"policy": scenario.policy, "engine": scenario.engine.model_dump(mode="json"), "pace": {"base": 1e-4}}
        self.engine = engine_process.EngineLoop(backend, args, connection)
        self.thread = threading.Thread(target=self.engine.run, daemon=True)
        self.lines = self.client.makefile("r", encoding="utf-8")
        self.id = 0

    def __enter__(self) -> Conversation:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.client.sendall(b'{"stop": true}\n')
        self.thread.join(PATIENCE_S)
        self.lines.close()
        self.client.close()

    def ask(self, *prompts: list[int]) -> list[list[int]]:
        """Send prompts at once; return the answers, which are empty if the request failed."""
        answers: dict[int, list[int]] = {}
        text = ""
        for prompt in prompts:
            self.id += 1
            answers[self.id] = []
            text += json.dumps({"submit": [self.id, prompt, 10, 0]}) + "\n"
        self.client.sendall(text.encode())
        left = set(answers)
        while left:
            message = json.loads(self.lines.readline())
            self.state = message["state"]
            for id, token in message["tokens"]:
                answers[id].append(token)
            left -= {id for id, *_ in message["finished"]}
        return list(answers.values())


def test_prompts_and_generated_answers_are_found_in_the_prefix_cache() -> None:
    turns: list[list[list[int]]] = []
    for cache in (True, False):
        with Conversation(cache) as conversation:
            prompt, said = list(range(1, 15)), []
            for _ in range(3):
                (answer,) = conversation.ask(prompt)
                said.append(answer)
                prompt = [*prompt, *answer, 7, 8, 9]
            said += conversation.ask(prompt[:30], prompt[:30], prompt)
            turns.append(said)
            stored = [(14 + 10 - 1) // 4 * 4, (27 + 10 - 1) // 4 * 4, 28, 28, (40 + 10 - 1) // 4 * 4]
            assert conversation.state["prefix_cache_hits"] == (sum(stored) if cache else 0)
            assert conversation.state["free_blocks"] == 60
            conversation.engine.loop.server.check()
    assert turns[0] == turns[1]


def test_blocks_of_a_failed_call_are_not_cached() -> None:
    first, second = list(range(1, 40)), list(range(40, 80))
    with Conversation() as alone:
        expected = alone.ask(first)
    with Conversation(limit=60) as conversation:
        assert conversation.ask(first, second) == [[], []]  # 79 tokens in one step: out of memory
        assert conversation.ask(first) == expected
        assert conversation.state["prefix_cache_hits"] == 0
        assert conversation.ask(first) == expected
        assert conversation.state["prefix_cache_hits"] == 36
        conversation.engine.loop.server.check()


def test_a_failed_call_also_ends_the_request_whose_prompt_continues() -> None:
    with Conversation(limit=60, budget=64) as conversation:
        # The second prompt has 25 tokens in the first step, and would continue with blocks that were never written.
        assert conversation.ask(list(range(1, 40)), list(range(40, 80))) == [[], []]


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
            engine.do_next()
            server = engine.loop.server
            sizes = (len(engine.calls), len(server.done), len(server.token_gaps.seconds))
            largest = [max(pair) for pair in zip(largest, sizes)]
    assert engine.loop.calls > 50
    assert largest[0] < CALLS_KEPT
    assert largest[1] <= CALLS_KEPT * ROWS
    assert 0 < largest[2] <= CALLS_KEPT * ROWS
    assert not engine.prompts and not engine.aborted
