"""Use of the KV cache against a count of all requests in every step, with and without held plans."""

from __future__ import annotations

import pytest
from servesim.config.scenario import scenario_from
from servesim.core import Request
from servesim.engine.server import Server
from servesim.engine.step import Step
from servesim.policies import POLICIES
from servesim.runs.simulate import simulate
from servesim.testing import ContractWorld, Outcome, draw_requests, simulated


class CountsAll:
    """Counts the blocks and the tokens of all requests in every step."""

    def __init__(self) -> None:
        self.block_sum = self.token_sum = self.peak_blocks = 0

    def on_step_start(self, server: Server, step: Step, arrived: list[Request]) -> None:
        holders = [*server.running, *(r for r in (*server.swapped, *server.finished) if r._blocks), *step.paused]
        blocks = server.pool.total - server.pool.free - server.pool.evictable  # those that requests hold
        cached = {request: request.cached for request in holders}  # a paused request is also in the running queue
        tokens = sum(cached.values()) + step.decode_rows + sum(chunk.tokens for chunk in step.chunks)
        if step.runs_model:
            self.block_sum += blocks
            self.token_sum += tokens
            self.peak_blocks = max(self.peak_blocks, blocks)

    def on_step_end(self, server: Server, step: Step, now: float, finished: list[Request]) -> None:
        pass


def sums(outcome: Outcome) -> tuple[int, int, int]:
    use = outcome.server.kv_use
    return use.block_sum, use.token_sum, use.peak_blocks


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", POLICIES)
def test_the_sums_are_those_of_all_requests_in_every_step(name: str, seed: int) -> None:
    world = ContractWorld(draw_requests(seed, 40), blocks=40)
    count = CountsAll()
    observed = simulated(POLICIES[name](), world, observer=count)
    assert sums(observed) == (count.block_sum, count.token_sum, count.peak_blocks)
    assert sums(observed) == sums(simulated(POLICIES[name](), world))
    if observed.stuck is None:
        held = sum(request._cached for request in observed.server.finished)
        assert observed.server.kv_use.tokens == held


def test_one_request_by_hand() -> None:
    """Prompt 5, output 3, blocks of 4 tokens, 1 s per step: blocks 2, 2, 2 and tokens 5, 6, 7 in three steps."""
    tree = {
        "workload": {"requests": 1, "arrivals": {"kind": "burst"}, "lengths": {"prompt": 5, "output": 3}},
        "policy": {"name": "vllm-v1"},
        "engine": {"num_blocks": 11, "block_size": 4},
        "profile": {"base": 1.0},
    }
    run = simulate(scenario_from(tree))
    total = run.server.pool.total
    result = run.result()
    assert result["mean_kv_usage"] == pytest.approx(2 / total)
    assert result["peak_kv_usage"] == pytest.approx(2 / total)
    assert result["peak_kv_blocks"] == 2
    assert result["mean_kv_tokens"] == pytest.approx(6)
    assert result["kv_fragmentation"] == pytest.approx(1 - 6 / 8)


def test_an_engine_without_blocks_has_no_use() -> None:
    tree = {"workload": {"contest": {"X": 5, "T": 4}}, "policy": {"name": "static"}}
    run = simulate(scenario_from(tree))
    assert ("mean_kv_usage" in run.result()) == run.server.policy.uses_block_pool
