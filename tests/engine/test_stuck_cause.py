"""A stuck engine says what the cause is: the real engine, a setting or the policy. A livelock is found at one call."""

from __future__ import annotations

from typing import Any

from servesim.config.scenario import scenario_from
from servesim.core import Plan, Policy, Request, View
from servesim.engine.build import build_server
from servesim.engine.rules import rules_of
from servesim.engine.stuck import describe_cause
from servesim.policies import POLICIES
from servesim.runs.simulate import simulate
from servesim.testing import ContractWorld, check_held_plans


class Idle(Policy):
    """A policy that never plans any work."""

    def decide(self, view: View) -> Plan:
        return Plan()


def stuck_message(prompt: int, policy: Any, **engine: Any) -> str:
    tree = {
        "workload": {"requests": 1, "arrivals": {"kind": "burst"}, "lengths": {"prompt": prompt, "output": 2}},
        "policy": policy, "profile": {"base": 0.1}, "engine": {"num_blocks": 5, **engine},
    }  # fmt: skip
    run = simulate(scenario_from(tree))
    assert run.stuck is not None
    return str(run.stuck)


def test_a_rule_of_the_real_engine() -> None:
    assert stuck_message(100, "vllm-v1") == (
        "stuck at t=0 s: no request runs and no request will arrive (requests 0): request 0 needs 7 blocks, the engine "
        "has 5; the real engine does this too (rules of vLLM V1 0.32.0)"
    )


def test_a_setting_that_keeps_requests_which_the_real_engine_rejects() -> None:
    rejecting = next(name for name in ("lightllm", "sglang") if rules_of(POLICIES[name]()).rejects_oversized)
    message = stuck_message(100, rejecting, reject_oversized="never")
    assert message.endswith("the real engine rejects such requests, engine.reject_oversized: never keeps them")


def test_the_policy_of_the_user() -> None:
    server = build_server(Idle(), {"num_blocks": 5, "block_size": 16})
    assert describe_cause(server, "returned no work") == "your policy Idle returned no work"


def test_a_livelock_is_found_at_the_same_call() -> None:
    """vLLM V1 preempts in an endless cycle: 11 tokens of memory for requests of 13 and 7 tokens."""
    lengths = [(8, 5), (5, 2), (1, 1), (1, 1), (1, 1)]
    requests = [Request(id, 0.0, prompt, output) for id, (prompt, output) in enumerate(lengths)]
    world = ContractWorld(requests, blocks=11, block_size=1, max_model_len=40, rejects=None)
    limits = {"max_num_batched_tokens": 96, "long_prefill_token_threshold": 4}
    policy = POLICIES["vllm-v1"](**limits, enable_chunked_prefill=False, scheduler_reserve_full_isl=False)
    check_held_plans(policy, world)
