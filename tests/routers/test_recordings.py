"""Choices of real routers, one by one. Where the real choice is random, ours must allow it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from servesim.routers import Asked, Fleet, Replica, Router
from servesim.routers.ascend_proxy import AscendDecode, AscendPrefill
from servesim.routers.dynamo import DynamoKv
from servesim.routers.llm_d import LlmD
from servesim.routers.production_stack import StackPrefixAware, StackRoundRobin, StackSession
from servesim.routers.sglang import (
    SglangCacheAware,
    SglangConsistentHashing,
    SglangManual,
    SglangPowerOfTwo,
    SglangRoundRobin,
)
from servesim.routers.simple import Sticky
from servesim.routers.vllm_dp import VllmDataParallel

FOLDER = Path(__file__).resolve().parents[1] / "recordings" / "routers"
FILES = sorted(FOLDER.glob("*.json"))
VERSIONS = {"v4": "0.10", "rotate": "0.25", "inflight": "0.27"}


def router_of(meta: dict[str, Any]) -> Router:
    """Return our router with the settings of a recording."""
    knobs, order, policy = meta["knobs"], tuple(meta.get("order", ())), meta["policy"]
    if policy in VERSIONS:
        return VllmDataParallel(VERSIONS[policy], knobs["client_count"], knobs["client_index"])
    if policy == "cache_aware":
        return SglangCacheAware(order=order, **knobs)
    if policy == "consistent_hash":
        return SglangManual()  # its hash is not known: a key must stay where it is
    if policy == "weighted scorers, max score":
        weights = dict.fromkeys(("queue", "kv", "prefix", "load"), 0) | knobs["weights"]
        return LlmD(
            **weights, block_size_tokens=knobs["block_size_tokens"], max_prefix_blocks=knobs["max_prefix_blocks"],
            lru_blocks_per_replica=knobs["lru_blocks_per_worker"],
        )  # fmt: skip
    if policy == "session":
        return StackSession(**knobs, urls=tuple(meta["urls"]))
    if policy.startswith("kv,"):
        return DynamoKv(**knobs, use_kv_events=False)
    kinds = {
        "round_robin": SglangRoundRobin, "manual": SglangManual, "consistent_hashing": SglangConsistentHashing,
        "power_of_two": SglangPowerOfTwo, "roundrobin": StackRoundRobin,
        "prefixaware": StackPrefixAware,
    }  # fmt: skip
    kind = kinds[policy]
    return kind(order=order) if kind in (SglangRoundRobin, SglangConsistentHashing) else kind(**knobs)


def text_of(event: dict[str, Any]) -> str:
    """Return the text of a request: a name and a dot, repeated; of numbered segments, one character per token."""
    text = ""
    for name, length in event.get("segments", ()):
        text += chr(0x4E00 + name) * length if isinstance(name, int) else ((name + ".") * length)[:length]
    return text


def asked(event: dict[str, Any]) -> Asked:
    text = text_of(event)
    return Asked(event["id"], text, event.get("tokens", len(text) // 4), event.get("key"), event.get("bytes", 0))


@pytest.mark.parametrize("file", [file for file in FILES if "ascend" not in file.name], ids=lambda file: file.stem)
def test_choices_of_a_real_router(file: Path) -> None:
    recording = json.loads(file.read_text())
    meta = recording["meta"]
    router, number = router_of(meta), meta["workers"]
    memory, present, sent = router.memory(number), list(range(number)), {}
    for event in recording["events"]:
        if event["ev"] == "workers":
            present = event["present"]
        elif event["ev"] == "evict":
            router.prune(memory)
        elif event["ev"] == "snapshot":
            router.reported(memory, [Replica(*counts) for counts in event["counts"]])
        elif event["ev"] in ("end", "prefill_done"):
            told = router.ended if event["ev"] == "end" else router.prefilled
            told(memory, *sent[event["id"]])
        else:
            fleet = Fleet(event.get("t", 0.0), present, memory)
            if "waiting" in event:
                said = zip(event["waiting"], event["running"], event["kv_usage"])
                router.reported(memory, [Replica(*about) for about in said])
            request = asked(event)
            check(router, request, fleet, event)
            sent[event["id"]] = (request, event["worker"])
            router.sent(request, event["worker"], fleet)


def check(router: Router, request: Asked, fleet: Fleet, event: dict[str, Any]) -> None:
    """Compare a choice, and what the recording shows of its reasons."""
    choices = router.choices(request, fleet)
    assert event["worker"] in choices, event
    if isinstance(router, Sticky) and request.key in fleet.memory.replica_of:
        assert list(choices) == [event["worker"]], event
    if "loads" in event:
        assert fleet.memory.in_flight == event["loads"], event
    if "candidates" in event and event["match_chars"] >= getattr(router, "prefix_min_match_length", 0):
        assert list(choices) == event["candidates"], event
    if "qps" in event:
        assert [router.rate(fleet, replica) for replica in range(len(event["qps"]))] == pytest.approx(event["qps"])
    if "start" in event:
        memory = fleet.memory
        counts = [list(about) for about in zip(memory.waiting, memory.running, memory.kv_usage)]
        assert (memory.start, [about[: len(event["counts"][0])] for about in counts]) == (
            event["start"],
            event["counts"],
        )
    if "match_blocks" in event:
        matched, blocks = router.matched(request, fleet)
        assert (list(matched.values()), blocks) == (event["match_blocks"], event["total_blocks"]), event
    if "logit" in event:
        assert [router.overlap(request, replica, fleet) for replica in fleet.present] == event["overlap_blocks"], event
        assert fleet.memory.prefill_tokens == event["active_prefill_tokens"], event
        cost = router.costs(request, fleet)[event["worker"]]
        assert cost == pytest.approx(event["logit"], abs=1e-9), event


@pytest.mark.parametrize("file", [file for file in FILES if "ascend" in file.name], ids=lambda file: file.stem)
def test_pairs_of_the_ascend_proxy(file: Path) -> None:
    recording = json.loads(file.read_text())
    prefill, decode = AscendPrefill(), AscendDecode()
    numbers = recording["meta"]["workers"]
    memory = {"prefill": prefill.memory(numbers["prefill"]), "decode": decode.memory(numbers["decode"])}
    fleets = {side: Fleet(0.0, range(numbers[side]), memory[side]) for side in numbers}
    requests: dict[str, Asked] = {}
    sent: dict[tuple[str, str], int] = {}
    for event in recording["events"]:
        name = event["id"]
        if event["ev"] == "request":
            requests[name] = asked(event)
        request, side = requests[name], {"request": "prefill", "prefill_done": "decode"}.get(event["ev"])
        if side is None:
            if event["ev"] == "first_token":
                prefill.ended(memory["prefill"], request, sent[name, "prefill"])
            else:
                decode.ended(memory["decode"], request, sent[name, "decode"])
            continue
        router = prefill if side == "prefill" else decode
        assert router.choices(request, fleets[side]) == [event[f"{side}_worker"]], event
        sent[name, side] = event[f"{side}_worker"]
        router.sent(request, event[f"{side}_worker"], fleets[side])
