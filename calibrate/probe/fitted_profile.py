"""A profile from measured steps: the cost model, its uncertainty, its held-out error and the noise of the steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import numpy as np
from servesim.core import BadInput
from servesim.costs.device_profile import Profile
from servesim.costs.model_arithmetic import known_peak, stored_model, stored_peak
from servesim.costs.parts import HostPart, PartsCost
from servesim.costs.uncertainty import SESSION_SPREAD
from servesim.files.step_table import STEP_KINDS

from .fit import Fit, fit_samples
from .fit_errors import check_fit, held_out_errors, measured_range, total_errors
from .parts_fit import model_ratios
from .sample_set import Samples, predict
from .samples import read_samples
from .token_selection import sampling_keys

QUANTILES = 21


def fit_profile(path: Path, about: Mapping[str, Any], name: Optional[str] = None) -> Profile:
    """Fit the samples of a file; return the profile with its held-out error and noise."""
    samples = Samples.from_rows(read_samples(path))
    if not len(samples):
        raise BadInput(f"{path}: expected at least one sample, got none")
    return profile_from(samples, about, str(path), name, path.parent)


def profile_from(
    samples: Samples, about: Mapping[str, Any], where: str, name: Optional[str] = None, folder: Optional[Path] = None
) -> Profile:
    """Fit samples, check the fit and return a profile. `where` names the source in messages."""
    steps = samples.of_kind(*STEP_KINDS)
    fitted = fit_samples(steps, about, where)
    device = replace(fitted.cost, host=HostPart())  # what `seconds` of the samples measures
    check_fit(device, fitted.groups, where)
    held_out = held_out_errors(fitted.kept, about)
    about_profile = {
        "name": name or f"{str(about.get('device', 'device')).lower().replace(' ', '-')}",
        **{key: value for key, value in about.items() if key not in ("model", "name")},
        "sampling": sampling_keys(about.get("sampling"), None),
        "model": stored_model(about.get("model")),
        "peak": about.get("peak") or stored_peak(known_peak(about)),
        "how": f"probe: {int(fitted.groups.counts.sum())} samples of {len(np.unique(steps.points))} points, "
        f"{fitted.excluded} left out",
        "error": held_out.by_kind(),
        "error_by_range": held_out.by_range(),
        "total_error": total_errors(device, fitted.groups),
        "tied": tied_terms(fitted, about),
        "grid": measured_range(steps),
        "noise": noise_quantiles(device, fitted.kept),
        "uncertainty": {"session": SESSION_SPREAD, "draws": [list(draw) for draw in fitted.draws]},
    }
    return Profile(str(about_profile["name"]), fitted.cost, about_profile, folder)


def tied_terms(fitted: Fit, about: Mapping[str, Any]) -> Optional[dict[str, str]]:
    """Return the terms that the samples do not determine, and what the fit assumed for them."""
    source = model_ratios(about).source
    reasons = {
        "prefill.tokens": "half of the time of the only measured number of tokens grows with the tokens",
        "prefill.square": f"attention at the efficiency of the other operations, sizes of {source}",
        "prefill.cross": f"attention at the efficiency of the other operations, sizes of {source}",
        "decode.context": f"bytes of the cached tokens and of the weights of {source}",
        "decode.rows": "another number of rows takes the same time, except for their context",
        "mixed.step": "0: prompts and decodes of a step are one model call",
        "mixed.row": "as much more than a prompt token as in decode steps",
        "mixed.context": "as in decode steps",
    }
    if not fitted.cost.decodes.context:
        reasons["decode.context"] = "0: no sample has a context, so its time is part of the rows"
    return {name: reasons.get(name, "part of the other terms") for name in fitted.tied} or None


def noise_quantiles(cost: PartsCost, samples: Samples) -> dict[str, list[float]]:
    """Return the quantiles of measured over predicted time, per kind of step."""
    ratios = samples.seconds / predict(cost, samples.table)
    levels = np.linspace(0, 1, QUANTILES)
    return {
        kind: [round(float(q), 5) for q in np.quantile(ratios[samples.kinds == kind], levels)]
        for kind in STEP_KINDS
        if kind in samples.kinds
    }
