"""What a model call changes: one part when it is launched, at the decision, and the other when it returns.

How it works. An engine has one step in flight, two (asynchronous scheduling) or more (pipeline parallelism). As soon as
fewer are out, the next one is decided; otherwise the loop waits for the oldest. With one step, every decision follows
the results of the last step. With two, a step is decided when the step before it starts on the device, and from idle
two steps are decided at once. With more, requests have rows of their own (`Step.verified`), because not all decode.

`launch`: cached tokens, the place of the sampled token, and the queues. With two steps in flight, the next decision
plans a decode of a token whose value is not known yet. A request whose last token by a length limit is in flight may be
foreseen: it leaves the cohort, stays in running, and keeps its blocks. A stop token is not foreseen: one more decode
runs.
`deliver`: the times of the tokens, the ends of requests and their blocks. The token of the additional decode is thrown
away. A preempted request gets its token in flight while it waits, and may end there.

Why it is exact. The scheduler of the real engine sees prompt + known tokens + places of tokens in flight, and here
`written` has both. It sees the end of a request, and so its blocks, only when the step returns. Members of the cohort
advance together at the decision, so that a decode step of all of them is O(1); what they get when the step returns is
the same for all but those that joined or left meanwhile, and the step lists these.
The prefix cache has a block when the values of its tokens were known at a decision of its request: with two steps in
flight, one step later than the step that computes the last of them (`Cohort.unknown_tokens`).
"""

from __future__ import annotations

from operator import attrgetter
from typing import Optional

from servesim.core import Request

from .cohort import NO_MEMBERS
from .draft_cohort import DraftCohort
from .groups import group_of
from .server import Server
from .shape import runs_as_decode
from .step import NO_REQUESTS, NO_ROWS, Step, Verified
from .work_totals import NO_WORK, KindTotals


def launch(server: Server, step: Step, end: float) -> None:
    """Count what a step computes, which will return at `end`. From now on the scheduler sees its requests after it."""
    step.end, step.rows = end, step.decode_rows
    count_kv_use(server, step)
    if step.decode_rows:
        launch_decodes(server, step)
    if step.chunks:
        _launch_chunks(server, step)
    if step.paused:
        for request in step.paused:
            server.cohort.join(request)
    step.before, server.flight = server.flight, step


def launch_decodes(server: Server, step: Step) -> None:
    """Count the decodes of a step."""
    cohort = server.cohort
    if server.draft_cohort is not None:
        server.draft_cohort.launch(step)
        return
    if server.overlaps:
        _note_known_tokens(server)
    cohort.flight = step
    cohort.in_flight += 1
    if cohort.new_members:
        step.joined, cohort.new_members = cohort.new_members, []
        if cohort.groups:
            step.joined = [request for request in step.joined for _ in range(request.sequences)]
    rows = [request for request in server.running if request._cohort is not None] if server.may_fail else NO_REQUESTS
    count_decodes(server, step)
    if server.may_fail:
        step.requests = step.ends + [request for request in rows if request not in step.ends]
    if cohort.known:  # after the next decode, the newest token of these is unknown again: not all advance alike
        assert server.prefix_cache is not None
        server.prefix_cache.update_all()


def _note_known_tokens(server: Server) -> None:
    """Note for the prefix cache which members of the cohort have no unknown token at this decision."""
    cohort, cache = server.cohort, server.prefix_cache
    cohort.known = NO_MEMBERS
    if cache is None:
        return
    if cohort.flight is not None and cohort.flight.left and cache.shares:
        cache.update_beside(cohort.flight.left)  # their last block is known when they end: after equal blocks
    before = server.flight
    if before is None:
        cohort.known = {request for request in server.running if request._cohort is not None}
    elif before.paused:
        cohort.known = set(before.paused)


def count_decodes(server: Server, step: Step) -> None:
    """Count a decode of all members of the cohort, and note which requests end with it."""
    cohort = server.cohort
    server.rules.launch_decodes(server)
    cohort.count_step()
    if cohort.next_finish <= cohort.steps:
        for request in cohort.pop_finishing():
            written = request.written  # above stop_at: the step before this one returns its last token
            if written <= request.stop_at and _ends(server, step, request, written):
                cohort.leave(request, in_flight=True)
        if server.ends_in_batch_order:
            _sort(step.ends)
    if cohort.groups:
        for request in cohort.advance_groups():
            _ends(server, step, request, request.written)


def _launch_chunks(server: Server, step: Step) -> None:
    """Count the chunks. Requests whose prompt is complete join the cohort."""
    if server.draft_cohort is not None:
        _launch_verified(server, server.draft_cohort, step)
        return
    sampled = []
    totals = server.work.start_prompts(step.decode_rows, step.context + step.decode_rows)
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
        is_last = written >= request.stop_at if request.sampling is None else not _fork(server, request)
        is_last = is_last or (server.may_fail and written == request.fails_at_token)
        if not (is_last and (_ends(server, step, request, written) or not server.overlaps)):
            server.cohort.join(request)
    step.sampled = sampled
    if server.ends_in_batch_order:
        _sort(step.ends)
    if server.may_fail:
        step.requests = [*step.requests, *(chunk.request for chunk in step.chunks)]


