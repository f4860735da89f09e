"""Scale the predictions of measured configurations to their measured values.

No cost model is exact, so a fit can still rank two measured configurations wrongly. What was measured decides.
The others get the mean ratio: an error that all configurations share must not prefer those that were not measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from servesim.execution.single_run import Record
from servesim.study.sweep import Records

from .journal import Measurement

Ratios = dict[int, dict[str, float]]  # configuration -> metric -> measured / predicted


def measured_ratios(records: Records, measurements: Sequence[Measurement]) -> Ratios:
    """Return measured / predicted metrics of every configuration, for the run that was measured or would be."""
    ratios: Ratios = {}
    for measurement in measurements:
        predicted = records.get((measurement.config, 0), {}).get("figures", {})
        known = {name: value for name, value in measurement.figures.items() if predicted.get(name, 0) > 0 and value > 0}
        if known:
            ratios[measurement.config] = {name: value / predicted[name] for name, value in known.items()}
    common = mean_ratios(list(ratios.values()))
    return {config: ratios.get(config, common) for config, _ in records}


def mean_ratios(ratios: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the geometric mean of each metric that all have."""
    names = set.intersection(*(set(own) for own in ratios)) if ratios else set()
    return {name: math.exp(sum(math.log(own[name]) for own in ratios) / len(ratios)) for name in names}


def adjusted(records: Records, ratios: Ratios) -> Records:
    """Return the records with scaled metrics, in all replications."""
    return {key: _scaled(record, ratios.get(key[0], {})) for key, record in records.items()}


def _scaled(record: Record, ratios: dict[str, float]) -> Record:
    if not ratios or "figures" not in record:
        return record
    return {**record, "figures": {name: value * ratios.get(name, 1.0) for name, value in record["figures"].items()}}
