"""Prefill and decode on different replicas: the KV of a prompt is copied from one to the other.

How it works. A prefill replica runs a copy of a request that generates one token. Its blocks stay after its end, until
the KV is copied or a time-out. The decode replica has a queue in front of its scheduler (`Port`): a request gets the
blocks of its whole prompt first, then the copy starts, and when it has ended, the request joins the running ones. The
rules of the engine say when (EngineRules.may_load, may_join), and whether the prefill waits for these blocks.

Why it is exact. When a copy starts, its end is known: a link carries one copy after another. So the end is an arrival
at both replicas, and fast-forward stops before it as before any other. No replica is ahead of another one that may
start a copy or end a prefill (`Fleet`), so copies start in the order of their times.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, Optional

from servesim.core import Request

from .inbox import Inbox
from .server import Server


class TransferSettings(NamedTuple):
    """How KV is copied, and which side waits for the other."""

    latency: float = 0.0  # seconds of a copy, in addition to its bytes
    bandwidth: float = math.inf  # bytes per second
    token_bytes: float = 0.0  # KV of one token on all devices of a replica
    link: str = "none"  # who shares a link: none | shared | per_pair
    layers: int = 0  # a layer is copied as soon as it is computed; 0: all of them after the prefill
    decode_first: bool = False  # the decode replica is chosen first, when the request arrives
    loads_first: bool = False  # the prefill starts when the decode replica has allocated the blocks
    min_uncached_tokens: Optional[int] = None  # shorter prompts are computed by the decode replica; 0: all of them
    timeout: Optional[float] = None  # seconds after which the side that waits gives up
    recompute: bool = False  # the decode replica then computes the prompt; otherwise the request fails


class Move:
    """The copy of the KV of one request."""

    __slots__ = ("arrives", "copy", "decode", "failure", "prefill", "ready", "request")

    def __init__(self, request: Request, copy: Request, prefill: int, decode: int) -> None:
        self.request = request
        self.copy = copy  # what the prefill replica runs
        self.prefill = prefill  # number of the replica
        self.decode = decode  # -1: not chosen yet
        self.ready = math.inf  # when the prefill ended
        self.arrives = math.inf  # when all KV is there
        self.failure: Optional[tuple[str, str]] = None  # outcome and reason of a prefill that failed


def prefill_copy(request: Request) -> Request:
    """Return what the prefill replica runs: the prompt, and one token."""
    copy = Request(
        f"{request.id} (prefill)", request.sent, request.prompt, 1, 1, request.priority, request.session,
        request.content, None, None, 1 if request.fails_at_token == 1 else None,
    )  # fmt: skip
    copy.arrival, copy.serial = request.arrival, request.serial
    return copy


def goes_apart(tokens: int, cached: int, minimum: Optional[int]) -> bool:
    """Whether a prompt, of which the decode replica has some tokens, goes to a prefill replica (the rule of llm-d)."""
    return minimum is None or (minimum > 0 and tokens >= minimum and tokens - cached >= minimum)


class Transfers:
    """The copies of a fleet."""

    def __init__(self, settings: TransferSettings) -> None:
        self.settings = settings
        self.count = 0
        self.bytes = 0.0
        self.seconds = 0.0  # from the start of a copy to its end, with the time that it waits for a link
        self.link_wait_s = 0.0  # of these, waiting
        self.held_block_s = 0.0  # blocks that prefill replicas held after the prefill, times seconds
        self.moves: dict[Request, Move] = {}  # by the request of the client, until its KV is there
        self.copies: dict[Request, Move] = {}  # by the copy, until its blocks are free
        self._ports: list[Port] = []  # by number of the replica
        self._free_at: dict[tuple[int, int], float] = {}  # when a link has carried its copies
        # set by the fleet: choose a replica (for a decode?), send a request to one, wake one
        self.choose: Callable[[bool, Request], int] = no_fleet
        self.deliver: Callable[[int, Request], object] = no_fleet
        self.wake: Callable[[int], object] = no_fleet

    def add_port(self, server: Server, inbox: Inbox, prefills: bool) -> Port:
        """Return the port of the next replica."""
        port = Port(self, server, inbox, prefills)
        self._ports.append(port)
        return port

    def send(self, request: Request, now: float) -> None:
        """Send a request that has arrived, or whose prefill has ended, to the replica whose turn it is."""
        move, settings = self.moves.get(request), self.settings
        if move is None:
            self._send_new(request)
        elif settings.loads_first:
            self.start(move, now)
        else:
            if move.decode < 0:
                move.decode = self.choose(True, request)
            request.arrival = now
            self.deliver(move.decode, request)

    def _send_new(self, request: Request) -> None:
        settings, decode = self.settings, -1
        if settings.decode_first or settings.min_uncached_tokens is not None:
            decode = self.choose(True, request)
            cached = self._ports[decode].cached_tokens(request)
            if not goes_apart(request.prompt, cached, settings.min_uncached_tokens):
                self.deliver(decode, request)
                return
        copy = prefill_copy(request)
        move = Move(request, copy, self.choose(False, copy), decode)
        self.moves[request] = self.copies[copy] = move
        if settings.loads_first:
            self.deliver(decode, request)
        else:
            self.deliver(move.prefill, copy)

    def ended(self, copy: Request, now: float) -> Optional[Request]:
        """Note that a request has ended. Return the request whose prefill it was, if its KV can be copied."""
        move = self.copies.get(copy)
        if move is None or move.ready < math.inf:
            return None
        move.ready = now
        if copy.outcome == "finished":
            if self.settings.timeout is not None and not self.settings.loads_first:
                self._ports[move.prefill].inbox.send_again(copy, now + self.settings.timeout)
            return move.request
        move.failure = copy.outcome or "failed", copy.reason or "the prefill failed"
        kept = self._ports[move.prefill].server.kept
        if kept is not None:
            kept.pop(copy, None)
        del self.copies[copy]
        if self.settings.loads_first:
            self._arrive(move, now)
        else:
            del self.moves[move.request]
            self._ports[move.prefill].fail(move.request, now, *move.failure)
        return None

    def allocated(self, move: Move, now: float) -> None:
        """Go on with a request whose blocks on the decode replica are allocated: start its copy, or its prefill."""
        if not self.settings.loads_first:
            self.start(move, now)
            return
        move.copy.arrival = max(move.copy.sent, now - self._ports[move.prefill].inbox.seconds)
        self.deliver(move.prefill, move.copy)

    def start(self, move: Move, now: float) -> None:
        """Start a copy. Both replicas know when it ends."""
        settings, request = self.settings, move.request
        size = (request.prompt - request._cached) * settings.token_bytes
        seconds = size / settings.bandwidth
        if settings.layers:  # the rest was copied during the prefill
            seconds = max(seconds / settings.layers, seconds - move.copy.prefilling)
        begin = now
        if settings.link != "none":
            pair = (move.prefill, move.decode) if settings.link == "per_pair" else (0, 0)
            begin = max(now, self._free_at.get(pair, 0.0))
            self._free_at[pair] = begin + seconds
        self.count += 1
        self.bytes += size
        self.link_wait_s += begin - now
        self.seconds += begin - now + seconds + settings.latency
        end = begin + seconds + settings.latency
        self.held_block_s += (end - move.ready) * move.copy._blocks
        self._ports[move.prefill].inbox.send_again(move.copy, end)
        self.wake(move.prefill)
        self._arrive(move, end)

    def _arrive(self, move: Move, time: float) -> None:
        move.arrives = time
        self._ports[move.decode].inbox.send_again(move.request, time)
        self.wake(move.decode)

    def is_copying(self, copy: Request, now: float) -> bool:
        """Whether the blocks of a copy are in use: its KV is on the way."""
        move = self.copies.get(copy)
        return move is not None and now < move.arrives < math.inf


def no_fleet(*_: object) -> Any:
    raise NotImplementedError


class Port:
    """The KV that leaves or enters one server."""

    __slots__ = ("_arrived", "inbox", "queue", "server", "transfers")

    def __init__(self, transfers: Transfers, server: Server, inbox: Inbox, prefills: bool) -> None:
        self.transfers = transfers
        self.server = server
        self.inbox = inbox
        self.queue: deque[Request] = deque()  # they wait for blocks; requests without a copy behind them wait, too
        self._arrived: deque[Move] = deque()  # their KV is there, and they wait for a slot
        if prefills:
            server.kept = {}
            server.foresees_ends = server.overlaps  # it never decodes

    @property
    def is_waiting(self) -> bool:
        """Whether a request waits that the scheduler does not see."""
        return bool(self.queue or self._arrived)

    def cached_tokens(self, request: Request) -> int:
        """Return how many tokens of a prompt the prefix cache has."""
        cache = self.server.prefix_cache
        return 0 if cache is None else cache.find_cached(request)[0]

    def receive(self, arrived: Sequence[Request], now: float) -> list[Request]:
        """Receive what has to do with a copy. Return the requests that go to the scheduler."""
        inbox, rest = self.inbox, []
        for request in arrived:
            if not self._takes(request, now, request.arrival + inbox.seconds if inbox.lag == 1 else now):
                rest.append(request)
        return rest

    def _takes(self, request: Request, now: float, visible_at: float) -> bool:
        server, transfers = self.server, self.transfers
        if server.kept is not None:
            if request.status != "done":
                server.kept[request] = 0
                return False
            if request in server.kept and not transfers.is_copying(request, now):
                release_kept(server, request)
                del transfers.copies[request]
            return True
        move = transfers.moves.get(request)
        if move is not None and move.arrives < math.inf:
            self._receive(move, now)
        elif move is not None or self.queue:
            if server.accept(request, now, visible_at):
                self.queue.append(request)
            else:
                self.fail(request, now, "refused", request.reason or "")
        else:
            return False
        return True

    def _receive(self, move: Move, now: float) -> None:
        """Take over the times of the prefill when the KV is there."""
        request, copy, server = move.request, move.copy, self.server
        if move.failure is not None:
            drop_reserved(server, request)
            del self.transfers.moves[request]
            self.fail(request, now, *move.failure)
            return
        request.queued += copy.queued
        request.prefilling += copy.prefilling
        request.scheduled = copy.scheduled
        request.cached_tokens += copy.cached_tokens
        request.visible_at = min(request.visible_at, copy.visible_at)
        if not server.rules.arrival_is_send_time:
            request.arrival = request.visible_at
        self._arrived.append(move)

    def advance(self, now: float) -> None:
        """Before a decision: run requests whose KV is there, and allocate the blocks of those that wait."""
        while self._arrived and self.server.rules.may_join(self.server):
            self._join(self._arrived.popleft(), now)
        started = 0
        while self.queue:
            request = self.queue[0]
            move = self.transfers.moves.get(request)
            if move is None:
                self._to_scheduler(request)
            elif self._is_late(move, now):
                self._give_up(move, now)
            elif self._allocate(request, now, started):
                started += 1
                self.transfers.allocated(move, now)
            else:
                return
            self.queue.popleft()

    def _allocate(self, request: Request, now: float, started: int) -> bool:
        """Allocate the blocks of a prompt if the rules of the engine allow it."""
        server, cache = self.server, self.server.prefix_cache
        cached, idle = (0, 0) if cache is None else cache.find_cached(request)
        blocks = server.pool.blocks_for(request.prompt) - cached // server.pool.block_size + idle
        if not server.rules.may_load(server, request, blocks, started):
            return False
        reserve(server, request, cached)
        request.queued += now - request.state_since
        return True

    def _join(self, move: Move, now: float) -> None:
        request, server = move.request, self.server
        del self.transfers.moves[request]
        request.queued += now - move.arrives
        request.state_since = now
        if server.rules.recomputes_last:
            join(server, request, request.prompt - 1, now)
        elif request.stop_at > 1:
            join(server, request, request.prompt, now)
        else:  # its only token has come with the KV
            drop_reserved(server, request)
            request._written, request.first_token = 1, now
            server.tokens_generated += 1
            server.mark_finished(request, now, False)
            self.inbox.end(request, now)
            return
        self.inbox.expect_timeout(request)

    def _to_scheduler(self, request: Request) -> None:
        self.server.add_to_waiting(request)
        self.inbox.expect_timeout(request)

    def _is_late(self, move: Move, now: float) -> bool:
        settings = self.transfers.settings
        since = move.request.visible_at if settings.loads_first else move.ready
        return settings.timeout is not None and now >= since + settings.timeout

    def _give_up(self, move: Move, now: float) -> None:
        """Let a request fail whose KV is gone, or compute its prompt here."""
        settings = self.transfers.settings
        del self.transfers.moves[move.request]
        if settings.loads_first:
            del self.transfers.copies[move.copy]
        if settings.recompute:
            self._to_scheduler(move.request)
            return
        what = "no room on the decode replica" if settings.loads_first else "the KV of the prefill was dropped"
        self.fail(move.request, now, "failed", f"{what} after {settings.timeout:g} s")

    def fail(self, request: Request, now: float, outcome: str, reason: str) -> None:
        """End a request that cannot run."""
        if request.status != "done":
            self.server.finish_unserved(request, now, outcome, reason)
        self.inbox.end(request, now)


def release_kept(server: Server, request: Request) -> None:
    """Free the blocks of a finished request whose KV has been copied."""
    assert server.kept is not None
    unknown = server.kept.pop(request)
    if request not in list(server.finished):  # otherwise the next plan frees them
        server.free_blocks(request, unknown)


def reserve(server: Server, request: Request, cached: int) -> None:
    """Allocate the blocks of a prompt whose KV will be copied; its first `cached` tokens are here already."""
    pool, cache = server.pool, server.prefix_cache
    if cache is not None:
        server.kv_use.tokens += cache.admit(request, cached) * pool.block_size
        request._cached, request._blocks = cached, cached // pool.block_size
    needed = pool.blocks_for(request.prompt) - request._blocks
    if cache is not None:
        cache.make_room(needed)
    server.allocate(needed)
    request._blocks += needed
    server.loading.append(request)


def drop_reserved(server: Server, request: Request) -> None:
    """Free the blocks of a prompt whose KV does not come, or is not needed."""
    server.loading.remove(request)
    server.free_blocks(request)


def join(server: Server, request: Request, computed: int, now: float) -> None:
    """Run a request whose KV has come. If all its tokens are computed, its first token has come, too."""
    server.loading.remove(request)
    server.kv_use.tokens += computed - request._cached
    request._cached = computed
    server.run(request)
    if server.prefix_cache is not None:
        server.prefix_cache.schedule(request, 0, 0)
        server.kv_use.tokens += server.prefix_cache.keep(request, computed)
    if computed < request.prompt:
        server.add_to_prefilling(request)
        return
    request._written = 1
    request.first_token = request.last_token = now
    server.tokens_generated += 1
    server.cohort.join(request)
