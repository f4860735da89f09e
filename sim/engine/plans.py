"""Carry out a plan: move requests, take the blocks that the model call needs, and return the call."""

from __future__ import annotations

from collections.abc import Sequence

from servesim.core import NO_MOVES, Chunk, Moves, Plan

from .server import Server
from .step import Step


def start_step(server: Server, plan: Plan, now: float) -> Step:
    """Move what the plan moves, take its blocks, and return the model call."""
    step = Step(plan, now)
    if plan.moves is not NO_MOVES:
        _move(server, plan.moves, step, now)
    chunks = plan.chunks
    if chunks:
        _start_chunks(server, chunks, step, now)
    if plan.running is not None:
        server.running.reorder(plan.running)
        server.prefilling.reorder([request for request in plan.running if request._listed])
    if plan.decode:
        _decode(server, step)
        if not chunks:
            step.hold = plan.hold
    elif len(step.chunks) < len(chunks):
        _decode_some(server, plan, step)
    server.view.memory = plan.memory
    return step


def _move(server: Server, moves: Moves, step: Step, now: float) -> None:
    step.moved = True
    for request in moves.release:
        server.finished.remove(request)
        server.pool.free += request._held
        request._held = 0
    for eviction in moves.evict:
        if server.recording:
            step.evicted.append((eviction.request, eviction.how, eviction.request.slot))
        step.swapped += server.evict(eviction, now)
    if moves.waiting is not None:
        server.waiting.reorder(moves.waiting)
    for request in moves.swap_in:
        step.swapped += server.swap_in(request, now)
    for request in moves.fetch:
        step.swapped += server.fetch(request, now)
    for request in moves.admit:
        server.admit(request, step, True)
    for rejection in moves.reject:
        server.reject(rejection, now)


def _start_chunks(server: Server, chunks: Sequence[Chunk], step: Step, now: float) -> None:
    """Start the chunks of prompts; a chunk of a request that decodes already is a decode."""
    pool, mixed = server.pool, False
    for chunk in chunks:
        request, tokens, blocks = chunk.request, chunk.tokens, chunk.blocks
        if request._cohort is not None:
            mixed = True
            continue
        cached = request._cached
        pending = request.prompt + request._written - cached
        assert 0 < tokens <= pending, f"a chunk of {tokens} of {request}"
        if request.place != "running":
            server.admit(request, step, tokens < pending)
        held = -(-(cached + tokens) // pool.size)
        if held < blocks:
            held = blocks
        if held > request._held:
            pool.free -= held - request._held
            request._held = held
        if not cached:
            request.queued += now - request.since
            if request.scheduled is None:
                request.scheduled = now
    assert pool.free >= 0, "a plan may not take more blocks than are free"
    step.chunks = [chunk for chunk in chunks if chunk.request._cohort is None] if mixed else chunks


def _decode(server: Server, step: Step) -> None:
    """Let the whole cohort decode."""
    cohort, pool = server.cohort, server.pool
    step.decoders, step.context = cohort.size, cohort.context
    pool.free -= cohort.phases[-cohort.ticks % cohort.block]
    assert pool.free >= 0, "a decode may not take more blocks than are free"


def _decode_some(server: Server, plan: Plan, step: Step) -> None:
    """Let only those members of the cohort decode that the plan names."""
    named = {chunk.request for chunk in plan.chunks if chunk.request._cohort is not None}
    if len(named) < server.cohort.size:
        step.skipped = [r for r in server.running if r._cohort is not None and r not in named]
        for request in step.skipped:
            server.cohort.leave(request)
    _decode(server, step)
