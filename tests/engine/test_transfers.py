"""Prefill and decode on different replicas: hand-worked times, blocks held on both sides, links, theory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import pytest
from servesim.config.scenario import scenario_from
from servesim.core import BadInput, Request
from servesim.core.content import Content
from servesim.costs.device_profile import load_profile
from servesim.engine.fleet import Fleet
from servesim.engine.kv_move import goes_apart
from servesim.runs.fleet import build_fleet
from servesim.runs.request_rows import seconds_in_states
from servesim.runs.run_requests import RunRequests

POLICIES: dict[str, dict[str, Any]] = {
    "vllm-v1": {"async_scheduling": False}, "sglang": {"disable_overlap_schedule": True},
    "mindie": {"max_queue_delay_microseconds": 1, "async_scheduling": False}, "vllm": {}, "vllm-ascend": {},
}  # fmt: skip
COPY = {"latency": 0.5, "token_bytes": 1, "bandwidth": 10**15}


@dataclass
class Outcome:
    """A fleet after its run, and the requests of its clients."""

    fleet: Fleet
    requests: list[Request]

    @property
    def ends(self) -> list[tuple[float, float]]:
        return [(rounded(request.first_token), rounded(request.finish)) for request in self.requests]

    @property
    def prefills(self) -> list[tuple[float, float]]:
        """When the copies on the first replica started, and when they ended."""
        return [(rounded(copy.scheduled), rounded(copy.finish)) for copy in self.fleet.loops[0].server.done or ()]


def rounded(time: Optional[float]) -> float:
    """Return a time without the seconds that 10**15 bytes per second take."""
    return -1.0 if time is None else round(time, 6)


def serve(
    requests: list[Request], policy: str = "vllm-v1", prefills: int = 1, decodes: int = 1, hold: bool = True,
    transfer: Any = COPY, profile: Any = None, prefill: Any = None, decode: Any = None, check: bool = True,
    settings: Any = None, **cluster: Any,
) -> Outcome:  # fmt: skip
    """Run a fleet, verify the counts of every server after every step, and that nothing is held at the end."""
    pools = [
        {"name": "p", "role": "prefill", "replicas": prefills, "engine": prefill or {}},
        {"name": "d", "role": "decode", "replicas": decodes, "engine": decode or {}},
    ]
    scenario = scenario_from({
        "policy": {"name": policy, **(POLICIES[policy] if settings is None else settings)},
        "profile": profile or {"base": 1.0}, "engine": {"block_size": 16},
        "cluster": {"pools": pools, "transfer": transfer, **cluster},
    })  # fmt: skip
    assert scenario.cluster is not None
    fleet, _ = build_fleet(scenario, scenario.cluster, requests, [], hold, load_profile(scenario.profile))
    for loop in fleet.loops:
        loop.notices.checks, loop.server.done = check, []
    fleet.run()
    assert fleet.transfers is not None
    assert not fleet.transfers.moves and not fleet.transfers.copies
    for loop in fleet.loops:
        server = loop.server
        assert not server.loading and not server.kept
        assert server.pool.held == sum(request._blocks for request in server.finished)
        server.check()
    return Outcome(fleet, requests)


@pytest.mark.parametrize(
    ("policy", "first", "finish"),
    # The prefill ends at 1, its KV is there at 1.5. vLLM computes the last prompt token again; the others do not.
    [("vllm-v1", 2.5, 4.5), ("sglang", 1.5, 3.5), ("vllm", 1.5, 3.5)],
)
def test_one_request_has_the_times_worked_by_hand(policy: str, first: float, finish: float) -> None:
    outcome = serve([Request(0, 0.0, 32, 3)], policy)
    assert outcome.ends == [(first, finish)]
    request, transfers = outcome.requests[0], outcome.fleet.transfers
    assert request.prefilling == (2 if policy == "vllm-v1" else 1)
    assert sum(seconds_in_states(RunRequests.of([request])))[0] == pytest.approx(finish)
    assert transfers is not None
    assert (transfers.count, transfers.seconds, transfers.bytes) == (1, pytest.approx(0.5), 32)


def test_mindie_pulls_after_the_prefill() -> None:
    outcome = serve([Request(0, 0.0, 32, 3)], "mindie")
    (start, end), (first, finish) = outcome.prefills[0], outcome.ends[0]
    assert end == start + 1 and end + 0.5 <= first <= end + 0.502 and first + 2 <= finish <= first + 2.002


def test_a_request_with_one_token_ends_when_its_kv_comes() -> None:
    assert serve([Request(0, 0.0, 32, 1)], "sglang").ends == [(1.5, 1.5)]
    assert serve([Request(0, 0.0, 32, 1)], "vllm-v1").ends == [(2.5, 2.5)]


def test_prefill_blocks_stay_until_the_copy_is_done() -> None:
    """Two prompts fill the prefill replica; the third one starts when the first copies have ended, at 6."""
    requests = [Request(i, 0.5 * (i == 2), 32, 2) for i in range(3)]
    outcome = serve(requests, prefill={"num_blocks": 5}, transfer={**COPY, "latency": 5})
    assert outcome.prefills == [(0.0, 1.0), (0.0, 1.0), (6.0, 7.0)]
    transfers = outcome.fleet.transfers
    assert transfers is not None and transfers.held_block_s == pytest.approx(3 * 2 * 5.0)


@pytest.mark.parametrize(("policy", "second"), [("vllm-v1", (1.0, 2.0)), ("sglang", (5.5, 6.5))])
def test_a_full_decode_replica_stops_prefills_only_with_sglang(policy: str, second: tuple[float, float]) -> None:
    """The decode replica has room for one request. With SGLang, the second prefill waits until the first one ends."""
    blocks = {"vllm-v1": 3, "sglang": 35}[policy]
    requests = [Request(0, 0.0, 32, 5), Request(1, 0.2, 32, 5)]
    outcome = serve(requests, policy, decode={"num_blocks": blocks})
    assert outcome.prefills[1] == second
    assert outcome.ends[1][0] == {"vllm-v1": 8.0, "sglang": 7.0}[policy]


def test_a_full_prefill_replica_of_sglang_goes_on_when_a_copy_has_ended() -> None:
    """Two prompts fill it. Its batch is full, and no request decodes, after which SGLang would try others."""
    requests, slow = [Request(i, 0.0, 48, 2) for i in range(4)], {**COPY, "latency": 5}
    outcome = serve(requests, "sglang", prefill={"num_blocks": 10}, decode={"num_blocks": 1000}, transfer=slow)
    assert outcome.prefills == [(0.0, 1.0), (0.0, 1.0), (6.0, 7.0), (6.0, 7.0)]


def test_requests_behind_a_blocked_one_wait_too() -> None:
    """Request 1 does not fit until request 0 ends at 5.5, so request 2, which would fit, waits behind it."""
    requests = [Request(0, 0.0, 48, 4), Request(1, 0.0, 48, 2), Request(2, 0.0, 16, 2)]
    outcome = serve(requests, decode={"num_blocks": 5})
    firsts = [first for first, _ in outcome.ends]
    assert firsts[0] == 2.5 and min(firsts[1:]) == 7.0


@pytest.mark.parametrize(
    ("link", "decodes", "arrivals"),
    [("none", 1, [3, 3]), ("shared", 1, [3, 5]), ("shared", 2, [3, 5]), ("per_pair", 2, [3, 3])],
)
def test_copies_wait_for_a_link(link: str, decodes: int, arrivals: list[int]) -> None:
    """Both prefills end at 1, and each copy takes 2 s; the first token follows a step later."""
    outcome = serve(
        [Request(0, 0.0, 32, 1), Request(1, 0.0, 32, 1)], decodes=decodes,
        transfer={"latency": 0, "token_bytes": 1, "bandwidth": 16, "link": link},
    )  # fmt: skip
    transfers = outcome.fleet.transfers
    assert [request.first_token for request in outcome.requests] == [time + 1 for time in arrivals]
    assert transfers is not None and transfers.link_wait_s == (2 if arrivals[1] == 5 else 0)


def test_layers_are_copied_during_the_prefill() -> None:
    """1.6 s of bytes: 1 s of them during the prefill, the rest after it, in addition to the latency."""
    profile = {"model": "llama3.1-8b", "device": "h100"}
    plain = {"latency": 0.0, "token_bytes": 1000, "bandwidth": 1000}
    late = serve([Request(0, 0.0, 100, 2)], transfer=plain, profile=profile, settings={})
    early = serve([Request(0, 0.0, 100, 2)], transfer={**plain, "layerwise": True}, profile=profile, settings={})
    prefill, transfers = late.prefills[0][1], early.fleet.transfers
    assert transfers is not None
    assert transfers.seconds == pytest.approx(100 - prefill, rel=1e-6)


# Bytes of a body, matched blocks of 16 tokens, minimum of uncached tokens: whether llm-d prefills elsewhere.
TABLE = [
    (4000, 0, 0, False), (4000, 0, 16, True), (63, 0, 16, False), (64, 0, 16, True), (64, 1, 16, False),
    (4000, 61, 16, True), (4000, 62, 16, False), (4064, 62, 16, True), (4000, 30, 512, True), (4000, 31, 512, False),
]  # fmt: skip


@pytest.mark.parametrize(("size", "blocks", "minimum", "apart"), TABLE)
def test_the_decision_follows_the_table_of_llm_d(size: int, blocks: int, minimum: int, apart: bool) -> None:
    assert goes_apart(size // 4, 16 * blocks, minimum) is apart


def test_short_prompts_are_computed_by_the_decode_replica() -> None:
    requests = [Request(0, 0.0, 99, 2), Request(1, 10.0, 100, 2)]
    outcome = serve(requests, transfer={**COPY, "min_uncached_tokens": 100})
    assert outcome.ends == [(1.0, 2.0), (12.5, 13.5)]
    assert len(outcome.prefills) == 1


@pytest.mark.parametrize("recompute", [False, True])
def test_kv_that_nobody_fetches_is_dropped(recompute: bool) -> None:
    """Request 1 is ready at 2, and there is room for it at 21.5: too late."""
    requests = [Request(0, 0.0, 33, 20), Request(1, 0.2, 32, 2)]
    transfer = {**COPY, "timeout": 8, "on_timeout": "recompute" if recompute else "fail"}
    outcome = serve(requests, decode={"num_blocks": 4}, transfer=transfer)
    late = outcome.requests[1]
    if recompute:
        assert (late.outcome, rounded(late.first_token)) == ("finished", 22.5)
    else:
        assert (late.outcome, rounded(late.finish)) == ("failed", 10.5)
        assert late.reason == "the KV of the prefill was dropped after 8 s"


def test_a_refused_prefill_ends_the_request() -> None:
    for policy in ("vllm-v1", "sglang"):
        outcome = serve([Request(0, 0.0, 99, 2), Request(1, 0.0, 20, 2)], policy, prefill={"max_model_len": 50})
        assert [request.outcome for request in outcome.requests] == ["refused", "finished"]


def random_requests(seed: int, count: int = 60) -> list[Request]:
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(1.5, count))
    requests = []
    for number, time in enumerate(times):
        follows = number - 1 if number % 7 == 6 else None
        prompt, output = int(random.integers(1, 120)), int(random.integers(1, 40))
        requests.append(Request(number, float(time), prompt, output, follows=follows, think_time=0.25))
    return requests


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_random_runs_are_exact_and_lose_nothing(policy: str, seed: int) -> None:
    """Every request ends, its seconds add up, and the times are those of a run without held plans."""
    transfer = [COPY, {**COPY, "bandwidth": 64, "link": "shared"}, {**COPY, "min_uncached_tokens": 40}][seed]
    engine = {"num_blocks": [40, 120, 20][seed] * (1 if policy != "sglang" else 16)}
    settings = {} if seed == 1 else None  # the defaults: some engines decide a step while the last one runs
    results = []
    for hold in (True, False):
        outcome = serve(
            random_requests(seed), policy, 1 + seed % 2, 2, hold, transfer, decode=engine, settings=settings,
            profile={"base": 0.25, "decode_row": 0.03125, "prefill_token": 2**-9}, decode_router="least-requests",
        )  # fmt: skip
        for request in outcome.requests:
            assert request.outcome == "finished" and request.written == request.stop_at, request
            assert request.finish is not None
            assert sum(seconds_in_states(RunRequests.of([request])))[0] == pytest.approx(request.finish - request.sent)
        kv = [(loop.server.kv_use.block_sum, loop.server.kv_use.token_sum) for loop in outcome.fleet.loops]
        times = [(request.first_token, request.finish) for request in outcome.requests]
        results.append((times, kv, outcome.fleet.calls))
    assert results[0] == results[1]


def test_a_pool_has_its_own_degree_of_tensor_parallelism() -> None:
    """The KV of a token is that of all devices; with more devices than KV heads, some have a copy of the same head."""
    model = {"model": "llama3.1-70b", "device": "h100"}
    results = []
    for degrees in ((4, 4), (16, 4), (4, 8)):
        profiles = [{**model, "tensor_parallel": degree} for degree in degrees]
        pools = [{"name": role, "role": role, "profile": p} for role, p in zip(("prefill", "decode"), profiles)]
        scenario = scenario_from({"profile": profiles[0], "cluster": {"pools": pools}})
        assert scenario.cluster is not None
        request = Request(0, 0.0, 100, 9)
        fleet, _ = build_fleet(scenario, scenario.cluster, [request], [], True, load_profile(scenario.profile))
        fleet.run()
        assert fleet.transfers is not None
        results.append((fleet.transfers.bytes, request.decoding))
    assert [size for size, _ in results] == [100 * 327_680, 200 * 327_680, 100 * 327_680]
    assert results[2][1] < results[0][1]


def test_prefix_hits_are_not_copied() -> None:
    """The decode replica has the first two blocks of the second prompt."""

    def request(number: int, time: float) -> Request:
        return Request(number, time, 48, 2, content=Content(("shared", number), (40, 48)))

    outcome = serve([request(0, 0.0), request(1, 10.0)])
    transfers = outcome.fleet.transfers
    assert transfers is not None and transfers.bytes == 48 + 16


@pytest.mark.parametrize("load", [0.5])
def test_waits_of_two_stages_add_up(load: float) -> None:
    """A Poisson stream through an M/M/1 queue leaves as one: both waits are load / (1 - load), a copy adds its mean."""
    count, batches, random = 4000, 20, np.random.default_rng(7)
    times = np.cumsum(random.exponential(1 / load, count))
    prompts = np.maximum(1, np.rint(random.exponential(1e6, count))).astype(int)  # a token of a prompt takes 1 us
    outputs = 1 + np.rint(random.exponential(100, count)).astype(int)  # a decode takes 10 ms; the first token comes
    requests = [Request(i, float(t), int(p), int(o)) for i, (t, p, o) in enumerate(zip(times, prompts, outputs))]
    policy = {"max_num_seqs": 1, "max_num_batched_tokens": 10**8}
    outcome = serve(
        requests, "vllm", profile={"prefill_token": 1e-6, "decode_step": 0.01}, settings=policy, check=False,
        transfer={**COPY, "latency": 3.0}, prefill={"num_blocks": 10**8}, decode={"num_blocks": 10**8},
    )  # fmt: skip
    waits = np.array([request.queued for request in outcome.requests]).reshape(batches, -1).mean(axis=1)
    half_width = 2.861 * waits.std(ddof=1) / math.sqrt(batches)  # t of 19 degrees of freedom, 99 %
    assert abs(waits.mean() - 2 * load / (1 - load)) < half_width < 2


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BadInput, match="pools of role prefill and of role decode"):
        scenario_from({"cluster": {"pools": [{"name": "p", "role": "prefill"}]}})
    with pytest.raises(BadInput, match=r"cluster.transfer.token_bytes: expected bytes, the profile names no model"):
        serve([Request(0, 0.0, 9, 1)], transfer={})
    with pytest.raises(BadInput, match=r"cluster.transfer.choose: expected decode_first"):
        serve([Request(0, 0.0, 9, 1)], "sglang", transfer={**COPY, "choose": "prefill_first"})
