"""Steps of a server, derived from client-side token times: a step ends when its tokens arrive.

Rows that decode together get tokens in the same steps. The median of their arrival times is the end of the step.
A prefill step ends with the first token. It starts at the end of the step before it. On an idle server it starts when
the request is sent, and includes the front end's time. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple, Optional

import numpy as np
from numpy.typing import NDArray
from servesim.calibrate.client.load_generator import SentRequest
from servesim.core import Shape

from .answers import LoadResult

Array = NDArray[np.float64]

MIN_STEPS = 4  # per stretch of steady decoding
MAX_SECTIONS = 3  # per stretch: its context grows
SAME_STEP_RATIO = 0.4  # of the fastest step: tokens closer together belong to one step
BUFFERED_RATIO = 0.1  # of the usual step: a shorter step means that the server held its token back
BUSY_RATIO = 1.3  # of the usual step: a longer step did other work besides the decode


class ObservedStep(NamedTuple):
    """A step shape and its measured times."""

    point: str
    kind: str  # prefill | decode | mixed
    shape: Shape
    seconds: float  # median of the samples
    idle: bool = False  # started by a request on an idle server: includes the front end's time
    section: int = 0  # of a stretch
    samples: tuple[float, ...] = ()  # seconds of every such step
    jitter: float = 0.0  # error of `seconds` from late packets


class DecodeStretch(NamedTuple):
    """Consecutive steps in which the same rows decoded."""

    rows: int
    ends: Array
    context: Array  # cached tokens read by each step


def decode_stretch(members: Sequence[SentRequest], begin: float, end: float) -> Optional[DecodeStretch]:
    """Return the steps between two times that gave a token to every member; None if their token counts differ."""
    firsts = [int(np.searchsorted(s.times, begin, side="right")) for s in members]
    counts = [int(np.searchsorted(s.times, end, side="right")) - first for s, first in zip(members, firsts)]
    count = min(counts)
    if count < MIN_STEPS or max(counts) - count > 2:
        return None
    ends = np.median([s.times[first : first + count] for s, first in zip(members, firsts)], axis=0)
    start = sum(prompt_length(s) + first - 1 for s, first in zip(members, firsts))
    return DecodeStretch(len(members), ends, start + len(members) * np.arange(count, dtype=float))


def with_all_tokens(sent: SentRequest) -> SentRequest:
    """Return a response with a time for every token, also if the server joined tokens without saying which ones.

    A joined token arrives one step late, with the next one: it belongs to the event after the longest pause.
    """
    counts, pauses = np.ones(len(sent.times), int), np.diff(sent.times)
    if not len(pauses):
        return sent
    for _ in range(sent.written - len(sent.times)):
        counts[1 + int(np.argmax(pauses / counts[1:]))] += 1
    return replace(sent, times=np.repeat(sent.times, counts).tolist())


def median_slope(ends: Array) -> float:
    """Return the time per step from the ends of similar steps: the median of all slopes (Theil-Sen).

    It is better than the median of the differences, because a late packet shortens the next step.
    """
    first, last = np.triu_indices(len(ends), 1)
    return float(np.median((ends[last] - ends[first]) / (last - first)))


def prompt_length(sent: SentRequest) -> int:
    """Return the prompt length, as counted by the server if it reports it."""
    return sent.request.prompt if sent.prompt_tokens is None else sent.prompt_tokens


def decode_stretches(sent_requests: Sequence[SentRequest]) -> list[DecodeStretch]:
    """Return the stretches of time in which the same rows decoded."""
    marks = sorted({time for s in sent_requests for time in (s.times[0], s.times[-1])})
    stretches = []
    for begin, end in zip(marks, marks[1:]):
        members = [s for s in sent_requests if s.times[0] <= begin and s.times[-1] >= end]
        stretch = decode_stretch(members, begin, end) if members else None
        if stretch is not None:
            stretches.append(stretch)
    return stretches


def decode_steps(load: LoadResult) -> list[ObservedStep]:
    """Return the decode steps of a load."""
    steps = []
    for stretch in decode_stretches(load.sent_requests):
        times = np.diff(stretch.ends)
        if np.mean(times < BUFFERED_RATIO * np.median(times)) > 0.3 or not np.median(times) > 0:
            continue  # the server buffered the stream
        sections = max(1, min(MAX_SECTIONS, len(times) // MIN_STEPS))
        for section, index in enumerate(np.array_split(np.arange(len(times)), sections)):
            context = round(float(np.median(stretch.context[index + 1])))
            shape = Shape(decode_rows=stretch.rows, decode_live=stretch.rows, context=context)
            seconds = median_slope(stretch.ends[index[0] : index[-1] + 2])
            steps.append(ObservedStep(load.point.name, "decode", shape, seconds, False, section, tuple(times[index])))
    return steps


def prefill_shape(sent_requests: Sequence[SentRequest], **decoding: int) -> Shape:
    """Return the shape of a step with whole prompts."""
    lengths = [prompt_length(sent) for sent in sent_requests]
    tokens = sum(lengths)
    squares = sum(length * length for length in lengths)
    return Shape(len(lengths), tokens, tokens, squares, **decoding)


def prefill_steps(load: LoadResult, fastest: float = 0.0) -> list[ObservedStep]:
    """Return the prefill steps of a burst or of a single request.

    The first step includes the front end's time, so it is returned only if there is no other.
    """
    by_time = sorted(load.sent_requests, key=lambda sent: sent.times[0])
    groups: list[list[SentRequest]] = [[by_time[0]]]
    for before, sent in zip(by_time, by_time[1:]):
        if sent.times[0] - before.times[0] > SAME_STEP_RATIO * fastest:
            groups.append([])
        groups[-1].append(sent)
    name = load.point.name
    if len(groups) == 1:
        seconds = groups[0][-1].times[0] - min(s.sent_at or 0.0 for s in by_time)
        return [ObservedStep(name, "prefill", prefill_shape(by_time), seconds, True, 0, (seconds,))]
    ends, steps, index = np.array([group[0].times[0] for group in groups]), [], 1
    for _, equal_rows in groupby(groups[1:], key=len):
        run = list(equal_rows)
        run_ends = ends[index - 1 : index + len(run)]
        times, shape = tuple(np.diff(run_ends)), prefill_shape(run[0])
        steps.append(ObservedStep(name, "prefill", shape, median_slope(run_ends), False, 0, times))
        index += len(run)
    return steps


def busy_steps(load: LoadResult, fastest: float) -> list[ObservedStep]:
    """Return the steps of prompts that arrived while the server was decoding."""
    background = [s for s in load.sent_requests if s.request.output > 1]
    probes = [s for s in load.sent_requests if s.request.output == 1]
    stretch = decode_stretch(background, max(s.times[0] for s in background), min(s.times[-1] for s in background))
    usual = 0.0 if stretch is None else float(np.median(np.diff(stretch.ends)))
    if stretch is None or usual == 0.0:  # 0: the server buffered the streams
        return []
    steps = [probe_step(load.point.name, probe, stretch, usual, fastest) for probe in probes]
    return [step for step in steps if step is not None]


def probe_step(
    point: str, probe: SentRequest, stretch: DecodeStretch, usual: float, fastest: float
) -> Optional[ObservedStep]:
    """Return the step of one prompt, either between two decode steps or mixed with one."""
    assert probe.sent_at is not None
    first, tolerance = probe.times[0], SAME_STEP_RATIO * fastest
    index = int(np.searchsorted(stretch.ends, first - tolerance))
    if not 1 <= index < len(stretch.ends) or probe.sent_at < stretch.ends[0]:
        return None
    start, end = float(stretch.ends[index - 1]), float(stretch.ends[index])
    sent = int(np.searchsorted(stretch.ends, probe.sent_at))
    if np.any(np.diff(stretch.ends[max(sent, 1) - 1 : index]) > BUSY_RATIO * usual):
        return None  # steps with other prompts, or with earlier chunks of this one
    if abs(first - end) > tolerance:
        return ObservedStep(point, "prefill", prefill_shape([probe]), first - start, False, 0, (first - start,))
    context = int(stretch.context[index])
    shape = prefill_shape([probe], decode_rows=stretch.rows, decode_live=stretch.rows, context=context)
    return ObservedStep(point, "mixed", shape, end - start, False, 0, (end - start,))


def observed_steps(loads: Sequence[LoadResult]) -> list[ObservedStep]:
    """Return the steps that show in the token times of loads."""
    loads = [replace(load, sent_requests=[with_all_tokens(sent) for sent in load.sent_requests]) for load in loads]
    steps: list[ObservedStep] = []
    for load in loads:
        if load.point.kind in ("single", "batch"):
            steps += decode_steps(load)
        if load.point.kind == "single":
            steps += prefill_steps(load)
    one_row = [step for step in steps if step.kind == "decode" and step.shape.decode_rows == 1]
    fastest = float(np.median([step.seconds for step in one_row or steps])) if steps else 0.005
    deviations = [abs(time - step.seconds) for step in one_row for time in step.samples]
    jitter = float(np.median(deviations)) if deviations else 0.0
    probes: list[ObservedStep] = []
    for load in loads:
        if load.point.kind == "burst":
            steps += prefill_steps(load, fastest)
        elif load.point.kind == "busy":
            probes += busy_steps(load, fastest)
    # A server runs prompts either mixed with decodes or in separate steps. The rarer kind comes from late packets.
    kinds = [probe.kind for probe in probes]
    usual = max(set(kinds), key=kinds.count, default="")
    return merge_repeats([*steps, *(probe for probe in probes if probe.kind == usual)], jitter)


def merge_repeats(steps: Sequence[ObservedStep], jitter: float) -> list[ObservedStep]:
    """Merge repeated steps. The result has the lower median, because a first repeat can be slow."""
    groups: dict[tuple[object, ...], list[ObservedStep]] = {}
    for step in steps:
        shape, key = step.shape, (step.point, step.kind, step.idle, step.section)
        if step.seconds > 0:
            rows = (shape.prefill_rows, shape.prefill_tokens, shape.decode_rows)
            groups.setdefault((*key, *rows), []).append(step)
    merged = []
    for group in groups.values():
        group.sort(key=lambda step: step.seconds)
        middle, samples = group[(len(group) - 1) // 2], tuple(time for step in group for time in step.samples)
        error = 1.5 * jitter / max(1, len(middle.samples)) / len(group) ** 0.5
        merged.append(middle._replace(samples=samples, jitter=error))
    return merged
