"""A livelock is found after the same number of model calls with and without fast-forward."""

from __future__ import annotations

from servesim.core import Request
from servesim.policies import POLICIES
from servesim.testing import ContractWorld, check_fast_forward


def test_a_livelock_is_found_at_the_same_call() -> None:
    """vLLM V1 preempts in an endless cycle: 11 tokens of memory for requests of 13 and 7 tokens."""
    lengths = [(8, 5), (5, 2), (1, 1), (1, 1), (1, 1)]
    requests = [Request(id, 0.0, prompt, output) for id, (prompt, output) in enumerate(lengths)]
    world = ContractWorld(requests, blocks=11, block_size=1, max_model_len=40, rejects=None)
    limits = {"max_num_batched_tokens": 96, "long_prefill_token_threshold": 4}
    policy = POLICIES["vllm-v1"](**limits, enable_chunked_prefill=False, scheduler_reserve_full_isl=False)
    check_fast_forward(policy, world)
