"""Record the results of a model call: tokens, finished requests, failures."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Optional

from servesim.core import Chunk, Preemption, Request
from servesim.core.request import CLIENT_FIELDS

from .groups import group_of
from .queues import RequestQueue
from .server import Server
from .step import Step


def finish_step(server: Server, step: Step, now: float) -> list[Request]:
    """Record the end of a model call and return the finished requests."""
    count_kv_use(server, step)
    finished = record_decode(server, step.start, now, 1, now) if step.decode_rows else []
    if step.chunks:
        _record_prefill(server, step, now, finished)
    elif not step.decode_rows and step.plan.padding_rows:
        server.work.prefill.steps += 1
        server.work.prefill.seconds += now - step.start
    if step.paused:
        for request in step.paused:
            server.cohort.join(request)
    for request in step.leaving:
        _preempt_after_step(server, request, now)
    if finished or (step.chunks and server.prefix_cache is not None):
        free_finished(server, finished, step.chunks)
    return finished


def _preempt_after_step(server: Server, request: Request, now: float) -> None:
    """Preempt a request whose blocks were free before its last token. The engine takes one token for computed."""
    server.pool.free -= request.blocks
    if request.status == "running":
        server.preempt(Preemption(request), now)
        request._cached = 1
        server.kv_use.tokens += 1


def free_finished(server: Server, finished: list[Request], chunks: Sequence[Chunk] = ()) -> None:
    """Free the blocks of finished requests, unless a later plan does. For a prefix cache, the order matters.

    A radix cache also takes over the prompts that these chunks have computed.
    """
    cache = server.prefix_cache
    if cache is not None and len(finished) > 1:
        finished.sort(key=attrgetter("_admission"))
    if server.traits.frees_blocks_late:
        return
    requests = finished
    if chunks and cache is not None and cache.keeps_results:
        requests = finished + [chunk.request for chunk in chunks if chunk.request.status == "running"]
        requests.sort(key=results_order)
    for request in requests:
        if request.status == "done":
            server.free_blocks(request)
        elif cache is not None:
            server.kv_use.tokens += cache.keep(request, request.cached)


def results_order(request: Request) -> tuple[bool, int]:
    """Sort key: the order in which SGLang processes results. A prompt that is cut comes last."""
    return request._in_prefilling, request._admission


def count_kv_use(server: Server, step: Step) -> None:
    """Count the blocks and the tokens that requests hold during a model call."""
    use, blocks = server.kv_use, server.pool.held
    use.tokens += step.decode_rows
    for chunk in step.chunks:
        use.tokens += chunk.tokens
    use.token_sum += use.tokens
    use.block_sum += blocks
    if server.view.has_groups:
        use.shared_sum += sum(
            [group_of(request).shared_blocks for request in server.running if request.sampling is not None]
        )
    if blocks > use.peak_blocks:
        use.peak_blocks = blocks


def record_decode(server: Server, start: float, now: float, steps: int, first: float) -> list[Request]:
    """Record decode steps: the first ended at `first`, the last at `now`. Return the finished requests.

    They still hold their blocks: call `free_finished`.
    """
    cohort, gaps = server.cohort, server.token_gaps
    old_members = cohort.size
    if cohort.new_members:
        for request in cohort.new_members:
            assert request.last_token is not None
            sequences = request.sequences
            old_members -= sequences
            gaps.add(first - request.last_token, sequences)
    if old_members:
        assert cohort.last_end is not None
        gaps.add(first - cohort.last_end, old_members)
    server.tokens_generated += cohort.size * steps
    finished = cohort.advance(steps, now, now - start)
    if server.traits.lists_ended:
        server.view.ended = positions(server.running, finished) if finished else []
    if finished:
        failed = server.may_fail and _fail_decode(server, finished)
        for request in finished:
            _finish(server, request, now, failed)
    return finished


def positions(running: RequestQueue, requests: list[Request]) -> list[tuple[int, Request]]:
    """Return the positions of requests in the running queue, in ascending order, and the requests."""
    found = [(running.position(request), request) for request in requests]
    if len(found) > 1:
        found.sort()
    return found


def _fail_decode(server: Server, finished: list[Request]) -> bool:
    """If the call of a finished request failed, add all other rows to `finished`. Return whether it failed."""
    if all(request.fails_at_token != request._written for request in finished):
        return False
    finished += _clear_cohort(server)
    return True


def _clear_cohort(server: Server) -> list[Request]:
    """Remove all requests from the cohort after a failed call, and return them."""
    rows = [request for request in server.running if request._cohort is not None]
    for request in rows:
        server.cohort.leave(request)
        request.last_token = server.cohort.last_end
    return rows


def _record_prefill(server: Server, step: Step, now: float, finished: list[Request]) -> None:
    """Record the chunks, and the first token of each request whose prompt is now complete."""
    seconds = now - step.start
    server.view.last_prefill = (step.start, now)
    failed = server.may_fail and _prefill_failed(step, finished)
    totals = server.work.start_prompts(step.decode_rows, step.context)
    totals.seconds += seconds
    for chunk in step.chunks:
        request, tokens = chunk.request, chunk.tokens
        request._cached = cached = request._cached + tokens
        totals.add_prompt(tokens, cached)
        request.prefilling += seconds
        written = request._written
        if cached < request.prompt + written:
            continue
        if request.first_token is None:
            request.first_token = now
        else:
            assert request.last_token is not None
            server.token_gaps.add(now - request.last_token, 1)
        request.last_token = now
        request._written = written = written + 1
        server.tokens_generated += 1
        if request._in_prefilling:
            server.remove_from_prefilling(request)
        if (written < request.stop_at if request.sampling is None else _fork(server, request)) and not failed:
            server.cohort.join(request)
        elif not failed:
            _finish(server, request, now, False)
            finished.append(request)
    if failed:
        _finish_failed_rows(server, step, now, finished)


def _fork(server: Server, request: Request) -> bool:
    """Record the first token of all sequences of a request. Return whether one of them goes on."""
    group = group_of(request)
    before = group.generated
    goes_on = group.record_token(request._written, request._cached)
    server.tokens_generated += group.generated - before - 1
    request._blocks = group.blocks
    return goes_on


def _prefill_failed(step: Step, finished: list[Request]) -> bool:
    """Whether a call with chunks failed: because of a decoding row, or of a row that would get its token."""
    return any(request.outcome == "failed" for request in finished) or any(
        chunk.request.fails_at_token == chunk.request._written + 1 and chunk.tokens == chunk.request.pending
        for chunk in step.chunks
    )


def _finish_failed_rows(server: Server, step: Step, now: float, finished: list[Request]) -> None:
    """Finish all requests of a failed call."""
    prompts = [chunk.request for chunk in step.chunks]
    for request in prompts + (_clear_cohort(server) if step.decode_rows else []):
        if request._in_prefilling:
            server.remove_from_prefilling(request)
        _finish(server, request, now, True)
        finished.append(request)


def _finish(server: Server, request: Request, now: float, failed: bool) -> None:
    if not server.traits.finished_stay:
        server.running.remove(request)
    mark_finished(server, request, now, failed)


def mark_finished(server: Server, request: Request, now: float, failed: bool) -> None:
    """Record the end of a request that has left its queue."""
    if server.traits.frees_blocks_late:
        server.finished.push(request)
    request.outcome = "finished"
    if failed:
        request.outcome, request.reason = "failed", "the model call failed"
    elif server.limits.cut_off(request):
        request.outcome = "unanswered"
        request.reason = "stopped at max_generate_length without a final message to the client"
    request.status = "done"
    request.finish = request.client_end = now
    server.done.append(request)


def find_change(
    server: Server, before: Sequence[tuple[Any, ...]], requests: Sequence[Request]
) -> Optional[tuple[Request, str]]:
    """Return the first request, and its field, that no longer has the value of the client or of the server.

    `before`: the client fields of the requests when the client sent them. This is here because it is compiled here.
    """
    arrival_is_send_time = server.traits.arrival_is_send_time
    for request, old_fields in zip(requests, before):
        if request.client_fields() != old_fields:
            for name, old, new in zip(CLIENT_FIELDS, old_fields, request.client_fields()):
                if old != new and (name != "arrival" or request.follows is None):  # a follower is sent later
                    return request, "sent" if name == "arrival" else name
        if request.visible_at is None:
            continue
        if request.arrival != (request.sent if arrival_is_send_time else request.visible_at):
            return request, "arrival"
        most = server.limits.most_tokens(request)
        if (request.max_tokens, request.stop_at) != (most, min(request.output, most)):
            return request, "max_tokens" if request.max_tokens != most else "stop_at"
    return None
