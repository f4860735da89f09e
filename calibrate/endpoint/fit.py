"""The profile of a black-box server: its observed steps, fitted as the steps of a probe.

A step that a request starts on an idle server includes the time of the front end. Prompts of bursts and of a busy
server do not, so both together show that time. It is subtracted before the fit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import numpy as np
from servesim.calibrate.probe.fit import fit_cost
from servesim.calibrate.probe.fit_errors import in_measured_range, measured_range
from servesim.calibrate.probe.fitted_profile import noise_quantiles, profile_from
from servesim.calibrate.probe.sample_set import Samples, grouped, write_samples
from servesim.costs.device_profile import Profile
from servesim.costs.parts import PartsCost
from servesim.version import __version__

from .load_plan import Point
from .measure import EndpointClient, Measurements
from .steps import ObservedStep

SOURCE = (
    "endpoint: calibration loads over HTTP, steps from the clients' token times; includes host, network and padding"
)
USAGE = "costs are per live row and token: simulate with engine.prefill_buckets [] and engine.decode_buckets [1]"


ADVICE = (
    "measure again when server and client have free processors, with more --rounds and --output-tokens; a proxy that "
    "buffers the stream hides the steps"
)


class NotEnoughData(RuntimeError):
    """Too few loads succeeded for a fit."""


@dataclass(frozen=True)
class EndpointFit:
    """The fitted profile, and what the loads show of the front end."""

    profile: Profile
    steps: Sequence[ObservedStep]
    front_end: Optional[float]  # seconds on an idle server; None if the loads do not show it


def fit_steps(steps: Sequence[ObservedStep], about: Optional[Mapping[str, Any]] = None) -> EndpointFit:
    """Fit the steps. `about` has the name, the device and the model of the profile."""
    for kind, what in (("prefill", "a first token"), ("decode", "steady decoding")):
        if not any(step.kind == kind for step in steps):
            raise NotEnoughData(f"no successful load shows {what}: cannot fit {kind} costs; {ADVICE}")
    about = about or {}
    front_end = front_end_seconds(steps, about)
    profile = profile_from(samples_of(steps, front_end or 0.0), about, "the observed steps", about.get("name"))
    assert isinstance(profile.cost, PartsCost)
    noise = step_noise(profile.cost, steps, front_end or 0.0)
    return EndpointFit(replace(profile, about={**profile.about, "noise": noise}), steps, front_end)


def samples_of(steps: Sequence[ObservedStep], front_end: float = 0.0) -> Samples:
    """Return the median times of steps as samples. The steps of one load are one point: a fold has whole loads."""
    loads = {name: number for number, name in enumerate(dict.fromkeys(step.point for step in steps))}
    timed = [(step, step.seconds - front_end if step.idle else step.seconds) for step in steps]
    timed = [(step, seconds) for step, seconds in timed if seconds > 0]
    points = [loads[step.point] for step, _ in timed]
    samples = Samples.from_shapes([step.shape for step, _ in timed], [seconds for _, seconds in timed], points)
    return replace(samples, errors=np.array([step.jitter / seconds for step, seconds in timed]))


def single_samples(steps: Sequence[ObservedStep], front_end: float) -> Samples:
    """Return every sample of the steps, with one point per step."""
    rows = [(k, step, seconds) for k, step in enumerate(steps) for seconds in step.samples]
    times = [max(0.0, seconds - front_end if step.idle else seconds) for _, step, seconds in rows]
    return Samples.from_shapes([step.shape for _, step, _ in rows], times, [k for k, _, _ in rows])


def front_end_seconds(steps: Sequence[ObservedStep], about: Mapping[str, Any]) -> Optional[float]:
    """Return the front end's time on an idle server: by how much steps there are longer than other steps.

    None without other steps with prompts. Steps in the range of the others count, if there are any.
    """
    idle = samples_of([step for step in steps if step.idle])
    others = grouped(samples_of([step for step in steps if not step.idle]))
    if not len(idle) or not others.show_all_costs:
        return None
    cost = fit_cost(others, about)
    inside = in_measured_range(idle.table, measured_range(others.of_kind("prefill", "mixed")))
    compared = idle.select(inside) if inside.any() else idle
    differences = [seconds - cost.seconds(shape) for seconds, shape in zip(compared.seconds, compared.shapes)]
    return max(0.0, float(np.median(differences)))


def step_noise(cost: PartsCost, steps: Sequence[ObservedStep], front_end: float) -> dict[str, list[float]]:
    """Return quantiles of measured over predicted step time, by kind, without the effect of late packets."""
    samples = single_samples(steps, front_end)
    noise = noise_quantiles(cost, samples)
    errors = [np.array(step.samples) - step.seconds for step in steps if step.kind == "decode"]
    # A late packet shortens the next step: the covariance of successive errors is minus the variance of late packets.
    late = max(0.0, -2 * float(np.mean(np.concatenate([error[1:] * error[:-1] for error in errors]))))
    for kind, quantiles in noise.items():
        own = samples.of_kind(kind)
        variance = float(np.mean((own.seconds - [cost.seconds(shape) for shape in own.shapes]) ** 2))
        scale = np.sqrt(max(0.0, variance - late) / variance) if variance > 0 else 1.0
        noise[kind] = (1 + scale * (np.array(quantiles) - 1)).tolist()
    return noise


def describe_server(client: EndpointClient, labels: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known about the server before the fit; `labels` are the user's name, device and model."""
    return {
        "name": labels.get("name"),
        "device": labels.get("device") or f"behind {client.url}",
        "model": labels.get("model") or client.api.model,
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"servesim": __version__},
        "endpoint": {"url": client.url, "api": client.api.path},
    }


