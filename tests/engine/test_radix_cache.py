"""The radix cache of SGLang: equal to a token-by-token model for random requests that share texts."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from servesim.calibrate.live.driver import block_tables
from servesim.core import BadInput, BlockPool, Request
from servesim.core.content import content_of_pieces
from servesim.engine.server import Server
from servesim.policies import POLICIES
from servesim.policies.sglang.radix_cache import RadixCache
from servesim.policies.sglang.radix_draft import RadixDraft

from ..conftest import seeds
from .prefix_cache_reference import tokens_of
from .radix_cache_reference import Part, RadixTree


class Known:
    """A request, its tokens, and its part of the model."""

    def __init__(self, number: int, random: Random, others: list[Known]) -> None:
        pieces = [(f"s{random.randrange(3)}", random.randrange(1, 12)) for _ in range(random.randrange(4))]
        shared = [other for other in others if other.request.content is not None]
        if shared and random.random() < 0.4:  # the next turn of a conversation
            other = random.choice(shared)
            pieces = [*other.pieces, (other.answer, random.randrange(1, 9))]
        pieces.append(("own", random.randrange(1, 9)) if random.random() < 0.3 else (number, random.randrange(1, 9)))
        self.pieces: list[tuple[Any, int]] = pieces
        self.answer = random.choice([f"answer {number}", f"a{random.randrange(2)}"])
        has_content = random.random() < 0.8
        if not has_content:
            self.pieces, self.answer = [((number, "prompt"), sum(n for _, n in pieces))], f"own answer {number}"
        prompt, output = sum(tokens for _, tokens in self.pieces), random.randrange(1, 20)
        self.tokens = tokens_of(self.pieces, self.answer, output)
        content = content_of_pieces(self.pieces, self.answer) if has_content else None
        self.request = Request(number, 0.0, prompt, output, content=content)
        self.request.status = "waiting"
        self.part: Part  # the last one that it locks, with the tokens up to its end
        self.prefix = 0
        self.held = 0  # pages of its own, in tokens


class World:
    """The cache and its model, which get the same calls."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.page = random.choice([1, 1, 1, 2, 3, 4, 8])
        total = random.choice([10, 20, 40, 100])
        self.need = random.random() < 0.5
        self.pool = BlockPool(total, self.page)
        self.cache = RadixCache(self.pool, self.need)
        self.draft = RadixDraft(self.cache)
        self.tree = RadixTree(self.page, alike=random.random() < 0.5)
        self.free = total * self.page  # of the model, in tokens
        self.requests: list[Known] = []
        self.stored = 0  # tokens that running requests hold, as the cache reports them

    def waiting(self) -> list[Known]:
        return [known for known in self.requests if known.request.status == "waiting"]

    def running(self) -> list[Known]:
        return [known for known in self.requests if known.request.status == "running"]

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page) * self.page

    def look_up(self, known: Known) -> None:
        count = len(known.tokens[: known.request.length]) - self.random.randrange(2)
        assert self.draft.matched(known.request, count) == self.tree.match(known.tokens[:count])[1]
        self.cache.look_up(known.request, count)

    def make_room(self, tokens: int) -> None:
        """Take what a step needs, for example the tokens of a prompt."""
        self.cache.make_room(self.pool.blocks_for(tokens))
        if self.free < tokens:
            self.free += self.tree.evict(tokens if self.need else tokens - self.free)

    def admit(self, several: list[Known]) -> None:
        """Plan to admit requests, one after another; then admit them, and compute a piece of each."""
        self.draft.start()
        planned = []
        for known in several:
            planned.append(self.draft.find(known.request, 0))
            self.draft.admit(known.request, planned[-1], 1)
        for known, prefix in zip(several, planned):
            request, before = known.request, self.pool.evictable
            known.part, known.prefix = self.tree.match(known.tokens[: request.length - 1])
            assert prefix.tokens == known.prefix
            self.cache.look_up(request, request.length - 1)
            self.stored += self.cache.admit(request, known.prefix) * self.page
            self.tree.lock(known.part, 1)
            assert before - self.pool.evictable == prefix.idle_blocks
            request.status, known.held = "running", 0
            request._cached, request._blocks = known.prefix, known.prefix // self.page
        for known in several:
            self.compute(known)

    def compute(self, known: Known) -> None:
        """Compute a piece of the prompt, or one more token."""
        request = known.request
        if request._cached < request.prompt:
            tokens = self.random.randrange(1, request.prompt + request._written - request._cached + 1)
        else:
            tokens = 1
        more = self.pages(request._cached + tokens) - self.pages(request._cached)
        if self.free + self.tree.evictable < more:
            self.preempt(known)
            return
        self.make_room(more)
        self.free -= more
        known.held += more
        self.pool.free -= more // self.page
        request._cached += tokens
        request._blocks = self.pool.blocks_for(request._cached)
        self.stored += tokens
        if request._cached == request.prompt + request._written:
            request._written += 1
        if request._written == request.output:
            self.finish(known)
        elif request._cached < request.prompt or request._written == 1 or self.random.random() < 0.1:
            self.keep(known)

    def keep(self, known: Known) -> None:
        request = known.request
        part, had = self.tree.insert(known.tokens[: request._cached])
        self.free += had - known.prefix
        known.held -= self.tree.whole(request._cached) - known.prefix
        known.prefix = self.tree.whole(request._cached)
        self.tree.lock(known.part, -1)
        self.tree.lock(part, 1)
        known.part = part
        self.stored += self.cache.keep(request, request._cached)

    def finish(self, known: Known) -> None:
        request, whole = known.request, self.tree.whole(known.request._cached)
        _, had = self.tree.insert(known.tokens[: request._cached])
        self.free += known.held - (whole - had)
        self.tree.lock(known.part, -1)
        self.stored -= self.cache.release(request, request._cached, may_return=False)
        request.status = "done"

    def preempt(self, known: Known) -> None:
        request = known.request
        before = self.pool.free + self.pool.evictable
        self.draft.start()
        given = self.draft.preempt(request, 0)
        self.free += known.held
        self.tree.lock(known.part, -1)
        self.stored -= self.cache.release(request, request._cached, may_return=True)
        assert self.pool.free + self.pool.evictable - before == given
        request.preemptions += 1
        request._cached, request.status = 0, "waiting"

    def order(self) -> None:
        waiting = self.waiting()
        lookups = [(known.request, known.request.length) for known in waiting]
        ordered = self.draft.by_weight(lookups)
        ends = [(known.request, self.tree.match(known.tokens[: known.request.length])[0]) for known in waiting]
        assert ordered == self.tree.depth_first(ends)
        for request, tokens in lookups:
            self.cache.look_up(request, tokens)

    def step(self) -> None:
        kind, waiting, running = self.random.random(), self.waiting(), self.running()
        if kind < 0.15 or not (waiting or running):
            self.requests.append(Known(len(self.requests), self.random, self.requests))
        elif kind < 0.25 and waiting:
            self.look_up(self.random.choice(waiting))
        elif kind < 0.45 and waiting:
            self.admit(self.random.sample(waiting, self.random.randrange(1, min(4, len(waiting) + 1))))
        elif kind < 0.48 and running:
            self.preempt(self.random.choice(running))
        elif kind < 0.53:
            self.order()
        elif kind < 0.56:
            self.make_room(self.random.randrange(1, self.pool.total * self.page))
        elif running:
            self.compute(self.random.choice(running))
        self.compare()

    def compare(self) -> None:
        assert self.pool.free * self.page == self.free
        assert self.pool.evictable * self.page == self.tree.evictable
        assert self.cache.stats.evicted_blocks * self.page == self.tree.evicted
        self.cache.check([known.request for known in self.running()], self.stored)


@pytest.mark.parametrize("part", seeds(4, 10))
def test_cache_equals_a_token_by_token_model(part: int) -> None:
    for seed in range(15 * part, 15 * part + 15):
        world = World(seed)
        for _ in range(200):
            world.step()


def test_a_live_run_refuses_the_radix_cache_in_one_line() -> None:
    server = Server(POLICIES["sglang"](), 20, 1)
    with pytest.raises(BadInput, match=r"a live run has no radix cache, expected policy\.disable_radix_cache: true"):
        block_tables(server, 20)
    assert block_tables(Server(POLICIES["sglang"](disable_radix_cache=True), 20, 1), 20).free_count == 20
