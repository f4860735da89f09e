"""Printed table and profile.yaml of an endpoint calibration."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

import numpy as np
from servesim import __version__
from servesim.core import Shape
from servesim.files.write import csv_writer, open_text

from .fit import EndpointFit
from .measure import EndpointClient, Measurements

SOURCE = (
    "endpoint: calibration loads over HTTP, steps from the clients' token times; includes host, network and padding"
)
USAGE = "costs are per live row and token: simulate with engine.prefill_buckets [] and engine.decode_buckets [1]"


def profile_about(
    fit: EndpointFit, measured: Measurements, client: EndpointClient, labels: Mapping[str, Optional[str]]
) -> dict[str, Any]:
    """Return the keys of profile.yaml besides the costs; `labels` are the user's name, device and model."""
    counted = any(sent.prompt_tokens is not None for load in measured.good for sent in load.sent_requests)
    return {
        "name": labels.get("name"),
        "device": labels.get("device") or f"behind {client.url}",
        "model": labels.get("model") or getattr(client.api, "model", None),
        "how": SOURCE,
        "use": USAGE,
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"servesim": __version__},
        "endpoint": {"url": client.url, "api": client.api.path},
        "prompts": "tokens as the server counts them" if counted else "words, assumed to be one token each",
        "front_end": {"seconds": fit.chosen.values.get("front"), "lag": fit.lag, "end_lag": fit.end_lag},
        "loads": {"planned": measured.planned, "good": len(measured.good), "ended": measured.end_reason,
                  "failed": [{"load": load, "why": why} for load, why in measured.failed.items()]},
        "error": fit.error,
        "grid": fit.grid,
        "noise": fit.noise,
        "fit": {
            "form": fit.chosen.form,
            "steps": len(fit.steps),
            "parameters": parameters(fit),
            "not_told_apart": list(fit.chosen.dependent),
            "compared": dict(fit.form_errors),
        },
    }  # fmt: skip


def write_samples(path: Path, fit: EndpointFit) -> None:
    """Write every sample in the columns of a probe. The front end's time is subtracted and has its own column.

    Tokens that reach the client together have no time between them: such a sample is flagged.
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(step.point for step in fit.steps))}
    with open_text(path) as file:
        writer = csv_writer(file)
        writer.writerow(["point", "kind", "load", "front", "seconds", *Shape._fields, "flagged"])
        for step in fit.steps:
            front = fit.chosen.values.get("front", 0.0) if step.idle else 0.0
            cells = [numbers[step.point], step.kind, step.point, f"{front:.6f}"]
            for time in step.samples:
                seconds = f"{max(0.0, time - front):.6f}"
                writer.writerow([*cells, seconds, *step.shape, "" if float(seconds) > 0 else "no time between tokens"])


def parameters(fit: EndpointFit) -> dict[str, dict[str, float]]:
    """Return the fitted parameters with their intervals."""
    rows = {}
    for name, value in fit.chosen.values.items():
        low, high = fit.interval(name)
        rows[name] = {"value": value, "error": fit.chosen.errors[name], "low": low, "high": high}
    return rows


def format_table(fit: EndpointFit, measured: Measurements) -> str:
    """Return the parameters, the errors, the front end and the failed loads as text."""
    lines = [f"{'parameter':<22}{'seconds':>12}{'error':>11}   interval"]
    for name, row in parameters(fit).items():
        lines.append(f"{name:<22}{row['value']:>12.4g}{row['error']:>11.1g}   {row['low']:.4g} to {row['high']:.4g}")
    if fit.chosen.dependent:
        lines.append(f"not separable from the other parameters: {', '.join(fit.chosen.dependent)}")
    form_errors = ", ".join(f"{form} {error:.1%}" for form, error in fit.form_errors.items())
    lines += ["", f"form: {fit.chosen.form} (held-out error: {form_errors})"]
    for kind, errors in fit.held_out.items():
        error = np.abs(errors)
        lines.append(f"{kind:<10}held-out error: mean {error.mean():.1%}, max {error.max():.1%}, {len(error)} steps")
    front = fit.chosen.values.get("front")
    if front is not None:
        lines.append(f"front end: {1e3 * front:.3g} ms on an idle server")
    if fit.lag is not None:
        late = "; streams end one model call late" if fit.end_lag else ""
        lines.append(f"           lag of {fit.lag} model call(s) on a busy server{late}")
    return "\n".join([*lines, *describe_failures(measured)])


def describe_failures(measured: Measurements) -> list[str]:
    """Return one line per failed load, and the number of good loads."""
    lines = [f"failed: {load}: {why}" for load, why in measured.failed.items()]
    if measured.end_reason is not None:
        lines.append(f"ended early: {measured.end_reason}")
    return [*lines, f"loads: {len(measured.good)} of {measured.planned} succeeded"]
