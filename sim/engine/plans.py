"""Carry out a plan: move requests, allocate the blocks of the model call, and return the step."""

from __future__ import annotations

from collections.abc import Sequence

from servesim.core import NO_MOVES, Chunk, Plan, Request

from .draft_cohort import DraftCohort
from .groups import group_of
from .server import Server
from .shape import runs_as_decode
from .step import Step


def start_step(server: Server, plan: Plan, now: float) -> Step:
    """Move requests, allocate blocks, and return the step."""
    flight, start = server.flight, now
    if flight is not None:
        start = max(now, flight.end) if server.pipeline is None else server.pipeline.start(plan, flight, now)
    step = Step(plan, now, start)
    cache, rules = server.prefix_cache, server.rules
    rules.start_plan(server, plan)
    if cache is not None and cache.lookups:
        cache.count_lookups()
    if plan.moves is not NO_MOVES:
        _move(server, plan, step, now)
    chunks, free = plan.chunks if isinstance(plan.chunks, list) else list(plan.chunks), server.pool.free
    if plan.decode:  # before the chunks: with a prefix cache, the order in which requests get blocks matters
        start_decode(server, step)
    elif chunks and server.cohort.size:
        if server.draft_cohort is not None:
            server.draft_cohort.leave_all()
        else:
            _decode_some(server, chunks, step)
    decode_blocks = free - server.pool.free
    if chunks:
        _start_chunks(server, chunks, step)
    if cache is not None:
        cache.make_room_for(step.chunks, step.decode_rows, decode_blocks)
    if plan.reorder is not None and plan.reorder.running is not None:
        server.reorder_running(plan.reorder.running)
    if server.unreleased:
        server.release_preempted()
    rules.end_plan(server, plan)
    server.view.state = plan.state
    return step


def may_repeat(server: Server, plan: Plan) -> bool:
    """Whether further steps of a plan that holds change nothing but the decoding requests."""
    if not plan.decode or plan.chunks or plan.moves is not NO_MOVES or plan.reorder is not None:
        return False
    return not server.cohort.groups  # a group may fork or drop sequences in every step


def may_decode(server: Server, keep_free: int) -> bool:
    """Whether the next decode of all requests has its blocks, and leaves this number of them free."""
    free, cache = server.pool.free - keep_free, server.prefix_cache
    if cache is not None and cache.evicts_missing:
        free += server.pool.evictable
    if server.cohort.blocks_needed() > free:
        return False
    return server.draft_cohort is None or _all_decode(server, server.draft_cohort)


def _all_decode(server: Server, cohort: DraftCohort) -> bool:
    """Whether all running requests decode all their drafts, or only await their end."""
    others = len(server.running) - cohort.size
    if others and server.foresees_ends and server.flight is not None:
        for row in server.flight.verified:
            request = row.request
            if request.status == "running" and not request.decodes and cohort.awaits_end(request):
                others -= 1
    return not others


def repeat_step(server: Server, plan: Plan, now: float) -> Step:
    """Return one more step of a held plan: all decoding requests decode."""
    flight, free, cache = server.flight, server.pool.free, server.prefix_cache
    step = Step(plan, now, now if flight is None or flight.end < now else flight.end)
    server.rules.repeat_plan(server)
    start_decode(server, step)
    if cache is not None:
        cache.make_room_for(step.chunks, step.decode_rows, free - server.pool.free)
    return step


def _move(server: Server, plan: Plan, step: Step, now: float) -> None:
    moves, step.has_moves = plan.moves, True
    _refuse_repeated("release", moves.release)
    _refuse_repeated("preempt", [preemption.request for preemption in moves.preempt])
    _refuse_repeated("swap_in", moves.swap_in)
    _refuse_repeated("admit", moves.admit)
    _refuse_repeated("reject", [rejection.request for rejection in moves.reject])
    for request in moves.release:
        server.rules.release(server, request)
    for preemption in moves.preempt:
        if server.record_moves:
            step.preempted = [*step.preempted, (preemption.request, preemption.mode, preemption.request.slot)]
        step.copied_blocks += server.rules.preempt(server, preemption, now)
    if moves.reorder_waiting is not None:
        server.waiting.reorder(moves.reorder_waiting)
    if moves.reorder_swapped is not None:
        server.swapped.reorder(moves.reorder_swapped)
    for request in moves.swap_in:
        step.copied_blocks += server.swap_in(request, now)
    for request in moves.admit:
        server.admit(request, step, prefilling=True)
    for rejection in moves.reject:
        server.reject(rejection, now)


