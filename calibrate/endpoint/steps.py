"""Steps of a server as its clients see them: a step ends when the tokens it wrote arrive.

Rows that decode together get tokens in the same steps: the median of their arrival times is the step's end. A prompt's
step ends with its first token and began with the end of the step before it, or, on an idle server, when the prompt was
sent, which includes the front end's time. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple, Optional

import numpy as np
from numpy.typing import NDArray
from servesim.calibrate.client.load_generator import Sending
from servesim.core import Shape

from .answers import Taken

Array = NDArray[np.float64]

LEAST = 4  # steps that a stretch of steady decoding must have
PARTS = 3  # that a stretch is cut into: its context grows
NEAR = 0.4  # of the fastest step: tokens nearer to each other than this are of one step
LUMP = 0.1  # of the usual: a step that short did not take its time, its token was kept back
STRETCHED = 1.3  # times the usual: a step of a busy server that did something beside the decodes


class Seen(NamedTuple):
    """A kind of step, how long it took, and how often that was seen."""

    point: str
    kind: str  # prefill | decode | mixed
    shape: Shape
    seconds: float  # the middle of what was seen
    idle: bool = False  # begun by a request on an idle server: the front end's time is in it
    part: int = 0  # of a stretch
    single: tuple[float, ...] = ()  # every step of it
    blur: float = 0.0  # by what late packets may have put it wrong


class Beat(NamedTuple):
    """Steps in which the same rows decoded."""

    rows: int
    ends: Array
    context: Array  # cached tokens that each of them read


class Late(NamedTuple):
    """How a busy front end treated a request."""

    calls: int  # model calls that ended between its sending and its own
    end: float  # steps from its last token to the end of its stream


def beat(members: Sequence[Sending], begin: float, end: float) -> Optional[Beat]:
    """Return the steps between two instants in which all of these wrote; None where they did not keep step."""
    firsts = [int(np.searchsorted(s.times, begin, side="right")) for s in members]
    counts = [int(np.searchsorted(s.times, end, side="right")) - first for s, first in zip(members, firsts)]
    count = min(counts)
    if count < LEAST or max(counts) - count > 2:
        return None
    ends = np.median([s.times[first : first + count] for s, first in zip(members, firsts)], axis=0)
    start = sum(prompt_of(s) + first - 1 for s, first in zip(members, firsts))
    return Beat(len(members), ends, start + len(members) * np.arange(count, dtype=float))


def slope(ends: Array) -> float:
    """Return the time of a step from the ends of similar ones: the median of all slopes, which few strays do not move.

    It is better than the median of the differences, since a late packet shortens the next step.
    """
    first, last = np.triu_indices(len(ends), 1)
    return float(np.median((ends[last] - ends[first]) / (last - first)))


def prompt_of(sending: Sending) -> int:
    """Return the length of a prompt, as the server counts it if it does."""
    return sending.request.prompt if sending.prompt is None else sending.prompt


def stretches(sendings: Sequence[Sending]) -> list[Beat]:
    """Return the stretches of time in which the same rows decoded."""
    marks = sorted({time for s in sendings for time in (s.times[0], s.times[-1])})
    found = []
    for begin, end in zip(marks, marks[1:]):
        members = [s for s in sendings if s.times[0] <= begin and s.times[-1] >= end]
        steady = beat(members, begin, end) if members else None
        if steady is not None:
            found.append(steady)
    return found


def decodes(taken: Taken) -> list[Seen]:
    """Return the decode steps of a load."""
    seen = []
    for steady in stretches(taken.sendings):
        took = np.diff(steady.ends)
        if np.mean(took < LUMP * np.median(took)) > 0.3 or not np.median(took) > 0:
            continue  # a stream that came in lumps
        parts = max(1, min(PARTS, len(took) // LEAST))
        for part, places in enumerate(np.array_split(np.arange(len(took)), parts)):
            read = round(float(np.median(steady.context[places + 1])))
            shape = Shape(decode_rows=steady.rows, decode_live=steady.rows, context=read)
            middle = slope(steady.ends[places[0] : places[-1] + 2])
            seen.append(Seen(taken.point.name, "decode", shape, middle, False, part, tuple(took[places])))
    return seen


def prompts(sendings: Sequence[Sending], **decoding: int) -> Shape:
    """Return the shape of a step with whole prompts."""
    lengths = [prompt_of(sending) for sending in sendings]
    tokens = sum(lengths)
    squares = sum(length * length for length in lengths)
    return Shape(len(lengths), tokens, tokens, squares, **decoding)


def burst(taken: Taken, fastest: float = 0.0) -> list[Seen]:
    """Return the prompt steps of a burst, or of a single request.

    The first has the front end's time in it and counts only if it is alone.
    """
    inside = sorted(taken.sendings, key=lambda sending: sending.times[0])
    groups: list[list[Sending]] = [[inside[0]]]
    for before, sending in zip(inside, inside[1:]):
        if sending.times[0] - before.times[0] > NEAR * fastest:
            groups.append([])
        groups[-1].append(sending)
    name = taken.point.name
    if len(groups) == 1:
        took = groups[0][-1].times[0] - min(s.sent or 0.0 for s in inside)
        return [Seen(name, "prefill", prompts(inside), took, True, 0, (took,))]
    ends, seen, place = np.array([group[0].times[0] for group in groups]), [], 1
    for _, alike in groupby(groups[1:], key=len):
        run = list(alike)
        some = ends[place - 1 : place + len(run)]
        seen.append(Seen(name, "prefill", prompts(run[0]), slope(some), False, 0, tuple(np.diff(some))))
        place += len(run)
    return seen


def busy(taken: Taken, fastest: float) -> tuple[list[Seen], list[Late]]:
    """Return what prompts took on a server that was decoding, and how they were let in."""
    background = [s for s in taken.sendings if s.request.output > 1]
    probes = [s for s in taken.sendings if s.request.output == 1]
    steady = beat(background, max(s.times[0] for s in background), min(s.times[-1] for s in background))
    if steady is None:
        return [], []
    usual = float(np.median(np.diff(steady.ends)))
    looks = [look(taken.point.name, probe, steady, usual, fastest) for probe in probes]
    found = [one for one in looks if one is not None]
    return [seen for seen, _ in found], [late for _, late in found]


def look(point: str, probe: Sending, steady: Beat, usual: float, fastest: float) -> Optional[tuple[Seen, Late]]:
    """Return the step of one prompt, alone between two decodes or together with one, and how late it was."""
    assert probe.sent is not None
    first, near = probe.times[0], NEAR * fastest
    place = int(np.searchsorted(steady.ends, first - near))
    if not 1 <= place < len(steady.ends) or probe.sent < steady.ends[0]:
        return None
    start, end = float(steady.ends[place - 1]), float(steady.ends[place])
    sent = int(np.searchsorted(steady.ends, probe.sent))
    over = 0.0 if probe.end is None else (probe.end - first) / usual
    late = Late(place - sent, over)
    if np.any(np.diff(steady.ends[max(sent, 1) - 1 : place]) > STRETCHED * usual):
        return None  # others' prompts, or earlier chunks of its own: not one step
    if abs(first - end) > near:
        return Seen(point, "prefill", prompts([probe]), first - start, False, 0, (first - start,)), late
    read = int(steady.context[place])
    shape = prompts([probe], decode_rows=steady.rows, decode_live=steady.rows, context=read)
    return Seen(point, "mixed", shape, end - start, False, 0, (end - start,)), late


def steps(loads: Sequence[Taken]) -> tuple[list[Seen], list[Late]]:
    """Return the steps that can be seen in loads which went well, and how a busy front end let requests in."""
    seen: list[Seen] = []
    for taken in loads:
        if taken.point.kind in ("single", "batch"):
            seen += decodes(taken)
        if taken.point.kind == "single":
            seen += burst(taken)
    alone = [step for step in seen if step.kind == "decode" and step.shape.decode_rows == 1]
    fastest = float(np.median([step.seconds for step in alone or seen])) if seen else 0.005
    jitter = float(np.median([abs(time - step.seconds) for step in alone for time in step.single])) if alone else 0.0
    probes: list[Seen] = []
    late: list[Late] = []
    for taken in loads:
        if taken.point.kind == "burst":
            seen += burst(taken, fastest)
        elif taken.point.kind == "busy":
            some, lags = busy(taken, fastest)
            probes, late = probes + some, late + lags
    # A server runs prompts together with decodes or by themselves: what looks like the rarer way is late packets.
    kinds = [probe.kind for probe in probes]
    usual = max(set(kinds), key=kinds.count, default="")
    return together([*seen, *(probe for probe in probes if probe.kind == usual)], jitter), late


def together(seen: Sequence[Seen], jitter: float) -> list[Seen]:
    """Put repetitions together; the lower middle, as a first one may have been slow for reasons of its own."""
    groups: dict[tuple[object, ...], list[Seen]] = {}
    for step in seen:
        shape = step.shape
        key = (step.point, step.kind, step.idle, step.part, shape.prefill_rows, shape.prefill_tokens, shape.decode_rows)
        if step.seconds > 0:
            groups.setdefault(key, []).append(step)
    found = []
    for group in groups.values():
        group.sort(key=lambda step: step.seconds)
        middle, single = group[(len(group) - 1) // 2], tuple(time for step in group for time in step.single)
        blur = 1.5 * jitter / max(1, len(middle.single)) / len(group) ** 0.5
        found.append(middle._replace(single=single, blur=blur))
    return found
