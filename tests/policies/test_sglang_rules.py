"""SGLang, hand-worked cases: rules that recordings show rarely or not at all."""

from __future__ import annotations

from functools import partial

import pytest
from servesim.core import Request
from servesim.costs.linear import LinearCost
from servesim.engine.inbox import Inbox
from servesim.engine.loop import Loop
from servesim.engine.server import Server
from servesim.engine.simulated import SimulatedClock
from servesim.policies import POLICIES
from servesim.policies.sglang.policy import SGLangState

from ..scenarios import serve

OVERLAP = partial(POLICIES["sglang"], disable_radix_cache=True)
SGLANG = partial(OVERLAP, disable_overlap_schedule=True)


def test_sglangs_fraction_of_future_tokens_decays_with_every_decode() -> None:
    policy = SGLANG()
    step = (0.7 - 0.7 * 0.14) / 600
    state = policy.held_state(SGLangState(0.7), 0.0)
    assert state.new_token_ratio == pytest.approx(0.7 - step, abs=1e-15)
    for _ in range(10_000):
        state = policy.held_state(state, 0.0)
    assert state.new_token_ratio == 0.7 * 0.14


@pytest.mark.parametrize(("conservativeness", "second"), [(1.0, [("a", 1)]), (0.1, [("b", 5)])])
def test_sglang_reserves_a_fraction_of_the_future_tokens(
    conservativeness: float, second: list[tuple[str, int]]
) -> None:
    requests = [Request("a", 0, 5, 20), Request("b", 0.5, 5, 8)]
    log = serve(SGLANG(schedule_conservativeness=conservativeness), requests, blocks=30)
    assert log.steps[1] == (1, second)  # 25 free - 0.7 * 19 future tokens = 11.7, b needs 13


def test_sglang_retracts_the_request_with_the_fewest_tokens_and_longest_prompt_to_the_back() -> None:
    policy = SGLANG(version="0.4.6", schedule_conservativeness=0.0, retract_decode_steps=1)
    requests = [Request("a", 0, 4, 6), Request("b", 0.5, 2, 6), Request("c", 1.5, 6, 3)]
    log = serve(policy, requests, blocks=16)
    assert log.steps[:5] == [
        (0, [("a", 4)]),
        (1, [("b", 2)]),
        (2, [("c", 6)]),
        (3, [("a", 1), ("b", 1), ("c", 1)]),
        (4, [("b", 1), ("a", 1)]),
    ]
    assert log.preempted == [(4, "c", "recompute")]


def test_sglang_chunks_one_prompt_and_mixes_in_decodes_only_if_set() -> None:
    def requests() -> list[Request]:
        return [Request("a", 0, 4, 4), Request("b", 0.5, 10, 2)]

    log = serve(SGLANG(chunked_prefill_size=6), requests())
    assert [batch for _, batch in log.steps[:4]] == [[("a", 4)], [("b", 6)], [("b", 4)], [("a", 1), ("b", 1)]]
    log = serve(SGLANG(chunked_prefill_size=6, enable_mixed_chunk=True), requests())
    assert [batch for _, batch in log.steps[:3]] == [[("a", 4)], [("b", 5), ("a", 1)], [("b", 5), ("a", 1)]]


def test_sglang_serves_the_longest_output_first_if_set() -> None:
    requests = [Request("a", 0, 4, 2), Request("b", 0, 4, 9), Request("c", 0, 4, 5)]
    assert serve(SGLANG(schedule_policy="lof", max_running_requests=1), requests).order() == ["b", "c", "a"]


@pytest.mark.parametrize(("version", "outputs"), [("0.4.6", [14, 22, 10]), ("0.5.18", [11, 19, 10])])
def test_the_engine_lowers_output_limits_at_arrival(version: str, outputs: list[int]) -> None:
    # 32 tokens in pages of 4. Prompt 16: 32 - 16 - 2 = 14 tokens, or 32 - 16 - 4 - 1 = 11 in 0.5.18.
    requests = [Request("a", 0, 16, 99), Request("b", 50, 8, 99), Request("c", 100, 9, 10, 99)]
    assert serve(SGLANG(version=version), requests, blocks=8, block_size=4).stuck is None
    assert [request.written for request in requests] == outputs


def test_a_prompt_that_leaves_too_little_room_is_rejected() -> None:
    requests = [Request("a", 0, 25, 1), Request("b", 0, 26, 1), Request("c", 0, 20, 1)]
    serve(SGLANG(), requests, blocks=64, max_model_len=32)
    assert [request.outcome for request in requests] == ["finished", "refused", "finished"]


