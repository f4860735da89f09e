"""Pipeline parallelism: a batch in each stage. The decisions are compared with those of vLLM itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from servesim.config.export import export_scenario
from servesim.config.scenario import scenario_from
from servesim.core import BadInput, Request, Shape
from servesim.costs.device_profile import load_profile
from servesim.costs.linear import LinearCost
from servesim.policies.vllm_v1 import VLLMV1
from servesim.runs.decision_log import InMemoryLog
from servesim.runs.simulate import simulate

from ..scenarios import RunLog, serve

RECORDED = json.loads((Path(__file__).parent.parent / "policies" / "vllm_stages.json").read_text())
LLAMA = {"model": "llama-3.1-70b", "device": "H100", "tensor_parallel": 2}


def serve_equal(requests: int, stages: int, overlaps: bool, cost: LinearCost, tokens: int = 5) -> RunLog:
    """Serve equal requests that are there at time 0; a step has room for one prompt."""
    policy = VLLMV1(max_num_batched_tokens=16, pipeline_parallel_size=stages, async_scheduling=overlaps)
    return serve(policy, [Request(number, 0.0, 16, tokens) for number in range(requests)], cost=cost)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_request_alone_gains_nothing(stages: int, overlaps: bool) -> None:
    (request,) = serve_equal(1, stages, overlaps, LinearCost(base=1.0)).requests.values()
    assert (request.first_token, request.finish) == (pytest.approx(1), pytest.approx(5))
    assert (request.prefilling, request.decoding) == (pytest.approx(1), pytest.approx(4))


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_with_a_batch_in_each_stage_the_throughput_is_that_of_one_batch_times_the_stages(
    stages: int, overlaps: bool
) -> None:
    log = serve_equal(stages, stages, overlaps, LinearCost(base=1.0), tokens=40)
    for number, request in log.requests.items():  # request n starts when n stages have let the others through
        assert request.first_token == pytest.approx(1 + number / stages)
        assert request.finish == pytest.approx(40 + number / stages)
    alone = serve_equal(1, 1, False, LinearCost(base=1.0), tokens=40)
    ratio = (stages * 40 / log.finish_time) / (40 / alone.finish_time)
    assert ratio == pytest.approx(stages * 40 / (40 + (stages - 1) / stages))


def test_a_decision_without_work_keeps_its_place() -> None:
    """A request that comes while the only batch runs waits for it, although a stage is free, as in vLLM."""
    policy = VLLMV1(pipeline_parallel_size=2, async_scheduling=False)
    requests = [Request("a", 0.0, 4, 3), Request("b", 0.25, 4, 2)]
    log = serve(policy, requests, cost=LinearCost(base=1.0))
    assert log.steps == [(0.0, [("a", 4)]), (1.0, [("a", 1), ("b", 4)]), (2.0, [("a", 1), ("b", 1)])]


def test_a_slow_batch_holds_up_the_one_behind_it() -> None:
    """Stages take 2 s for the prompt of a, and 1 s for that of b: b enters stage 1 at 2, and stage 2 at 4."""
    policy = VLLMV1(max_num_batched_tokens=4, pipeline_parallel_size=2, async_scheduling=False)
    requests = [Request("a", 0.0, 4, 1), Request("b", 0.0, 2, 1)]
    log = serve(policy, requests, cost=LinearCost(prefill_token=1.0))
    assert [request.finish for request in log.requests.values()] == [4.0, 5.0]
    assert [request.queued for request in log.requests.values()] == [0.0, 2.0]


@pytest.mark.parametrize("run", RECORDED["runs"], ids=["sync", "async", "priority"])
def test_the_decisions_are_those_of_vllm(run: dict[str, Any]) -> None:
    """`sim policies prove` ran vLLM's own EngineCore with its batch queue, and a pretended model."""
    log = InMemoryLog()
    simulate(scenario_from(run["scenario"]), observers=[log])
    rows = [[row.get(key) for key in RECORDED["fields"]] for row in log.rows]
    assert json.loads(json.dumps(rows)) == run["decisions"]


def test_stages_share_memory_and_time() -> None:
    plain, piped = (
        scenario_from({"policy": {"name": "vllm-v1"}, "profile": {**LLAMA, **more}})
        for more in ({}, {"pipeline_parallel": 2})
    )
    assert piped.policy["pipeline_parallel_size"] == 2
    # 80 layers: a device has half of them and one of the two embeddings, so KV blocks of half the size
    hidden, vocab, weights = 8192, 128256, 70.55e9 * 2
    stage = (weights - 4 * hidden * vocab) / 2 + 2 * hidden * vocab
    block = 2 * 80 * 8 * 128 * 2 * 16 / 2
    for scenario, size, bytes_ in ((plain, weights / 2, block), (piped, stage / 2, block / 2)):
        budget = 0.9 * 85.5e9 - size - 1.61e9
        assert scenario.engine.num_blocks == pytest.approx(budget / bytes_, rel=0.02)
    one, two, three = (load_profile({**LLAMA, "pipeline_parallel": stages}) for stages in (1, 2, 3))
    alone = [profile.cost.seconds(Shape(decode_rows=1, decode_live=1)) for profile in (one, two, three)]
    assert alone[1] - alone[0] == pytest.approx(0.3e-3 + 5e-6 + 2 * 2 * 8192 / 2 / (0.7 * 450e9), abs=2e-6)
    slowest = (alone[0] - 0.3e-3) * 81 / 80 + 3 * 0.3e-3  # the slowest of three stages has 27 of 80 layers
    assert alone[2] == pytest.approx(slowest, rel=1e-3)
    command = export_scenario(piped, "vllm").text
    assert "--pipeline-parallel-size 2" in command and "--tensor-parallel-size 2" in command


@pytest.mark.parametrize(
    ("tree", "error"),
    [
        ({"profile": {**LLAMA, "pipeline_parallel": 3}}, "expected 3, as profile.pipeline_parallel, got 2"),
        ({"profile": {"base": 1}, "engine": {"device_memory": "80GB"}}, "engine.device_memory: expected profile"),
        ({"engine": {"data_parallel_size": 2}}, "expected 1 with engine.data_parallel_size, got 2"),
        ({"engine": {"kv_cache_groups": [64, None]}}, r"expected 1 with engine.kv_cache_groups \[64, None\], got 2"),
        ({"policy": {"version": "0.27.0"}}, "its rules are known for 0.32.0 only"),
        ({"speculative": {"tokens": 2, "acceptance": 0.5}}, "expected 1 with speculative decoding, got 2"),
        (
            {"cluster": {"pools": [{"name": role, "role": role} for role in ("prefill", "decode")]}},
            "expected 1 with pools of role prefill",
        ),
    ],
)
def test_what_is_not_modelled_is_one_line(tree: dict[str, Any], error: str) -> None:
    policy = {"name": "vllm-v1", "pipeline_parallel_size": 2, **tree.get("policy", {})}
    with pytest.raises(BadInput, match=error):
        scenario_from({"workload": {"contest": {"X": 2, "T": 5}}, **tree, "policy": policy})
