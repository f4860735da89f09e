"""The verdict on a profile: what it says, and where it is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.costs.device_profile import bundled_profiles, load_profile
from servesim.costs.profile_verdict import DO_NOT_USE, RANKING, USABLE, verdict_on

COST = {"kind": "linear", "base": 0.01, "prefill_token": 1e-4, "decode_row": 1e-3}
GOOD: dict[str, Any] = {
    "name": "mine",
    "error": {"prefill": {"mean": 0.03}, "decode": {"mean": 0.02}},
    "grid": {"prefill_tokens": [16, 2048], "decode_rows": [1, 32]},
    "cost": COST,
}


def write(folder: Path, **keys: Any) -> Path:
    """Write a profile with other keys than those of a good one."""
    folder.mkdir(exist_ok=True)
    (folder / "profile.yaml").write_text(yaml.safe_dump({**GOOD, **keys}))
    return folder


@pytest.mark.parametrize("name", bundled_profiles())
def test_bundled_profiles_are_usable(name: str) -> None:
    assert verdict_on(load_profile(name)).grade == USABLE


@pytest.mark.parametrize(
    ("keys", "grade", "reason"),
    [
        ({}, USABLE, "usable"),
        ({"error": {"decode": {"mean": 0.101}}}, RANKING, "held-out error of decode: 10% (mean), above 10%"),
        ({"error": {"prefill": {"mean": 0.02}, "decode": {"mean": 0.39}}}, DO_NOT_USE, "of decode: 39% (mean)"),
        ({"error": {"prefill": {"mean": 0.02}, "swap": {"mean": 0.39}}}, RANKING, "of swap: 39%"),
        ({"error": {"makespan": {"mean": 0.2, "max": 0.4}}}, RANKING, "of makespan: 20%"),
        ({"error": {"makespan": {"mean": 0.01}, "ttft": {"mean": 0.19}}}, USABLE, "usable"),  # of single requests
        ({"error": {"makespan": {"mean": 0.01}, "ttft": {"mean": 0.21}}}, RANKING, "of ttft: 21% (mean), above 20%"),
        ({"error": None}, RANKING, "its error is unknown"),
        (
            {"check": {"noise": 0.02, "errors": {"makespan": 0.01, "median_itl_ms": 0.14, "p99_ttft_ms": -0.19}}},
            RANKING, "for ranking only: errors of the check on the server: median_itl_ms +14%",
        ),
        ({"check": {"noise": 0.02, "errors": {"mean_ttft_ms": -0.39}}}, DO_NOT_USE, "mean_ttft_ms -39%"),
        ({"check": {"noise": 0.25, "errors": {"makespan": 0.01}}}, RANKING, "equal requests differed by +-25%"),
        (  # single steps scatter more than the loads that were predicted
            {"check": {"noise": 0.02, "errors": {"makespan": 0.01}}, "error": {"decode": {"mean": 0.15}}}, USABLE,
            "usable",
        ),
        ({"cost": {**COST, "prefill_token": 0.0}}, DO_NOT_USE, "of 2048 tokens takes no longer than one of 16"),
        ({"loads": {"missed": {"decode_rows": 32}}}, USABLE, "usable"),
        (
            {"loads": {"missed": {"decode_rows": 64}}}, RANKING,
            "decode_rows measured up to 32 only: the loads with 64 show no steady steps",
        ),
    ],
)  # fmt: skip
def test_the_verdict_follows_from_errors_coverage_and_implausible_costs(
    keys: dict[str, Any], grade: str, reason: str, tmp_path: Path
) -> None:
    verdict = verdict_on(load_profile(write(tmp_path / "mine", **keys)))
    assert verdict.grade == grade
    assert reason in verdict.text
