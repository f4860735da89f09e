"""The copy of the KV of one request: its settings, its state, and its blocks on both sides."""

from __future__ import annotations

import math
from typing import Final, NamedTuple, Optional

from servesim.core import Request

from .server import Server

MOST_REQUESTS: Final = 2**40  # of a run: copies of one request have different serials


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

    __slots__ = ("arrives", "copy", "decode", "failure", "free_at", "is_lost", "prefill", "ready", "request")

    def __init__(self, request: Request, copy: Request, prefill: int, decode: int) -> None:
        self.request = request
        self.copy = copy  # what the prefill replica runs
        self.prefill = prefill  # number of the replica
        self.decode = decode  # -1: not chosen yet
        self.ready = math.inf  # when the prefill ended
        self.arrives = math.inf  # when all KV is there
        self.free_at = math.inf  # when the blocks of the prefill are free
        self.is_lost = False  # the prefill replica has crashed before the end of the copy
        self.failure: Optional[tuple[str, str]] = None  # outcome and reason of a prefill that failed


def prefill_copy(request: Request, attempt: int) -> Request:
    """Return what the prefill replica runs: the prompt, and one token. A copy of an attempt before may run, too."""
    name = f"{request.id} (prefill {attempt + 1})" if attempt else f"{request.id} (prefill)"
    copy = Request(
        name, request.sent, request.prompt, 1, 1, request.priority, request.session,
        request.content, None, None, 1 if request.fails_at_token == 1 else None,
    )  # fmt: skip
    copy.arrival, copy.serial = request.arrival, request.serial + attempt * MOST_REQUESTS
    return copy


def goes_apart(tokens: int, cached: int, minimum: Optional[int]) -> bool:
    """Whether a prompt, of which the decode replica has some tokens, goes to a prefill replica (the rule of llm-d)."""
    return minimum is None or (minimum > 0 and tokens >= minimum and tokens - cached >= minimum)


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
    request._cached = 0


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
