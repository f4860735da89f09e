"""Record what a model call produced: tokens, finished requests, failures."""

from __future__ import annotations

from servesim.core import Request

from .server import Server
from .step import Step


def finish_step(server: Server, step: Step, now: float) -> list[Request]:
    """Record a model call that ended now; return the requests that finished."""
    finished = record_decode(server, step.start, now, 1, now) if step.decoders else []
    if step.chunks:
        _record_prefill(server, step, now, finished)
    if step.skipped:
        for request in step.skipped:
            server.cohort.join(request)
    return finished


def record_decode(server: Server, start: float, now: float, steps: int, first: float) -> list[Request]:
    """Record `steps` decode steps of the cohort, the first ended at `first` and the last now; return the finished."""
    cohort, seconds, seen = server.cohort, server.gaps.seconds, server.gaps.seen
    stayed = cohort.size
    if cohort.fresh:
        stayed -= len(cohort.fresh)
        for request in cohort.fresh:
            seconds.append(first - request.last_token)  # type: ignore[operator]
            seen.append(1)
    if stayed:
        seconds.append(first - cohort.last)  # type: ignore[operator]
        seen.append(stayed)
    server.written += cohort.size * steps
    finished = cohort.tick(steps, now, now - start)
    if finished:
        failed = server.failing and _decode_failed(server, finished)
        for request in finished:
            _finish(server, request, now, failed)
    return finished


def _decode_failed(server: Server, finished: list[Request]) -> bool:
    """Whether the decode failed; then every row of it ends."""
    if all(request.fails != request._written for request in finished):
        return False
    finished += _clear_cohort(server)
    return True


def _clear_cohort(server: Server) -> list[Request]:
    """Take out of the cohort the requests that decoded in a call that failed."""
    rows = [request for request in server.running if request._cohort is not None]
    for request in rows:
        server.cohort.leave(request)
        request.last_token = server.cohort.last
    return rows


def _record_prefill(server: Server, step: Step, now: float, finished: list[Request]) -> None:
    """Record chunks of prompts, and the first token of each prompt that is complete."""
    seconds = now - step.start
    server.view.last_prefill = (step.start, now)
    failed = server.failing and _prefill_failed(step, finished)
    for chunk in step.chunks:
        request, tokens = chunk.request, chunk.tokens
        request._cached = cached = request._cached + tokens
        request.prefilling += seconds
        server.computed += tokens
        written = request._written
        if cached < request.prompt + written:
            continue
        if request.first_token is None:
            request.first_token = now
        else:
            server.gaps.add(now - request.last_token, 1)  # type: ignore[operator]
        request.last_token = now
        request._written = written = written + 1
        server.written += 1
        if request._listed:
            server.unlist(request)
        if written < request.end and not failed:
            server.cohort.join(request)
        elif not failed:
            _finish(server, request, now, False)
            finished.append(request)
    if failed:
        _finish_failed_rows(server, step, now, finished)


def _prefill_failed(step: Step, finished: list[Request]) -> bool:
    """Whether a call with prompts fails: because of a row that decoded, or of one that gets its token."""
    return any(request.outcome == "failed" for request in finished) or any(
        chunk.request.fails == chunk.request._written + 1 and chunk.tokens == chunk.request.pending
        for chunk in step.chunks
    )


def _finish_failed_rows(server: Server, step: Step, now: float, finished: list[Request]) -> None:
    """End all requests of a call that failed."""
    prompts = [chunk.request for chunk in step.chunks]
    for request in prompts + (_clear_cohort(server) if step.decoders else []):
        if request._listed:
            server.unlist(request)
        _finish(server, request, now, True)
        finished.append(request)


def _finish(server: Server, request: Request, now: float, failed: bool) -> None:
    server.running.remove(request)
    if server.traits.frees_blocks_late:
        server.finished.push(request)
    else:
        server.pool.free += request._held
        request._held = 0
    request.outcome = "finished"
    if failed:
        request.outcome, request.reason = "failed", "the model call failed"
    elif server.limits.cut_off(request):
        request.outcome = "unanswered"
        request.reason = "stopped by max_generate_length, which its client is not told"
    request.place = "done"
    request.finish = request.seen = now
    server.done.append(request)