@pytest.mark.parametrize(("version", "tokens", "rows"), [("0.4.6", 40, 20), ("0.5.18", 40, 20), ("0.4.6", 9000, 2049)])
def test_the_default_number_of_rows_follows_from_the_memory(version: str, tokens: int, rows: int) -> None:
    requests = [Request(i, 0, 1, 2) for i in range(rows + 5)]
    log = serve(SGLANG(version=version, schedule_conservativeness=0.0), requests, blocks=tokens, max_model_len=9000)
    assert max(len(batch) for _, batch in log.steps) <= rows
    if tokens == 9000:
        assert len(log.steps[0][1]) == rows


def test_decodes_run_between_two_prefills_if_set() -> None:
    requests = [Request("a", 0, 4, 9), Request("b", 0.5, 8, 2), Request("c", 1.5, 4, 2)]
    log = serve(SGLANG(chunked_prefill_size=4, prefill_decode_interval=2), requests)
    a = [("a", 1)]
    # After each prefill step, also of a chunk, two steps decode. They count even if nothing can decode.
    assert [batch for _, batch in log.steps[:10]] == [
        [("a", 4)], a, a, [("b", 4)], a, a, [("b", 4)], [("a", 1), ("b", 1)], a, [("c", 4)]
    ]  # fmt: skip
    log = serve(SGLANG(chunked_prefill_size=4, prefill_decode_interval=2), [Request("a", 0, 12, 2)])
    assert log.steps == [(0, [("a", 4)]), (1, [("a", 4)]), (2, [("a", 4)]), (3, [("a", 1)])]


def test_pages_of_0_4_6_can_run_out_and_the_engine_ends() -> None:
    # 0.4.6 tests the pages of the step after the next one. Request b needs a page one step after a, and one is free.
    def requests() -> list[Request]:
        return [Request("a", 0, 3, 9), Request("b", 0.5, 2, 9)]

    log = serve(SGLANG(version="0.4.6", schedule_conservativeness=0.0), requests(), blocks=5, block_size=4)
    assert "SGLang ends with an error: Decode out of memory" in str(log.stuck)
    log = serve(SGLANG(schedule_conservativeness=0.0), requests(), blocks=5, block_size=4)
    assert (log.stuck, len(log.preempted)) == (None, 1)


def test_with_overlap_two_steps_start_from_idle_and_an_end_is_seen_one_step_late() -> None:
    request = Request("a", 0, 2, 2)
    log = serve(OVERLAP(), [request], blocks=32)
    # Each step takes 1 s and is decided when the one before it starts. The third one is in vain.
    assert log.steps == [(0, [("a", 2)]), (0, [("a", 1)]), (1, [("a", 1)])]
    assert (request.first_token, request.finish, request.written, log.finish_time) == (1, 2, 2, 3)


@pytest.mark.parametrize("version", ["0.4.6", "0.5.18"])
def test_a_request_retracted_while_its_token_is_in_flight_computes_it_again(version: str) -> None:
    policy = OVERLAP(version=version, schedule_conservativeness=0.0, retract_decode_steps=1)
    requests = [Request("a", 0, 4, 9), Request("b", 0, 4, 9)]
    log = serve(policy, requests, blocks=22)
    (when, victim, _), *_ = log.preempted
    before = sum(dict(batch).get(victim, 0) > 0 for t, batch in log.steps if t < when)
    again = next(dict(batch)[victim] for t, batch in log.steps if t > when and victim in dict(batch))
    assert again == 4 + before - 1  # the prompt and the tokens, without the one in flight
    assert [request.written for request in requests] == [9, 9]


def test_a_request_that_was_retracted_after_a_failed_call_ends_with_it() -> None:
    """The call that fails is in flight when the other request of its batch is retracted."""
    requests = [Request("a", 0.02, 1, 11, 16, fails_at_token=11), Request("b", 0.01, 1, 18, 23)]
    cost = LinearCost(base=0.01, prefill_token=0.001, decode_row=0.002)
    server = Server(POLICIES["sglang"](schedule_conservativeness=0.1), 23, 1)
    Loop(server, Inbox(requests), SimulatedClock(cost)).run()
    assert [request.outcome for request in requests] == ["failed", "failed"]
    assert sum(request.preemptions for request in requests) == 1
    server.check()
