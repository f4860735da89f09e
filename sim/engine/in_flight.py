"""Steps in flight: the next step is decided before the last one has returned (asynchronous scheduling).

How it works. At most two steps are out. As soon as fewer are out, the next one is decided; if two are out, or if there
is nothing to run, the loop waits for the older one. So a step is decided when the step before it starts on the device,
and from idle two steps are decided at once. What follows from a model call is split in two parts.

`launch`, at the decision: cached tokens, the place of the sampled token, and the queues. The next decision plans a
decode of a token whose value is not known yet. A request whose last token by a length limit is in flight is foreseen:
it leaves the cohort, stays in running, and keeps its blocks. A stop token is not foreseen: one more decode runs.
`deliver`, when the step returns: the times of the tokens, the ends of requests and their blocks. The token of the
additional decode is thrown away. A preempted request gets its token in flight while it waits, and may end there.

Why it is exact. The scheduler of the real engine sees prompt + known tokens + places of tokens in flight, and here
`written` has both. It sees the end of a request, and so its blocks, only when the step returns. Members of the cohort
advance together at the decision, so that a decode step of all of them is O(1); what they get when the step returns is
the same for all but those that joined or left meanwhile, and a step in flight lists these.
The prefix cache has a block when the values of its tokens were known at a decision of its request: one step later
than the step that computes the last of them (`Cohort.unknown_tokens`).
"""

from __future__ import annotations

from operator import attrgetter

from servesim.core import Request

from .cohort import NO_MEMBERS
from .results import count_kv_use, mark_finished, positions
from .server import Server
from .step import NO_REQUESTS, Step, StepInFlight


def launch(server: Server, step: Step, end: float) -> StepInFlight:
    """Count what a step computes, which will return at `end`. From now on the scheduler sees its requests after it."""
    flight, is_only_one = StepInFlight(step, step.start, end, step.decode_rows), server.flight is None
    count_kv_use(server, step)
    if server.may_fail:
        flight.requests = [chunk.request for chunk in step.chunks]
        if step.decode_rows:
            flight.requests += [request for request in server.running if request._cohort is not None]
    if step.decode_rows:
        launch_decodes(server, flight)
    if step.chunks:
        _launch_chunks(server, flight)
    if step.paused:
        for request in step.paused:
            server.cohort.join(request)
    _sort(flight.ends)
    server.flight = flight
    if is_only_one:
        keep_cut_prompts(server, flight)
    return flight


def launch_decodes(server: Server, flight: StepInFlight) -> None:
    """Count a decode step of the cohort."""
    cohort, before, cache = server.cohort, server.flight, server.prefix_cache
    if cohort.flight is not None and cohort.flight.left and cache is not None:
        cache.update_beside(cohort.flight.left)  # their last block is known when they end: after equal blocks
    cohort.flight = flight
    cohort.known = NO_MEMBERS
    if cache is not None:
        if before is None:
            cohort.known = {request for request in server.running if request._cohort is not None}
        elif before.step.paused:
            cohort.known = set(before.step.paused)
    cohort.in_flight += 1
    if cohort.new_members:
        flight.joined, cohort.new_members = cohort.new_members, []
    _count_decodes(server, flight, 1)
    server.flight = flight
    if cohort.known:  # after the next decode, the newest token of these is unknown again: not all advance alike
        assert cache is not None
        cache.update_all()


def _count_decodes(server: Server, flight: StepInFlight, steps: int) -> None:
    """Count decode steps, the last of which is in flight, and note which requests end there."""
    cohort, view = server.cohort, server.view
    if view.ended:
        view.ended = []
    cohort.count_steps(steps)
    if cohort.next_finish <= cohort.steps:
        for request in cohort.pop_finishing():
            written = request.written  # above stop_at: the step before this one returns its last token
            if written <= request.stop_at and _ends(server, flight, request, written):
                cohort.leave(request, in_flight=True)
        _sort(flight.ends)


def launch_further(server: Server, flight: StepInFlight, steps: int, start: float, end: float) -> None:
    """Count further decode steps of the same rows: the last one is in flight, and the newest one until now returns."""
    joined, first_start, first_end = flight.joined, flight.start, flight.end
    flight.joined, flight.start, flight.end = NO_REQUESTS, start, end
    server.cohort.known = NO_MEMBERS
    _count_decodes(server, flight, steps)
    _deliver_rows(server, joined, flight.rows, first_end, first_end - first_start)


def _launch_chunks(server: Server, flight: StepInFlight) -> None:
    """Count the chunks. Requests whose prompt is complete join the cohort."""
    step, sampled = flight.step, []
    totals = server.work.start_prompts(step.decode_rows, step.context)
    for chunk in step.chunks:
        request, tokens = chunk.request, chunk.tokens
        request._cached = cached = request._cached + tokens
        totals.add_prompt(tokens, cached)
        if cached < request.prompt + request._written:
            continue
        request._written = written = request._written + 1
        request._in_flight = 1
        sampled.append(request)
        if request._in_prefilling:
            server.remove_from_prefilling(request)
        is_last = written >= request.stop_at or (server.may_fail and written == request.fails_at_token)
        if not (is_last and _ends(server, flight, request, written)):
            server.cohort.join(request)
    flight.sampled = sampled


def _sort(requests: list[Request]) -> None:
    """Put requests into the order of the batch."""
    if len(requests) > 1:
        requests.sort(key=attrgetter("_admission"))


def _ends(server: Server, flight: StepInFlight, request: Request, written: int) -> bool:
    """Note that a step returns the last token of a request. Return whether the scheduler knows that."""
    flight.note_end(request)
    if server.may_fail and written == request.fails_at_token:
        flight.fails = True
    return server.traits.foresees_ends and written >= request.max_tokens