def _launch_verified(server: Server, cohort: DraftCohort, step: Step) -> None:
    """Count the chunks of a server with drafts. Those that complete a prompt, or decode, are rows of their own."""
    rows, alone, prompts = step.decode_rows, NO_WORK, step.chunks
    if step.decode_chunks:
        alone, prompts = KindTotals(), []
    for chunk in step.chunks:
        request, decodes = chunk.request, step.decode_chunks > 0 and runs_as_decode(chunk, server.rules)
        request._cached = cached = request._cached + chunk.tokens
        if decodes:
            alone.add_decode(chunk.drafts, cached)
        elif step.decode_chunks:
            prompts.append(chunk)
        if cached >= request.prompt + request._written:
            if request._in_prefilling:
                server.remove_from_prefilling(request)
            step.note_row(cohort.drafts.launch(chunk, server.overlaps, decodes))
    if alone.decode_rows:
        cohort.count_rows(alone.decode_rows, alone.decode_pairs, alone.draft_tokens, alone.draft_pairs, steps=not rows)
    if prompts:
        totals = server.work.start_prompts(rows + alone.decode_rows, step.context + rows + alone.decode_pairs)
        drafts, pairs = cohort.drafts_of(rows, step.context)
        totals.draft_tokens += drafts + alone.draft_tokens
        totals.draft_pairs += pairs + alone.draft_pairs
        for chunk in prompts:
            totals.add_prompt(chunk.tokens, chunk.request._cached)
    if server.may_fail:
        step.requests = [chunk.request for chunk in step.chunks]


def _fork(server: Server, request: Request) -> bool:
    """Record the first token of all sequences of a request. Return whether one of them goes on."""
    group = group_of(request)
    before = group.generated
    goes_on = group.record_token(request._written, request._cached)
    server.tokens_generated += group.generated - before - 1
    request._blocks = group.blocks
    return goes_on


def _sort(requests: list[Request]) -> None:
    """Put requests into the order of the batch."""
    if len(requests) > 1:
        requests.sort(key=attrgetter("_admission"))


def _ends(server: Server, step: Step, request: Request, written: int) -> bool:
    """Note that a step returns the last token of a request. Return whether the scheduler foresees that."""
    step.note_end(request)
    if server.may_fail and written == request.fails_at_token:
        step.fails = True
    return server.foresees_ends and written >= request.max_tokens


def set_start(step: Step, start: float) -> None:
    """Set the real start of a step: when it was launched, the device had not ended the step before it."""
    for chunk in step.chunks:
        request = chunk.request
        if request._cached == chunk.cached + chunk.tokens:  # its first chunk: it has waited until now
            request.queued += start - step.start
            if request.scheduled == step.start:
                request.scheduled = start
    step.start = start


def count_cut_step(server: Server, step: Step, now: float) -> None:
    """Count the seconds of a step up to a crash for its requests."""
    seconds = max(0.0, now - step.start)
    prompts = {chunk.request for chunk in step.chunks}
    for request in server.running:
        if request in prompts:
            request.prefilling += seconds
        elif request.in_flight:
            request.decoding += seconds


def deliver(server: Server, step: Step, now: float) -> list[Request]:
    """Record the results of the oldest step, which has returned, and return the finished requests."""
    newer = server.flight
    if newer is step:
        server.flight = None
    elif newer is not None:
        while newer.before is not None and newer.before is not step:
            newer = newer.before
        newer.before = None
    seconds = now - step.start if server.pipeline is None else server.pipeline.busy(step, now)
    if step.decode_rows:
        if server.draft_cohort is None:
            server.cohort.in_flight -= 1
        else:
            accepted = server.draft_cohort.deliver(step)
            server.tokens_generated += accepted
            server.kv_use.tokens += accepted - step.rows * server.draft_cohort.drafts.tokens
        deliver_rows(server, step, now)
        if step.left:
            for request in step.left:
                request.last_token = now
                request._in_flight -= 1
                request.decoding += server.cohort.busy - request._joined_busy_s
                request._joined_busy_s = server.cohort.busy
                if request.status != "running":  # preempted meanwhile: it decoded until now
                    request.state_since = now
    if step.chunks:
        _deliver_chunks(server, step, now, seconds)
    elif not step.decode_rows and step.plan.padding_rows:
        server.work.prefill.steps += 1
        server.work.prefill.seconds += seconds
    if step.paused:
        for request in step.paused:
            request._joined_busy_s = server.cohort.busy
    if server.draft_cohort is not None:
        if _has_rows(server, step):
            _deliver_verified(server, server.draft_cohort, step, now, seconds)
        if server.ends_in_batch_order:
            _sort(step.ends)
    finished = _finished(server, step) if step.ends or step.fails else NO_REQUESTS
    server.rules.process_results(server, step, finished, now)
    return finished