def _refuse_repeated(field: str, requests: Sequence[Request]) -> None:
    """Raise an AssertionError if a list of a plan has a request twice: its blocks would be counted twice."""
    if len(requests) > 1 and len(set(requests)) < len(requests):
        repeated = next(request for index, request in enumerate(requests) if request in requests[:index])
        raise AssertionError(f"{field} has request {repeated.id} twice")


def _start_chunks(server: Server, chunks: list[Chunk], step: Step) -> None:
    """Start the chunks of prompts. A chunk of a request that already decodes is a decode."""
    pool, cache, has_decodes = server.pool, server.prefix_cache, False
    takes_blocks = cache is not None and cache.takes_blocks
    if len(chunks) > 1:
        _refuse_repeated("chunks", [chunk.request for chunk in chunks])
    for chunk in chunks:
        request, tokens, blocks = chunk.request, chunk.tokens, chunk.blocks
        if request._cohort is not None:
            assert not step.plan.decode, f"request {request.id} has a chunk and also decodes with all others"
            has_decodes = True
            continue
        cached = request._cached
        is_first = not cached or request.status == "waiting"
        if cache is not None and request.status != "running":
            cached = _use_cached(server, chunk, step.decode_rows > 0)
        pending = request.prompt + request._written - cached
        assert 0 < tokens <= pending + chunk.drafts, f"a chunk has {tokens} tokens, {request} has {pending} pending"
        if request.status != "running":
            server.admit(request, step, tokens < pending)
        needed = -(-(cached + tokens) // pool.block_size)
        if needed < blocks:
            needed = blocks
        if needed > request._blocks and not takes_blocks:
            pool.free -= needed - request._blocks
            request._blocks = needed
        if request.sampling is not None:
            group_of(request).cover(needed)
        if cache is not None:
            cache.schedule(request, tokens, request._admission if step.decode_rows else 0)
        if is_first:
            request.queued += step.start - request.state_since
            if request.scheduled is None:
                request.scheduled = step.start
    if cache is not None and cache.host is not None:
        step.copied_blocks += cache.host.take_copied()
    assert pool.free + pool.evictable >= 0, f"the plan needs {-pool.free - pool.evictable} more blocks than are free"
    step.chunks = [chunk for chunk in chunks if chunk.request._cohort is None] if has_decodes else chunks
    if server.drafts is not None or server.draft_cohort is not None:
        for chunk in chunks:
            step.decode_chunks += runs_as_decode(chunk, server.rules)


def _use_cached(server: Server, chunk: Chunk, decodes: bool) -> int:
    """Give a request that is admitted the blocks of its cached tokens. Return their number."""
    request, cached = chunk.request, chunk.cached
    assert server.prefix_cache is not None
    taken = server.prefix_cache.admit(request, cached, decodes)
    server.kv_use.tokens += taken * server.pool.block_size
    request._cached = cached
    request.cached_tokens += cached
    if not server.prefix_cache.takes_blocks:
        request._blocks = cached // server.pool.block_size
    return cached


def start_decode(server: Server, step: Step) -> None:
    """Start one decode step of the whole cohort."""
    cohort, pool = server.cohort, server.pool
    step.decode_rows, step.context = cohort.size, cohort.context
    if cohort.tracks_longest:
        step.longest = cohort.longest
    if server.draft_cohort is not None:
        _name_known(server)
        step.drafts = cohort.size * (cohort.width - 1)
        pool.free -= server.draft_cohort.take_blocks()
    else:
        pool.free -= cohort.block_offsets[-cohort.steps % cohort.block_size]
    for request in cohort.groups:
        group = group_of(request)
        copies = group.copies
        group.append(request.length)
        step.shared_copies += group.copies - copies
    assert pool.free + pool.evictable >= 0, f"the decode needs {-pool.free - pool.evictable} more blocks than are free"


def _name_known(server: Server) -> None:
    """Tell the prefix cache the known tokens of decoding requests, if it needs them before they leave."""
    cache = server.prefix_cache
    if cache is None or cache.takes_blocks or (server.overlaps and not cache.shares):
        return
    for request in server.running:
        if request._cohort is not None:
            cache.schedule(request, server.cohort.width, 0)


def _decode_some(server: Server, chunks: list[Chunk], step: Step) -> None:
    """Start a decode step of the cohort members that have a chunk."""
    rows = [chunk.request for chunk in chunks if chunk.request._cohort is not None]
    if not rows:
        return
    chosen = set(rows)
    if len(chosen) < server.cohort.size:
        if server.prefix_cache is not None:
            server.prefix_cache.update_all()
        step.paused = [r for r in server.running if r._cohort is not None and r not in chosen]
        for request in step.paused:
            server.cohort.leave(request, server.cohort.in_flight > 0)
    start_decode(server, step)
