"""Predictions are scaled to measured values: measured configurations by their own ratio, the others by the mean."""

from __future__ import annotations

import pytest
from servesim.calibrate.tune.adjustment import adjusted, measured_ratios
from servesim.calibrate.tune.journal import Measurement
from servesim.study.sweep import Records


def measured(config: int, figures: dict[str, float]) -> Measurement:
    return Measurement(1, config, f"config{config}", 1.0, figures, {})


def test_measured_ones_get_their_value_and_the_others_the_mean_ratio() -> None:
    records: Records = {
        (config, replication): {"figures": {"makespan": 10.0 + config + replication, "evictions": 0}}
        for config in range(3)
        for replication in range(2)
    }
    runs = [measured(0, {"makespan": 20.0, "evictions": 3}), measured(1, {"makespan": 88.0})]
    result = adjusted(records, measured_ratios(records, runs))
    assert [result[config, 0]["figures"]["makespan"] for config in range(3)] == pytest.approx([20.0, 88.0, 48.0])
    assert result[0, 1]["figures"]["makespan"] == pytest.approx(22.0)  # the ratio of the measured run
    assert result[0, 0]["figures"]["evictions"] == 0


def test_failed_runs_and_stopped_measurements_change_nothing() -> None:
    records: Records = {(0, 0): {"error": "no"}, (1, 0): {"figures": {"makespan": 10.0}}}
    assert adjusted(records, measured_ratios(records, [measured(0, {"makespan": 5.0}), measured(1, {})])) == records