def profile_about(fit: EndpointFit, measured: Measurements) -> dict[str, Any]:
    """Return the keys of profile.yaml besides the costs."""
    counted = any(sent.prompt_tokens is not None for load in measured.good for sent in load.sent_requests)
    return {
        **fit.profile.about,
        "how": SOURCE,
        "use": USAGE,
        "prompts": "tokens as the server counts them" if counted else "words, assumed to be one token each",
        "front_end": {"seconds": fit.front_end},
        "loads": {"planned": measured.count, "good": len(measured.good), "end_reason": measured.end_reason,
                  "failed": [{"load": load, "reason": reason} for load, reason in measured.failed.items()],
                  "missed": missed_sizes(fit.steps, measured.planned)},
    }  # fmt: skip


def missed_sizes(steps: Sequence[ObservedStep], planned: Sequence[Point]) -> dict[str, int]:
    """Return the largest sizes of planned loads that show no such step. A server with few slots shows smaller steps."""
    seen = {(step.point, "single" if step.kind == "prefill" else "batch") for step in steps}
    missed = [point for point in planned if (point.name, point.kind) not in seen]
    sizes = {
        "decode_rows": [point.rows for point in missed if point.kind == "batch"],
        "prefill_tokens": [point.prompt for point in missed if point.kind == "single"],
    }
    return {name: max(numbers) for name, numbers in sizes.items() if numbers}


def write_step_samples(path: Path, fit: EndpointFit) -> None:
    """Write every sample as samples.csv. The front end's time is subtracted and has its own column.

    Tokens that reach the client together have no time between them: such a sample is flagged.
    """
    samples = single_samples(fit.steps, fit.front_end or 0.0)
    steps = [fit.steps[k] for k in samples.points]
    write_samples(
        path, samples, load=[step.point for step in steps],
        front_end=[f"{fit.front_end or 0.0:.6f}" if step.idle else "0" for step in steps],
        flagged=["" if seconds > 0 else "no time between tokens" for seconds in samples.seconds],
    )  # fmt: skip


def front_end_line(fit: EndpointFit) -> str:
    """Return what the loads show of the front end as text."""
    shown = "not shown by these loads" if fit.front_end is None else f"{1e3 * fit.front_end:.3g} ms on an idle server"
    return f"front end: {shown}"


def load_lines(measured: Measurements) -> list[str]:
    """Return one line per load that failed or was skipped, and the number of loads by outcome."""
    failed, good = measured.failed, len(measured.good)
    lines = [f"failed: {load}: {reason}" for load, reason in failed.items()]
    lines += [f"skipped: {load}: failed twice before" for load in measured.skipped]
    if measured.end_reason is not None:
        lines.append(f"ended early: {measured.end_reason}")
    counts = {"failed": len(failed), "not run": measured.count - good - len(failed)}
    others = "".join(f", {count} {name}" for name, count in counts.items() if count)
    return [*lines, f"loads: {good} of {measured.count} succeeded{others}"]