def set_start(flight: StepInFlight, start: float) -> None:
    """Set the real start of a step: when it was launched, the device had not ended the step before it."""
    step = flight.step
    for chunk in step.chunks:
        request = chunk.request
        if request._cached == chunk.cached + chunk.tokens:  # its first chunk: it has waited until now
            request.queued += start - step.start
            if request.scheduled == step.start:
                request.scheduled = start
    flight.start = step.start = start


def deliver(server: Server, flight: StepInFlight, now: float) -> list[Request]:
    """Record the results of a step that has returned, and return the finished requests."""
    if flight is server.flight:
        server.flight = None
    if flight.late_blocks:
        server.pool.free += flight.late_blocks
        server.pool.lost -= flight.late_blocks
    step, seconds = flight.step, now - flight.start
    if step.decode_rows:
        server.cohort.in_flight -= 1
        _deliver_rows(server, flight.joined, flight.rows, now, seconds)
        for request in flight.left:
            request.last_token = now
            request._in_flight -= 1
            request.decoding += server.cohort.busy - request._joined_busy_s
    if step.chunks:
        _deliver_chunks(server, flight, now, seconds)
    elif not step.decode_rows and step.plan.padding_rows:
        server.work.prefill.steps += 1
        server.work.prefill.seconds += seconds
    if step.paused:
        for request in step.paused:
            request._joined_busy_s = server.cohort.busy
    finished = _finish(server, flight, now) if flight.fails or flight.ends or flight.sampled else []
    if server.flight is not None:
        keep_cut_prompts(server, server.flight)
    return finished


def keep_cut_prompts(server: Server, flight: StepInFlight) -> None:
    """Let a radix cache take over prompts that a step computes in part. SGLang does so before the next decision."""
    cache = server.prefix_cache
    if cache is not None and cache.keeps_results and len(server.prefilling):
        for chunk in flight.step.chunks:
            if chunk.request._in_prefilling:
                server.kv_use.tokens += cache.keep(chunk.request, chunk.request._cached)


def _deliver_rows(server: Server, joined: list[Request], rows: int, now: float, seconds: float) -> None:
    """Record the tokens of a decode step."""
    cohort, gaps, old_members = server.cohort, server.token_gaps, rows
    for request in joined:
        assert request.last_token is not None
        old_members -= 1
        gaps.add(now - request.last_token, 1)
    if old_members:
        assert cohort.last_end is not None
        gaps.add(now - cohort.last_end, old_members)
    server.tokens_generated += rows
    cohort.busy += seconds
    cohort.last_end = now


def receive_decodes(server: Server, rows: int, steps: int, start: float, end: float) -> None:
    """Record equal decode steps, in which no request joins, leaves or ends, that ran one after another."""
    server.tokens_generated += rows * steps
    server.cohort.busy += end - start
    server.cohort.last_end = end


def _deliver_chunks(server: Server, flight: StepInFlight, now: float, seconds: float) -> None:
    step = flight.step
    server.view.last_prefill = (flight.start, now)
    (server.work.mixed if step.decode_rows else server.work.prefill).seconds += seconds
    for chunk in step.chunks:
        chunk.request.prefilling += seconds
    for request in flight.sampled:
        if request.first_token is None:
            request.first_token = now
        else:
            assert request.last_token is not None
            server.token_gaps.add(now - request.last_token, 1)
        request.last_token = now
        request._in_flight -= 1
        request._joined_busy_s = server.cohort.busy
    server.tokens_generated += len(flight.sampled)


def _finish(server: Server, flight: StepInFlight, now: float) -> list[Request]:
    """Finish requests in the order of the batch, and free their blocks unless a later plan does."""
    finished, cache = flight.requests if flight.fails else flight.ends, server.prefix_cache
    if server.may_fail:  # also the step before it, and then some of them are done
        finished = [request for request in finished if request.status != "done"]
    if flight.fails:
        _sort(finished)
    if finished and server.traits.lists_ended:
        running = [request for request in finished if request.status == "running"]  # a failed one may wait
        ended = positions(server.running, running)
        server.view.ended = ended + server.view.ended if server.view.ended else ended
    if cache is not None and cache.keeps_results:  # in SGLang, prompts are first in a batch
        for request in flight.sampled:
            if request in finished:
                _finish_one(server, request, now, flight.fails)
            else:
                known = request.prompt + request.written - request.in_flight - 1  # without the token of this step
                server.kv_use.tokens += cache.keep(request, known)
    for request in finished:
        if request.status != "done":
            _finish_one(server, request, now, flight.fails)
    return finished


def _finish_one(server: Server, request: Request, now: float, failed: bool) -> None:
    server.take_out(request, server.traits.finished_stay)
    request.last_token = now
    mark_finished(server, request, now, failed)
    cache, extra = server.prefix_cache, max(0, request._cached - (request.prompt + request._written - 1))
    if extra:
        if server.traits.frees_extra_token_late:
            _keep_extra_block(server, request)
        elif cache is not None and cache.keeps_results:
            extra = 0  # the cache knows it
    if not server.traits.frees_blocks_late:
        server.free_blocks(request, extra)


def _keep_extra_block(server: Server, request: Request) -> None:
    """Keep the block that only the token after the last one uses, until its step returns."""
    late = request._blocks - server.pool.blocks_for(request._cached - 1)
    request._blocks -= late
    server.pool.lost += late
    assert server.flight is not None
    server.flight.late_blocks += late
