"""A sweep without a winner says why: an objective without values is not a failure of the configurations."""

from __future__ import annotations

from typing import Any

import pytest
import servesim

BASE: dict[str, Any] = {
    "workload": {"requests": 20, "arrivals": {"kind": "poisson", "rate": 5}, "lengths": {"prompt": 16, "output": 1}},
    "policy": {"name": "vllm-v1"},
    "profile": {"base": 0.01},
}


@pytest.mark.parametrize(
    ("objective", "text"),
    [
        ("mean_tpot_ms", "No winner: no run has a value of mean_tpot_ms"),
        ("p99_ttft_ms[priority=7]", "No winner: no run has a value of p99_ttft_ms[priority=7]"),
    ],
)
def test_an_objective_without_values_is_named(objective: str, text: str) -> None:
    swept = servesim.sweep(base=BASE, params={"policy.max_num_seqs": [4, 8]}, objectives=[objective])
    assert swept.verdict.startswith(text)
    assert "failed" not in swept.verdict


def test_only_what_happened_is_listed() -> None:
    base = {**BASE, "policy": {"name": "vllm-v1", "max_num_batched_tokens": 16}}
    swept = servesim.sweep(base=base, params={"policy.max_num_seqs": [64, 128]})
    assert swept.verdict == "No winner: every configuration is refused by the real engine at its start."
