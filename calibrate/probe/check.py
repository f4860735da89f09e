"""What a profile covers, what it is off by, and what to measure next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

import numpy as np
from servesim.core import StepCost
from servesim.costs.device_profile import Profile

from .samples import Point, measured_points

TOLERANCE = 0.03  # held-out error of a kind of step above which more of it should be measured
UNSURE = 0.02  # standard error of a median, as a part, above which a point should be repeated
WIDE = 0.3  # half of a parameter's interval, as a part of it
WORST = 3  # points named
KINDS = ("prefill", "decode", "mixed", "swap", "busy")


def report(profile: Profile, tolerance: Optional[float] = None) -> tuple[str, bool]:
    """Return what there is to say about a profile, and whether every error is within the tolerance."""
    points = measured_points(profile.path)
    lines = [f"profile {profile.name} ({profile.digest})"]
    lines += [
        f"  {key}: {profile.about[key]}" for key in ("device", "model", "kernels", "how") if profile.about.get(key)
    ]
    lines += ["", *coverage(profile, points)]
    held_out = errors(profile)
    off_by = [f"held-out error  {kind:<10}{error:>7.2%}" for kind, error in held_out.items()]
    lines += ["", *(off_by or ["held-out error: none is kept in this profile"])]
    if isinstance(profile.about.get("busy"), (int, float)):
        lines.append(
            f"while the host's front end is at work in the same process, decodes take {profile.about['busy']:.2f} x"
        )
    lines += logs_lines(profile.about.get("fit"))
    advice = next_steps(profile, points, held_out, TOLERANCE if tolerance is None else tolerance)
    lines += ["", "what to measure next:", *(f"  {line}" for line in advice or ["nothing stands out"])]
    fine = tolerance is None or all(error <= tolerance for error in held_out.values())
    return "\n".join(lines), fine


def coverage(profile: Profile, points: Sequence[Point]) -> list[str]:
    """Say what was measured."""
    lines = []
    if points:
        lines.append(f"{'measured':<10}{'points':>8}{'samples':>9}{'flagged':>9}{'failed':>8}{'median known to':>17}")
    for kind in KINDS:
        mine = [point for point in points if point.kind == kind]
        if mine:
            known = [point.unsure for point in mine if len(point.seconds) > 1]
            lines.append(
                f"{kind:<10}{len(mine):>8}{sum(len(p.seconds) for p in mine):>9}{sum(p.flagged for p in mine):>9}"
                f"{sum(bool(p.failed) for p in mine):>8}{(f'{np.median(known):.1%}' if known else '-'):>17}"
            )
    grid = profile.about.get("grid") or {}
    lines += [f"{name:<16}{low:g} to {high:g}" for name, (low, high) in grid.items()]
    return lines or ["no samples and no grid: nothing is known about where these costs hold"]


def errors(profile: Profile) -> dict[str, float]:
    """Return the mean held-out error by kind of step, as a part of the measured time."""
    found = {}
    for kind, error in profile.error.items():
        value = error.get("mean") if isinstance(error, Mapping) else error
        if isinstance(value, (int, float)):
            found[str(kind)] = float(value)
    return found


def logs_lines(fit: Any) -> list[str]:
    """Say how certain parameters fitted from logs are, and how runs are predicted."""
    if not isinstance(fit, Mapping) or not isinstance(fit.get("parameters"), Mapping):
        return []
    lines = ["", f"{'parameter':<26}{'value':>12}   interval"]
    for name, one in fit["parameters"].items():
        lines.append(f"{name:<26}{one['value']:>12.4g}   {one['low']:.4g} to {one['high']:.4g}")
    for title in ("left_out", "predicted"):
        for row in fit.get(title) or ():
            lines.append(f"{title.replace('_', ' ')}: {row['run']:<24}makespan {row['error']:+.2%}")
    return lines


def next_steps(profile: Profile, points: Sequence[Point], held_out: Mapping[str, float], tolerance: float) -> list[str]:
    """Say what would make the profile better, the most pressing first."""
    measured = [point for point in points if point.seconds]
    advice = []
    for kind, error in held_out.items():
        if error > tolerance:
            worst = sorted((p for p in measured if p.kind == kind), key=lambda p: -off(profile.cost, p))[:WORST]
            names = "; ".join(f"{p.name} ({off(profile.cost, p):.0%} off)" for p in worst)
            advice.append(f"more {kind} steps: held-out error {error:.1%}" + (f", worst near {names}" if names else ""))
    failed = [point for point in points if point.failed]
    if failed:
        advice.append(f"{len(failed)} points failed, e.g. {failed[0].name}: {failed[0].failed}")
    again = any(len(point.seconds) > 1 for point in measured)  # then the others are steps that were seen in passing
    unsure = [point for point in measured if point.unsure > UNSURE and (len(point.seconds) > 1 or not again)]
    if unsure:
        widest = max(unsure, key=lambda point: point.unsure)
        advice.append(
            f"repeat {len(unsure)} of {len(measured)} points whose median is known worse than {UNSURE:.0%}: "
            f"run the same probe again (worst: {widest.kind} {widest.name}, {widest.unsure:.0%})"
        )
    if points:
        missing = [kind for kind in KINDS[:4] if not any(point.kind == kind for point in measured)]
        advice += [f"{kind} steps: none was measured" for kind in missing]
    return advice + unsure_parameters(profile.about.get("fit"))


def off(cost: StepCost, point: Point) -> float:
    """Return what the cost model is off by at a point, as a part."""
    return abs(cost.seconds(point.shape) / point.median - 1)


def unsure_parameters(fit: Any) -> list[str]:
    """Name the parameters that logs leave open."""
    parameters = fit.get("parameters") if isinstance(fit, Mapping) else None
    wide = [
        str(name)
        for name, one in (parameters.items() if isinstance(parameters, Mapping) else ())
        if one["value"] > 0 and (one["high"] - one["low"]) / 2 > WIDE * one["value"]
    ]
    return [f"runs that tell apart {', '.join(wide)}: intervals are wide"] if wide else []
