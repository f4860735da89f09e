"""A small sweep with its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..study import sweeps

PARAMS = {
    "policy.decode_batch": [2, 32, 320],
    "policy.prefill_batch": [1, 32],
    "policy.delay_factor": [0, 0.5],
    "policy.delay_variant": ["queue"],
    "policy.order": ["arrival", "longest-output"],
    "policy.preempted_to": ["front", "swapped"],
}


@pytest.fixture(scope="session")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished sweep."""
    folder = tmp_path_factory.mktemp("report")
    base = sweeps.base(engine={"num_blocks": 24}, workload=sweeps.workload(60, 6.0), slo={"ttft": 900, "tpot": 40})
    file = sweeps.sweep_file(folder, params=PARAMS, base=base, objectives=["makespan", "mean_ttft_ms", "mean_tpot_ms"])
    assert sweeps.sim("sweep", file, "-o", folder / "out", "-j", 1, "-q") == 0
    return folder / "out"
