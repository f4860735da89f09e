"""A calibrated endpoint, told: the table a person reads, and the part of profile.yaml that keeps it."""

from __future__ import annotations

import csv
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

import numpy as np
from servesim import __version__
from servesim.core import Shape
from servesim.files.write import open_text

from .fit import EndpointFit
from .measure import Caller, Measured

HOW = "endpoint: designed loads over HTTP, steps read off the clients' token times; host, network and padding included"
USE = "costs are by live rows and tokens: simulate with engine.prefill_gears [] and engine.decode_gears [1]"


def about(fit: EndpointFit, measured: Measured, caller: Caller, given: Mapping[str, Optional[str]]) -> dict[str, Any]:
    """Return what profile.yaml says beside the costs; `given` are the name, device and model as the user has them."""
    told = any(sending.prompt is not None for taken in measured.good for sending in taken.sendings)
    return {
        "name": given.get("name"),
        "device": given.get("device") or f"behind {caller.url}",
        "model": given.get("model") or getattr(caller.api, "model", None),
        "how": HOW,
        "use": USE,
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"servesim": __version__},
        "endpoint": {"url": caller.url, "api": caller.api.path},
        "prompts": "tokens as the server counts them" if told else "words, taken for a token each",
        "front_end": {"seconds": fit.solved.values.get("front"), "lag": fit.lag, "end_lag": fit.end_lag},
        "loads": {"planned": measured.planned, "good": len(measured.good), "ended": measured.ended,
                  "failed": [{"load": load, "why": why} for load, why in measured.failed.items()]},
        "error": fit.error,
        "grid": fit.grid,
        "noise": fit.noise,
        "fit": {
            "form": fit.solved.form,
            "steps": len(fit.seen),
            "parameters": parameters(fit),
            "not_told_apart": list(fit.solved.blended),
            "compared": dict(fit.compared),
        },
    }  # fmt: skip


def write_samples(path: Path, fit: EndpointFit) -> None:
    """Write every step that was seen, as a probe writes its own; a front end's time is taken off and told beside."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(seen.point for seen in fit.seen))}
    with open_text(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["point", "kind", "load", "front", "seconds", *Shape._fields])
        for seen in fit.seen:
            front = fit.solved.values.get("front", 0.0) if seen.idle else 0.0
            told = [numbers[seen.point], seen.kind, seen.point, f"{front:.6f}"]
            writer.writerows([*told, f"{time - front:.6f}", *seen.shape] for time in seen.single)


def parameters(fit: EndpointFit) -> dict[str, dict[str, float]]:
    """Return the fitted numbers with their intervals."""
    found = {}
    for name, value in fit.solved.values.items():
        low, high = fit.interval(name)
        found[name] = {"value": value, "error": fit.solved.errors[name], "low": low, "high": high}
    return found


def table(fit: EndpointFit, measured: Measured) -> str:
    """Return the parameters, the errors, the front end and what failed."""
    lines = [f"{'parameter':<22}{'seconds':>12}{'error':>11}   interval"]
    for name, one in parameters(fit).items():
        lines.append(f"{name:<22}{one['value']:>12.4g}{one['error']:>11.1g}   {one['low']:.4g} to {one['high']:.4g}")
    if fit.solved.blended:
        lines.append(f"not told apart from the rest: {', '.join(fit.solved.blended)}")
    shares = ", ".join(f"{form} {error:.1%}" for form, error in fit.compared.items())
    lines += ["", f"form: {fit.solved.form} (held out: {shares})"]
    for kind, errors in fit.held_out.items():
        off = np.abs(errors)
        lines.append(f"{kind:<10}held out {off.mean():.1%} on average, {off.max():.1%} at worst, {len(off)} steps")
    front = fit.solved.values.get("front")
    if front is not None:
        lines.append(f"front end: {1e3 * front:.3g} ms before an idle server begins")
    if fit.lag is not None:
        late = ", and ends of streams come one call late" if fit.end_lag else ""
        lines.append(f"           a busy one sees a request after {fit.lag} model call(s){late}")
    return "\n".join([*lines, *troubles(measured)])


def troubles(measured: Measured) -> list[str]:
    """Return what went wrong, one line each."""
    lines = [f"failed: {load}: {why}" for load, why in measured.failed.items()]
    if measured.ended is not None:
        lines.append(f"ended early: {measured.ended}")
    return [*lines, f"loads: {len(measured.good)} of {measured.planned} went well"]
