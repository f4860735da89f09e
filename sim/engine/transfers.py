"""Prefill and decode on different replicas: the KV of a prompt is copied from one to the other.

How it works. A prefill replica runs a copy of a request that generates one token. Its blocks stay after its end, until
the KV is copied or a time-out. The decode replica has a queue in front of its scheduler (`Port`): a request gets the
blocks of its whole prompt first, then the copy starts, and when it has ended, the request joins the running ones. The
rules of the engine say when (EngineRules.may_load, may_join), and whether the prefill waits for these blocks.

Replicas run in the order of their times (fleet.py). So copies start in this order; a link carries one after another.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, Callable, Optional

from servesim.core import Request

from .inbox import Inbox
from .kv_move import Move, TransferSettings, drop_reserved, goes_apart, join, prefill_copy, release_kept, reserve
from .server import Server


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
        self.copies: dict[Request, Move] = {}  # by the copy that a prefill replica has, until its blocks are free
        self._attempts: dict[Any, int] = {}  # of requests that were sent again
        self._ports: dict[int, Port] = {}  # by number of the replica
        self._free_at: dict[tuple[int, int], float] = {}  # when a link has carried its copies
        # set by the fleet: choose a replica (for a decode?) for a request of a client, send it to one, note that one
        # has changed, and call a function at a time
        self.choose: Callable[[bool, Request, Request], int] = no_fleet
        self.deliver: Callable[[int, Request], object] = no_fleet
        self.changed: Callable[[int], object] = no_fleet
        self.call: Callable[[float, Callable[[Any], object], Any], object] = no_fleet

    def make_port(self, number: int, server: Server, inbox: Inbox, wake: Callable[[], object], prefills: bool) -> Port:
        """Return the port of a replica, which may start again; `wake`: look into its inbox."""
        port = self._ports[number] = Port(self, server, inbox, wake, prefills)
        return port

    def send(self, request: Request, now: float) -> None:
        """Send a request that has arrived, or whose prefill has ended, to the replica whose turn it is."""
        move, settings = self.moves.get(request), self.settings
        if move is None:
            self._send_new(request)
        elif settings.loads_first:
            if move.is_lost:
                self._arrive(move, now)
            else:
                self.start(move, now)
        else:
            if move.decode < 0:
                move.decode = self.choose(True, request, request)
            if move.decode >= 0:  # otherwise it waits at the router
                request.arrival = now
                self.deliver(move.decode, request)

    def _send_new(self, request: Request) -> None:
        settings, decode = self.settings, -1
        if settings.decode_first or settings.min_uncached_tokens is not None:
            decode = self.choose(True, request, request)
            if decode < 0:
                return
            cached = self._ports[decode].cached_tokens(request)
            if not goes_apart(request.prompt, cached, settings.min_uncached_tokens):
                self.deliver(decode, request)
                return
        copy = prefill_copy(request, self._attempts.get(request.id, 0))
        prefill = self.choose(False, copy, request)
        if prefill < 0:
            return
        self.moves[request] = move = Move(request, copy, prefill, decode)
        if settings.loads_first:
            self.deliver(decode, request)
        else:
            self._start_prefill(move)

    def _start_prefill(self, move: Move) -> None:
        self.copies[move.copy] = move
        self.deliver(move.prefill, move.copy)

    def ended(self, copy: Request, now: float) -> Optional[Request]:
        """Note that a request has ended. Return the request whose prefill it was, if its KV can be copied."""
        move = self.copies.get(copy)
        if move is None or move.ready < math.inf:
            return None
        move.ready, is_wanted = now, self.moves.get(move.request) is move
        if copy.outcome == "finished":
            if not is_wanted or (self.settings.timeout is not None and not self.settings.loads_first):
                self._free(move, self._latest(move))
            return move.request if is_wanted else None
        move.failure = copy.outcome or "failed", copy.reason or "the prefill failed"
        kept = self._ports[move.prefill].server.kept
        if kept is not None:
            kept.pop(copy, None)
        del self.copies[copy]
        if not is_wanted:
            return None
        if self.settings.loads_first:
            self._arrive(move, now)
        else:
            del self.moves[move.request]
            self._ports[move.prefill].fail(move.request, now, *move.failure)
            if move.decode >= 0:
                self.changed(move.decode)  # it may drain
        return None

    def allocated(self, move: Move, now: float) -> None:
        """Go on with a request whose blocks on the decode replica are allocated: start its copy, or its prefill."""
        if not self.settings.loads_first:
            self.start(move, now)
            return
        move.copy.arrival = max(move.copy.sent, now - self._ports[move.prefill].inbox.seconds)
        self._start_prefill(move)

    def start(self, move: Move, now: float) -> None:
        """Start a copy. Both replicas know when it ends."""
        settings, request = self.settings, move.request
        size = (request.prompt - request.cached) * settings.token_bytes
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
        self.held_block_s += (end - move.ready) * move.copy.blocks
        self._free(move, end)
        self._arrive(move, end)

    def _arrive(self, move: Move, time: float) -> None:
        """Let the KV arrive at a time, and not at the time that was known before."""
        move.arrives = time
        self.call(time, self._show, (move, time, False))

    def _free(self, move: Move, time: float) -> None:
        """Free the blocks of a prefill at a time, and not at the time that was known before."""
        move.free_at = time
        self.call(time, self._show, (move, time, True))

    def _show(self, event: tuple[Move, float, bool]) -> None:
        """Let a request whose KV has come, or whose blocks are freed, arrive once more at its replica."""
        move, time, is_free = event
        number, request, current = move.decode, move.request, self.moves.get(move.request)
        if is_free:
            number, request, current = move.prefill, move.copy, self.copies.get(move.copy)
        if current is not move or time != (move.free_at if is_free else move.arrives):
            return
        self._ports[number].inbox.send_again(request, time)
        self._ports[number].wake()
        self.changed(number)

    def _latest(self, move: Move) -> float:
        """Return when a prefill replica frees blocks that no decode replica fetches: without a time-out at once."""
        return move.ready + (0.0 if self.settings.loads_first else self.settings.timeout or 0.0)

    # Replicas that come and go

    def uses(self, number: int) -> bool:
        """Whether a replica has KV that is not copied, or a request that was not sent to it yet needs it."""
        if any(move.prefill == number for move in self.copies.values()):
            return True
        moves = self.moves.values()
        return any(move.decode == number or (move.prefill == number and move.ready == math.inf) for move in moves)

    def is_copied(self, request: Request) -> bool:
        """Whether the KV of a request arrives at a known time."""
        move = self.moves.get(request)
        return move is not None and move.arrives < math.inf

    def forget(self, request: Request, now: float) -> Optional[Move]:
        """Forget the copy of a request that is sent again, or is lost. Return what is known about it."""
        move = self.moves.pop(request, None)
        if move is None:
            return None
        self._attempts[request.id] = self._attempts.get(request.id, 0) + 1
        if move.decode >= 0:
            self._ports[move.decode].drop(request)
        if move.copy in self.copies and now < move.arrives and move.ready < math.inf:
            self._free(move, max(now, self._latest(move)))
        self.changed(move.prefill)
        return move

    def lose_prefills(self, number: int, now: float, notice: float) -> list[Move]:
        """Lose the KV of a replica; other replicas notice it later. Return the requests whose prefill had not ended."""
        self.copies = {copy: move for copy, move in self.copies.items() if move.prefill != number}
        undone = []
        for move in self.moves.values():
            if move.prefill != number or move.arrives <= now:
                continue
            if move.ready > now:
                undone.append(move)
                continue
            move.is_lost = True
            if move.arrives < math.inf:
                self._arrive(move, notice)
        return undone


def no_fleet(*_: object) -> Any:
    raise NotImplementedError


class Port:
    """The KV that leaves or enters one server."""

    __slots__ = ("_arrived", "inbox", "queue", "server", "transfers", "wake")

    def __init__(
        self, transfers: Transfers, server: Server, inbox: Inbox, wake: Callable[[], object], prefills: bool
    ) -> None:
        self.transfers = transfers
        self.server = server
        self.inbox = inbox
        self.wake = wake  # looks into the inbox
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

    def receive(self, arrived: Sequence[Request], now: float) -> tuple[list[Request], list[Request]]:
        """Receive what has to do with a copy. Return the requests that are new, and those for the scheduler."""
        copied = self.transfers.is_copied
        new = [request for request in arrived if request.status != "done" and not copied(request)]
        return new, [request for request in arrived if not self._takes(request, now)]

    def _takes(self, request: Request, now: float) -> bool:
        server, transfers = self.server, self.transfers
        if server.kept is not None:
            if request.status != "done":
                server.kept[request] = 0
                return False
            move = transfers.copies.get(request)
            if move is not None and now >= move.free_at:
                release_kept(server, request)
                del transfers.copies[request]
            return True
        move, inbox = transfers.moves.get(request), self.inbox
        if move is not None and move.arrives < math.inf:
            self._receive(move, now)
        elif move is not None or self.queue:
            if server.accept(request, now, request.arrival + inbox.seconds if inbox.lag == 1 else now):
                self.queue.append(request)
            else:
                self.fail(request, now, "refused", request.reason or "")
        else:
            return False
        return True

    def _receive(self, move: Move, now: float) -> None:
        """Take over the times of the prefill when the KV is there."""
        request, copy, server = move.request, move.copy, self.server
        if move.failure is not None or move.is_lost:
            drop_reserved(server, request)
            request.state_since = now
            self._give_up(move, now)
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
        if self.server.kept is not None:
            self.server.rules.before_prefills(self.server)
            return
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
            self.inbox.clients.ended(request, now)
            return
        self.inbox.expect_timeout(request)

    def _to_scheduler(self, request: Request) -> None:
        self.server.add_to_waiting(request)
        self.inbox.expect_timeout(request)

    def _is_late(self, move: Move, now: float) -> bool:
        settings = self.transfers.settings
        if move.is_lost:
            return True
        since = move.request.visible_at if settings.loads_first else move.ready
        return settings.timeout is not None and now >= since + settings.timeout

    def _give_up(self, move: Move, now: float) -> None:
        """Let a request fail whose KV is gone, or compute its prompt here."""
        settings = self.transfers.settings
        del self.transfers.moves[move.request]
        if move.failure is not None:
            self.fail(move.request, now, *move.failure)
            return
        if move.ready == math.inf:  # a prefill that does not start
            self.inbox.clients.ended(move.copy, now)
            self.transfers.changed(move.prefill)  # it may drain
        if settings.recompute:
            self._to_scheduler(move.request)
            return
        what = "no room on the decode replica" if settings.loads_first else "the KV of the prefill was dropped"
        why = "its prefill replica crashed" if move.is_lost else f"{what} after {settings.timeout:g} s"
        self.fail(move.request, now, "failed", why)

    def drop(self, request: Request) -> None:
        """Take out a request that waits for blocks or KV, or has not come."""
        if request in self.server.loading:
            drop_reserved(self.server, request)
        self.queue = deque([other for other in self.queue if other is not request])
        self._arrived = deque([move for move in self._arrived if move.request is not request])
        self.inbox.take_out(request)

    def take_all(self) -> list[Request]:
        """Take out the requests that wait for blocks or KV, and free the blocks that are kept for other replicas."""
        server, taken = self.server, [*self.queue, *self.server.loading]
        for request in list(server.loading):
            drop_reserved(server, request)
        self.queue.clear()
        self._arrived.clear()
        for copy in list(server.kept or ()):
            if copy.outcome == "finished":
                release_kept(server, copy)
        if server.kept is not None:
            server.kept.clear()
        return taken

    def fail(self, request: Request, now: float, outcome: str, reason: str) -> None:
        """End a request that cannot run."""
        if request.status != "done":
            self.server.finish_unserved(request, now, outcome, reason)
        self.inbox.clients.ended(request, now)
