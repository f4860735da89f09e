"""Parallel sampling and beam search: shared blocks, copy on write, savings, and the defects of vLLM 0.6.1."""

from __future__ import annotations

import pickle
import random
from typing import Any, Optional

import pytest
from servesim.config.registry import make_policy, preset
from servesim.core import Policy, Request, Sampling
from servesim.costs.linear import LinearCost

from ..policies import test_engines_vllm  # noqa: F401  it maps engines to policies
from ..policies.recordings import load, play
from ..scenarios import RunLog, serve


def vllm(chunked: bool = False, **fields: Any) -> Policy:
    return make_policy({**preset(f"vllm-0.6.1{'-chunked' if chunked else ''}")["policy"], "watermark": 0.0, **fields})


def group(id: str, prompt: int, *outputs: int, arrival: float = 0.0) -> Request:
    return Request(id, arrival, prompt, max(outputs), sampling=Sampling(len(outputs), outputs=outputs))


def run(policy: Policy, *requests: Request, blocks: int = 100, host_blocks: int = 100) -> RunLog:
    return serve(policy, list(requests), blocks, block_size=4, host_blocks=host_blocks, cost=LinearCost(base=1.0))


def test_sequences_share_full_prompt_blocks_and_copy_the_last_one() -> None:
    """Prompt 6 = one full block and one of 2 tokens; 3 sequences. Copies: all but one, in the first decode step."""
    log = run(vllm(), group("a", 6, 4, 2, 4))
    assert log.steps == [(0, [("a", 6)]), (1, [("a", 3)]), (2, [("a", 2)]), (3, [("a", 2)])]
    use = log.server.kv_use
    # Blocks: 2; 1 + 3; without the sequence that ended 1 + 2; one new block each (token 9): 1 + 2 + 2.
    assert use.block_sum == 2 + 4 + 3 + 5
    assert use.shared_sum == 0 + (6 - 4) + (4 - 3) + (6 - 5)
    assert log.server.pool.free == 100 and use.tokens == 0
    assert log.requests["a"].generated == 3 + 3 + 2 + 2
    assert (log.requests["a"].written, log.server.tokens_generated) == (4, 10)


def test_a_prompt_of_full_blocks_needs_no_copy() -> None:
    """Each of the 2 sequences takes a new block for its second token."""
    log = run(vllm(), group("a", 8, 2, 2))
    assert log.server.kv_use.block_sum == 2 + 4
    assert log.server.kv_use.shared_sum == 2


def test_recorded_beams_are_replayed_and_others_are_drawn_for_each_request() -> None:
    beams = Request("a", 0.0, 6, 3, sampling=Sampling(1, 2, True, parents=[[0, 0], [1, 1], []]))
    log = run(vllm(), beams)
    # 2 beams share 2 blocks, then one copies; both continue the same beam, whose block the other copies again.
    assert log.server.kv_use.block_sum == 2 + 3 + 3
    first, second, other = (
        run(vllm(), Request(id, 0.0, 6, 30, sampling=Sampling(1, 4, True))).server.kv_use.block_sum for id in "aab"
    )
    assert first == second != other


def test_the_savings_of_the_recordings_are_those_of_the_real_block_manager() -> None:
    for name, savings in (("parallel_no_pressure", 0.464), ("beam_no_pressure", 0.486)):
        use = play(load(f"groups/{name}__v0.6.1")).server.kv_use
        assert use.shared_sum / (use.block_sum + use.shared_sum) == pytest.approx(savings, abs=0.0005)


def test_a_readmitted_request_whose_first_sequence_ended_loses_blocks_and_another_ends_the_engine() -> None:
    played = play(load("groups/parallel_readmission_dies__v0.6.1"))
    assert played.server.pool.lost > 0
    assert "AssertionError in Scheduler.schedule" in str(played.stuck) and "request r030" in str(played.stuck)


def test_a_group_needs_all_its_seats_before_its_first_token() -> None:
    log = run(vllm(max_num_seqs=3), group("a", 4, 6, 6), group("b", 4, 2, 2), Request("c", 0.0, 4, 2))
    assert log.order() == ["a", "b", "c"]
    assert log.requests["b"].scheduled == log.requests["a"].finish  # and c waits behind it
    stuck = run(vllm(max_num_seqs=3), group("a", 4, 2, 2, 2, 2)).stuck
    assert stuck is not None and "no request runs" in str(stuck)


def test_a_half_done_prompt_of_a_group_never_returns_from_the_host() -> None:
    """It is swapped, because it counts as a group; a swap-in is not divided, and its rest exceeds the budget."""
    policy = vllm(chunked=True, max_num_batched_tokens=8, max_num_seqs=8)
    log = run(policy, Request("a", 0.0, 4, 24), group("b", 28, 2, 2, arrival=0.5), blocks=9)
    assert log.preempted[0][1:] == ("b", "swap")
    assert log.stuck is not None and log.requests["b"].status == "swapped"
    assert log.server.pool.free == 9


def test_forced_recomputation_and_missing_host_blocks_end_the_engine() -> None:
    pressure = [group("a", 8, 20, 20), group("b", 8, 20, 20)]
    assert "cannot recompute the 2 sequences" in str(run(vllm(preemption_mode="recompute"), *pressure, blocks=10).stuck)
    pressure = [group("a", 8, 20, 20), group("b", 8, 20, 20)]
    assert "no CPU swap space" in str(run(vllm(), *pressure, blocks=10, host_blocks=1).stuck)


def test_a_failed_call_ends_all_sequences() -> None:
    failing = Request("a", 0.0, 6, 9, fails_at_token=3, sampling=Sampling(2))
    log = run(vllm(), failing)
    assert (failing.outcome, log.server.pool.free, log.server.kv_use.tokens) == ("failed", 100, 0)


def random_request(draw: random.Random, number: int) -> Request:
    sampling: Optional[Sampling] = None
    output, sequences = draw.randint(1, 30), draw.choice([1, 1, 2, 3, 4])
    if sequences > 1 and draw.random() < 0.5:
        sampling = Sampling(1, sequences, True)
    elif sequences > 1:
        outputs = [draw.randint(1, output) for _ in range(sequences - 1)]
        sampling = Sampling(1, sequences, outputs=(*outputs, output))
    return Request(f"r{number}", draw.randint(0, 40), draw.randint(1, 40), output, sampling=sampling)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_random_groups_under_pressure_keep_all_counts(seed: int, chunked: bool) -> None:
    """`serve` verifies tables, reference counts, free blocks and stored tokens after every step."""
    draw = random.Random(seed)
    requests = [random_request(draw, number) for number in range(25)]
    policy = vllm(chunked, max_num_seqs=12, **({"max_num_batched_tokens": 64} if chunked else {}))
    log = run(policy, *sorted(requests, key=lambda request: request.arrival), blocks=draw.randint(20, 45))
    pool = log.server.pool
    if log.stuck is None:
        assert pool.free + pool.lost == pool.total and pool.host_free + pool.host_lost == pool.host_total
        assert log.server.kv_use.tokens == 0
        assert log.server.tokens_generated == sum(request.generated for request in requests)
    assert log.preempted
    copy = pickle.loads(pickle.dumps(requests))
    assert [request.generated for request in copy] == [request.generated for request in requests]
