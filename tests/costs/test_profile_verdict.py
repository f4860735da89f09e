"""The verdict on a profile: what it says, and where it is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.cli import main
from servesim.costs.device_profile import bundled_profiles, load_profile
from servesim.costs.profile_verdict import DO_NOT_USE, RANKING, USABLE, verdict_on
from servesim.report.trust import profile_facts

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


def test_every_finding_of_a_bad_calibration_says_what_to_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A calibration of a real server: it ended with exit code 0 and a path only."""
    bad = write(
        tmp_path / "bad",
        error={"prefill": {"mean": 0.39}, "decode": {"mean": 0.12}},
        grid={"prefill_tokens": [16, 2048], "decode_rows": [1, 8]},
        loads={"missed": {"decode_rows": 32}},
        cost={**COST, "prefill_token": 0.0},
    )
    assert main(["calibrate", "check", str(bad)]) == 0
    lines = capsys.readouterr().out.splitlines()
    verdict = lines[lines.index("verdict: do not use (its results can be wrong in any direction)") :]
    findings, advice = verdict[1 : verdict.index("what to do:")], verdict[verdict.index("what to do:") + 1 :]
    assert len(findings) == 4 and len(advice) == 3  # two kinds of steps have large errors, with the same advice
    assert "--output-tokens" in advice[0] and "prompts of more lengths" in advice[1]
    assert main(["calibrate", "check", str(bad), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"] == DO_NOT_USE and len(data["reasons"]) == 4


def test_a_run_with_a_bad_profile_prints_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["run", "--policy", "vllm-v1", "-X", "4", "-T", "3", "-q", "--profile"]
    assert main([*run, str(write(tmp_path / "good"))]) == 0
    assert "warning" not in capsys.readouterr().err
    assert main([*run, str(write(tmp_path / "bad", error={"decode": {"mean": 0.5}}))]) == 0
    error = capsys.readouterr().err
    assert "profile mine: do not use: held-out error of decode: 50% (mean)" in error
    assert "sim calibrate check" in error and error.count("\n") == 1


def test_the_trust_panel_shows_the_verdict(tmp_path: Path) -> None:
    tones = {}
    for name, error in (("usable", 0.02), ("ranking", 0.2), ("bad", 0.5)):
        facts = profile_facts(str(write(tmp_path / name, error={"decode": {"mean": error}})))
        (fact,) = [fact for fact in facts if fact.name == "Verdict on the profile"]
        tones[fact.text.partition(":")[0]] = fact.tone
    assert tones == {"usable": "good", "for ranking only": "check", "do not use": "warn"}
