"""Routers compare long texts piece by piece. Their choices are those for the same texts as characters."""

from __future__ import annotations

import random

import pytest
from servesim.routers import Asked, Fleet, Replica, Router
from servesim.routers import aibrix as aibrix_module
from servesim.routers.aibrix import AibrixPrefixCache
from servesim.routers.dynamo import DynamoKv
from servesim.routers.llm_d import LlmD
from servesim.routers.production_stack import StackPrefixAware
from servesim.routers.sglang import SglangCacheAware

REPLICAS = 3
SMALL = {
    "llm-d": LlmD(lru_blocks_per_replica=25), "llm-d, few blocks": LlmD(max_prefix_blocks=3),
    "dynamo-kv": DynamoKv(use_kv_events=False, router_ttl_secs=2.0), "aibrix": AibrixPrefixCache(deviations=3.0),
    "production-stack": StackPrefixAware(), "sglang": SglangCacheAware(balance_abs_threshold=2),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("seed", range(3))
def test_pieces_are_compared_as_characters_are(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts end anywhere in a block, and the memories are so small that they drop blocks."""
    monkeypatch.setattr(aibrix_module, "MAX_BLOCKS", 300)
    router: Router = SMALL[name]
    rng = random.Random(f"{name} {seed}")
    memories = [router.memory(REPLICAS), router.memory(REPLICAS)]
    sent = []
    for number in range(150):
        pieces = [(1 + rng.randrange(2), rng.randint(1, 300)), (3 + rng.randrange(4), rng.randint(1, 200))]
        pieces = [*pieces, (7 + rng.randrange(3), rng.randint(1, 90))][: rng.randint(1, 3)]
        if name == "dynamo-kv":  # its blocks are tokens: a text has 4 characters for each
            pieces = [(text, 4 * length) for text, length in pieces]
        tokens = -(-sum(length for _, length in pieces) // 4)
        by_piece = Asked(number, None, tokens, pieces=pieces)
        asked = by_piece, Asked(number, by_piece.text, tokens)
        fleets = [Fleet(0.1 * number, range(REPLICAS), memory) for memory in memories]
        choices = [list(router.choices(request, fleet)) for request, fleet in zip(asked, fleets)]
        assert choices[0] == choices[1], number
        replica = rng.choice(choices[0])
        said = [Replica(rng.randint(0, 2), 0, rng.random() / 4) for _ in range(REPLICAS)]
        ended = sent.pop(rng.randrange(len(sent))) if len(sent) > 4 else None
        for place, (request, fleet) in enumerate(zip(asked, fleets)):
            router.sent(request, replica, fleet)
            router.reported(fleet.memory, said)
            if ended is not None:
                router.ended(fleet.memory, ended[0][place], ended[1])
        sent.append((asked, replica))
