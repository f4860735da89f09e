"""Check a profile: measured range, held-out error, and the next measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import numpy as np
from servesim.core import StepCost
from servesim.costs.device_profile import Profile
from servesim.costs.model_arithmetic import peak_of
from servesim.costs.model_config import model_name
from servesim.costs.profile_verdict import verdict_on
from servesim.files.step_table import KINDS, STEP_KINDS
from servesim.runs.utilisation import missing_figures

from .samples import MeasuredPoint, measured_points

DEFAULT_TOLERANCE = 0.03  # held-out error of a kind of step above which the report asks for more samples
MAX_MEDIAN_ERROR = 0.02  # relative standard error of a median above which the report asks for a repeat
WIDE_INTERVAL = 0.3  # half-width of a parameter's interval, as a fraction of the value
WORST_POINTS = 3  # number of points or ranges listed
MIN_RANGE_POINTS = 3  # a range with fewer points is not listed
ROWS = (1, 32, 128)  # of the table of the selection of tokens


def report(profile: Profile, tolerance: Optional[float] = None) -> str:
    """Return a text that ends with the verdict. It asks for steps whose held-out error is above the tolerance."""
    points, about = measured_points(profile.path), {**profile.about, "model": model_name(profile.about.get("model"))}
    lines = [f"profile {profile.name} (digest {profile.digest})"]
    lines += [f"  {key}: {about[key]}" for key in ("device", "model", "kernels", "how") if about.get(key)]
    lines += ["", *coverage_lines(profile, points)]
    lines += ["", *(error_lines(profile) or ["held-out error: not in this profile"]), *fit_lines(profile)]
    lines += [*sampling_lines(profile), *utilisation_lines(profile), *log_fit_lines(profile.section("fit"))]
    advice = next_steps(profile, points, tolerance)
    lines += ["", "next measurements:", *(f"  {line}" for line in advice or ["none needed"])]
    return "\n".join([*lines, "", *verdict_on(profile).lines()])


def coverage_lines(profile: Profile, points: Sequence[MeasuredPoint]) -> list[str]:
    """Return one line per kind of step with its counts, and the measured range."""
    lines = []
    if points:
        lines.append(f"{'measured':<10}{'points':>8}{'samples':>9}{'outliers':>9}{'failed':>8}{'error of median':>17}")
    for kind, counts in coverage(points).items():
        median_error = "-" if counts["median_error"] is None else f"{counts['median_error']:.1%}"
        numbers = f"{counts['points']:>8}{counts['samples']:>9}{counts['outliers']:>9}{counts['failed']:>8}"
        lines.append(f"{kind:<10}{numbers}{median_error:>17}")
    lines += [f"{name:<16}{low:g} to {high:g}" for name, (low, high) in profile.section("grid").items()]
    return lines or ["no samples and no measured range: the valid range of these costs is unknown"]


def coverage(points: Sequence[MeasuredPoint]) -> dict[str, dict[str, Any]]:
    """Return what was measured of each kind of step."""
    result = {}
    for kind in KINDS:
        group = [point for point in points if point.kind == kind]
        errors = [point.median_error for point in group if len(point.seconds) > 1]
        if group:
            result[kind] = {
                "points": len(group),
                "samples": sum(len(point.seconds) for point in group),
                "outliers": sum(point.flagged for point in group),
                "failed": sum(bool(point.failed) for point in group),
                "median_error": float(np.median(errors)) if errors else None,
            }
    return result


def report_json(profile: Profile, tolerance: Optional[float] = None) -> dict[str, Any]:
    """Return the report as JSON; docs/calibrate.md describes the keys."""
    points, verdict = measured_points(profile.path), verdict_on(profile)
    return {
        "profile": profile.name,
        "digest": profile.digest,
        **{key: profile.about.get(key) for key in ("device", "model", "kernels", "how")},
        "measured": coverage(points),
        "range": profile.section("grid"),
        "held_out_error": profile.mean_errors,
        "total_error": profile.section("total_error"),
        "within_tolerance": is_within(profile, tolerance),
        "next_measurements": next_steps(profile, points, tolerance),
        "verdict": verdict.grade,
        "reasons": [finding.text for finding in verdict.findings],
    }


def is_within(profile: Profile, tolerance: Optional[float]) -> bool:
    """Whether every held-out error is within the tolerance."""
    return tolerance is None or all(error <= tolerance for error in profile.mean_errors.values())


def fit_lines(profile: Profile) -> list[str]:
    """Return where the fit is wrong, and which terms the samples do not determine."""
    totals, ranges = profile.section("total_error"), profile.section("error_by_range")
    lines = [f"total time      {kind:<10}{error:>+7.2%}" for kind, error in totals.items() if error is not None]
    worst = [
        (
            row["mean"],
            f"worst range     {kind:<10}{row['mean']:>7.2%}  {name}, bias {row['bias']:+.1%}, {row['points']} points",
        )
        for kind, table in ranges.items()
        for name, row in table.items()
        if row["points"] >= MIN_RANGE_POINTS
    ]
    lines += [line for _, line in sorted(worst, reverse=True)[:WORST_POINTS]]
    return lines + [f"assumed         {term}: {reason}" for term, reason in profile.section("tied").items()]


def utilisation_lines(profile: Profile) -> list[str]:
    """Return the peak of the device and its power, or what is missing for MFU, MBU and energy."""
    peak, power = peak_of(profile.about), profile.about.get("power")
    missing = [
        f"no {metric}: {text}" for metric in ("mfu", "energy") if (text := missing_figures(metric, profile.about))
    ]
    lines = (
        ["", f"peak: {peak.flops / 1e12:g} TFLOP/s, {peak.bandwidth / 1e12:g} TB/s ({peak.source})"] if peak else [""]
    )
    if power:
        watts = ", ".join(f"{kind} {power[kind]:.0f} W" for kind in ("idle", *KINDS) if power.get(kind) is not None)
        lines.append(f"power: {watts}")
    return lines + missing


def error_lines(profile: Profile) -> list[str]:
    """Return the mean held-out error per kind of step or of whole runs, and the largest one of runs."""
    lines = []
    for kind, mean in profile.mean_errors.items():
        largest = profile.error[kind].get("max")
        more = "" if largest is None else f"  largest {largest:.2%}"
        lines.append(f"held-out error  {kind:<10}{mean:>7.2%}{more}")
    return lines


def log_fit_lines(fit: Mapping[str, Any]) -> list[str]:
    """Return the intervals of parameters fitted from logs, and the makespan errors of runs."""
    parameters = fit.get("parameters") or {}
    lines = ["", f"{'parameter':<26}{'value':>12}   interval"] if parameters else []
    for name, parameter in parameters.items():
        numbers = (parameter.get(key) for key in ("value", "low", "high"))  # null: not finite
        value, low, high = ("?" if number is None else f"{number:.4g}" for number in numbers)
        lines.append(f"{name:<26}{value:>12}   {low} to {high}")
    for title in ("left_out", "predicted") if parameters else ():
        for row in fit.get(title) or ():
            error = "?" if row.get("error") is None else f"{row['error']:+.2%}"
            lines.append(f"{title.replace('_', ' ')}: {row['run']:<24}makespan {error}")
    return lines


def sampling_lines(profile: Profile) -> list[str]:
    """Return a table with the time that each way to select tokens adds to a step."""
    if not profile.sampling:
        return []
    sizes = "".join(f"{f'{rows} rows':>10}" for rows in ROWS)
    lines = [f"{'selection of tokens, ms':<32}{'step':>8}{'per row':>9}{sizes}"]
    for name, term in profile.sampling.items():
        label = f"{name} (in the measured steps)" if name == profile.sampling_used else name
        times = "".join(f"{1e3 * term.seconds(rows):>10.3f}" for rows in ROWS)
        lines.append(f"  {label:<30}{1e3 * term.step:>8.3f}{1e3 * term.row:>9.4f}{times}")
    device = profile.about["sampling"].get("device")
    return ["", *lines, *([f"  measured apart from the steps, on {device}"] if device else [])]


def next_steps(profile: Profile, points: Sequence[MeasuredPoint], tolerance: Optional[float] = None) -> list[str]:
    """Return what to measure to improve the profile, the most important first."""
    tolerance = DEFAULT_TOLERANCE if tolerance is None else tolerance
    measured = [point for point in points if point.seconds]
    advice = ["every kind of step: the profile was derived"] if profile.about.get("derived") else []
    for kind, error in profile.mean_errors.items():
        if error > tolerance:
            group = [point for point in measured if point.kind == kind]
            worst = sorted(group, key=lambda p: -relative_error(profile.cost, p))[:WORST_POINTS]
            names = "; ".join(f"{p.name} ({relative_error(profile.cost, p):.0%})" for p in worst)
            more = f", worst points: {names}" if names else ""
            advice.append(f"more {kind} steps: held-out error {error:.1%}{more}")
    failed = [point for point in points if point.failed]
    if failed:
        advice.append(f"{len(failed)} points failed, e.g. {failed[0].name}: {failed[0].failed}")
    advice += imprecise_points(measured)
    if points:
        missing = [kind for kind in STEP_KINDS if not any(point.kind == kind for point in measured)]
        advice += [f"{kind} steps: none measured" for kind in missing]
    if not points and not profile.section("grid"):
        advice.append("single steps (`sim calibrate probe`): the valid range of these costs is unknown")
    fit = profile.section("fit")
    wide = [name for name, parameter in (fit.get("parameters") or {}).items() if is_wide(parameter)]
    advice += log_errors(fit, tolerance)
    return advice + ([f"runs with other step shapes: the intervals of {', '.join(wide)} are wide"] if wide else [])


def imprecise_points(measured: Sequence[MeasuredPoint]) -> list[str]:
    """Return a line with the points whose median is not known well."""
    repeated = any(len(point.seconds) > 1 for point in measured)  # then points with one sample come from live runs
    candidates = [point for point in measured if len(point.seconds) > 1 or not repeated]
    imprecise = [point for point in candidates if point.median_error > MAX_MEDIAN_ERROR]
    if not imprecise:
        return []
    worst = max(imprecise, key=lambda point: point.median_error)
    return [
        f"repeat {len(imprecise)} of {len(measured)} points: the error of their median is above "
        f"{MAX_MEDIAN_ERROR:.0%}, or unknown (one sample); worst: {worst.kind} {worst.name}, "
        f"{'one sample' if len(worst.seconds) < 2 else f'{worst.median_error:.0%}'}"
    ]


def log_errors(fit: Mapping[str, Any], tolerance: float) -> list[str]:
    """Return a line with the runs of a fit from logs whose request times are not within the tolerance."""
    found = {
        f"{row['run']} ({name} {abs(row[key]):.0%})"
        for title in ("fitted", "predicted")
        for row in fit.get(title) or ()
        for key, name in (("error", "makespan"), ("ttft_error", "TTFT"), ("e2e_error", "E2E"))
        if isinstance(row.get(key), (int, float)) and abs(row[key]) > tolerance
    }
    return [f"other costs or settings of these runs: {', '.join(sorted(found))}"] if found else []


def relative_error(cost: StepCost, point: MeasuredPoint) -> float:
    """Return the error of the cost model at a point, as a fraction."""
    return abs(cost.seconds(point.shape) / point.median - 1) if point.median else math.inf


def is_wide(parameter: Mapping[str, Any]) -> bool:
    """Whether the interval of a parameter is wide, or not known."""
    value, low, high = (parameter.get(key) for key in ("value", "low", "high"))
    if value is None or low is None or high is None:
        return True
    return bool(value > 0 and (high - low) / 2 > WIDE_INTERVAL * value)