def deliver_rows(server: Server, step: Step, now: float) -> None:
    """Record the tokens of a decode."""
    cohort, gaps, old_members = server.cohort, server.token_gaps, step.rows
    for request in step.joined:
        assert request.last_token is not None
        old_members -= 1
        gaps.add(now - request.last_token, 1)
    if old_members:
        gaps.add(now - cohort.last_end, old_members)
    server.tokens_generated += step.rows
    cohort.busy += now - step.start
    cohort.last_end = now


def _deliver_chunks(server: Server, step: Step, now: float, seconds: float) -> None:
    if step.kind != "decode":
        (server.work.mixed if step.decode_rows or step.decode_chunks else server.work.prefill).seconds += seconds
    decoding = {row.request for row in step.verified if row.decodes} if step.decode_chunks else NO_MEMBERS
    for chunk in step.chunks:
        request = chunk.request
        if request.status == "done" or request in decoding:  # aborted or failed meanwhile, or not a prompt
            continue
        if server.pipeline is None:
            request.prefilling += seconds
        else:  # the step before may have had a chunk of it, too
            request.prefilling += max(0.0, now - max(step.start, request.state_since))
            request.state_since = now
        if request.status != "running":  # preempted meanwhile: its prompt was computed until now
            request.state_since = now
    for request in step.sampled:
        _note_token(server, request, now)
        request._in_flight -= 1
        request._joined_busy_s = server.cohort.busy
    server.tokens_generated += len(step.sampled)


def _note_token(server: Server, request: Request, now: float) -> None:
    """Note that a request gets its next tokens."""
    time: Optional[float] = now  # one object for both
    if request.first_token is None:
        request.first_token = time
    else:
        assert request.last_token is not None
        server.token_gaps.add(now - request.last_token, 1)
    request.last_token = time


def _has_rows(server: Server, step: Step) -> bool:
    """Whether requests with rows of their own have tokens in a step, or join, or the prefix cache needs every token."""
    newest, cache = server.flight, server.prefix_cache
    if step.verified or step.decode_chunks or (newest is not None and newest.verified):
        return True
    return server.overlaps and cache is not None and cache.shares


def _deliver_verified(server: Server, cohort: DraftCohort, step: Step, now: float, seconds: float) -> None:
    """Record the tokens of rows of their own with drafts: the accepted ones and one more. Some requests join."""
    if step.decode_chunks and not step.decode_rows:
        cohort.busy += seconds
    for row in step.verified:
        _deliver_row(server, cohort, step, row, now)
    cache, newest = server.prefix_cache, server.flight
    if server.overlaps and cache is not None and cache.shares:
        for request in server.running:
            cache.note_known(request)
    rows = step.verified if not server.overlaps else NO_ROWS if newest is None else newest.verified
    for row in rows:
        request = row.request
        if request.status == "running" and request._cohort is None and request.drafts == cohort.drafts.tokens:
            cohort.join(request)


def _deliver_row(server: Server, cohort: DraftCohort, step: Step, row: Verified, now: float) -> None:
    drafts, cache, request = cohort.drafts, server.prefix_cache, row.request
    is_running, accepted = request.status == "running", drafts.returned(row)
    tokens, rejected = 1 + accepted, row.drafts - accepted
    if is_running:
        request._cached -= rejected
        server.kv_use.tokens -= rejected
    else:
        request.state_since = now
    request._written -= rejected
    request._in_flight -= 1 + row.drafts
    excess = request._written - request._in_flight - request.stop_at
    if excess > 0:
        tokens -= excess
        request._written -= excess
        drafts.lost += accepted - min(tokens, accepted)
    _note_token(server, request, now)
    if row.decodes:
        request.decoding += now - step.start
    server.tokens_generated += tokens
    if is_running and server.overlaps and cache is not None and not cache.shares:
        cache.note_known(request)
    if excess >= 0:
        step.note_end(request)
    elif is_running and not server.overlaps:
        request.drafts = drafts.offered(request)
    if request._cohort is not None:
        request._joined_busy_s = cohort.busy
        cohort.settle(request, rejected)


def _finished(server: Server, step: Step) -> list[Request]:
    """Return the requests that end with a step."""
    finished = step.requests if step.fails else step.ends
    if server.may_fail:  # also the step before it, and then some of them are done
        finished = [request for request in finished if request.status != "done"]
        if step.fails and server.ends_in_batch_order:
            _sort(finished)
    if not server.overlaps and server.prefix_cache is not None:  # it sees them as requests that have left
        for request in finished:
            if request._cohort is not None:
                server.cohort.leave(request)
    return finished


def count_kv_use(server: Server, step: Step) -> None:
    """Count the blocks and the tokens that requests hold during a model call."""
    use, tokens = server.kv_use, step.decode_rows * server.cohort.width
    for chunk in step.chunks:
        tokens += chunk.tokens
    use.count(tokens, server.pool.held)
    if server.view.has_groups:
        use.shared_sum += sum(
            [group_of(request).shared_blocks for request in server.running if request.sampling is not None]
        )
