"""The trust panel: what it says about profiles, policies, ranges and replications."""

from __future__ import annotations

from pathlib import Path

import yaml
from servesim.config.scenario import Scenario
from servesim.report.recorded_runs import compared_rows, record_runs
from servesim.report.trust import capacity_fact, policy_fact, profile_facts, sweep_facts
from servesim.study.rate_summary import RateSummary
from servesim.study.result import load_result
from servesim.study.sweep import load_summary

from ..study import sweeps

OBJECTIVE = {"baseline": {"policy.decode_batch": 4}, "objectives": ["mean_e2el_ms"]}


def facts_of(folder: Path) -> dict[str, tuple[str, str]]:
    """Return the panel of a sweep: name -> (text, tone)."""
    summary = load_summary(folder)
    roles = compared_rows(summary)
    facts = sweep_facts(summary, record_runs(summary, roles), roles)
    return {fact.name: (fact.text, fact.tone) for fact in facts}


def test_a_profile_that_was_not_measured_or_is_missing_is_a_warning() -> None:
    (written,) = profile_facts(sweeps.COSTS)
    assert written.tone == "warn" and "not measured" in written.text
    (missing,) = profile_facts("no-such-profile")
    assert missing.tone == "warn" and "cannot be loaded now" in missing.text


def test_policies_name_their_recordings() -> None:
    def scenario(name: str) -> Scenario:
        return Scenario.model_validate(sweeps.base(policy={"name": name}))

    proven = policy_fact([scenario("vllm-v1")])
    assert proven.tone == "good" and "vllm-v1: recordings of the real schedulers of 0.11.0" in proven.text
    mixed = policy_fact([scenario("vllm-v1"), scenario("orca")])
    assert mixed.tone == "check" and "orca: hand-worked cases" in mixed.text


def test_the_panel_counts_the_model_calls_outside_the_measured_range(tmp_path: Path) -> None:
    cost = {"kind": "linear", "prefill": 0.02, "prefill_token": 0.0001, "decode_step": 0.02, "decode_row": 0.0005}
    (tmp_path / "profile").mkdir()
    profile = {"name": "small", "grid": {"decode_rows": [1, 4]}, "cost": cost}
    (tmp_path / "profile" / "profile.yaml").write_text(yaml.safe_dump(profile))
    base = sweeps.base(profile=str(tmp_path / "profile"), workload=sweeps.workload(60, 12.0))
    file = sweeps.sweep_file(tmp_path, base=base, params={"policy.decode_batch": [4, 8]}, **OBJECTIVE)
    assert sweeps.sim("sweep", file, "-o", tmp_path / "out", "-j", 1, "-q") == 0
    text, tone = facts_of(tmp_path / "out")["Outside the measured range"]
    share = float(text.split("winner ")[1].split(" %")[0])
    # llm-serving pads every decode step to 8 rows; only prefill steps stay inside the range
    assert 50 < share < 100 and "baseline 0.0 %" in text and tone == "warn"
    assert "1 of 2 configurations have steps outside" in text
    assert facts_of(tmp_path / "out")["Held-out error"] == ("unknown: the profile has none", "warn")


def test_a_single_step_outside_the_range_is_not_green(tmp_path: Path) -> None:
    """The terminal says `outside profile: all`, so the page must not show a green 0.0 %."""
    (tmp_path / "profile").mkdir()
    cost = {"kind": "linear", "prefill": 0.002, "decode_step": 0.002}
    profile = {"name": "small", "grid": {"prefill_tokens": [1, 499], "decode_rows": [1, 9]}, "cost": cost}
    (tmp_path / "profile" / "profile.yaml").write_text(yaml.safe_dump(profile))
    requests = ["id,arrival,prompt,output", *(f"{n},{n},{500 if n == 3 else 20},900" for n in range(5))]
    (tmp_path / "trace.csv").write_text("\n".join(requests) + "\n")
    base = {"policy": {"name": "orca"}, "profile": str(tmp_path / "profile"), "trace": str(tmp_path / "trace.csv")}
    params = {"policy.max_num_seqs": [4, 8]}
    file = sweeps.sweep_file(tmp_path, base=base, params=params, objectives=["mean_e2el_ms"], replications=1)
    assert sweeps.sim("sweep", file, "-o", tmp_path / "out", "-j", 1, "-q", "--no-report") == 0
    text, tone = facts_of(tmp_path / "out")["Outside the measured range"]
    assert "less than 0.1 % of the model calls" in text and "3 of 3 configurations have steps outside" in text
    assert " 0.0 %" not in text and tone == "check"


def test_a_capacity_with_steps_outside_the_measured_range_is_named(tmp_path: Path) -> None:
    keys = {"params": {"policy.decode_batch": [2, 8]}, "rates": [1, 9], "subject_to": ["p99_ttft_ms <= 800"]}
    file = sweeps.sweep_file(tmp_path, base=sweeps.base(workload=sweeps.workload(20, 1.0)), **keys)
    assert sweeps.sim("sweep", file, "-o", tmp_path / "out", "-j", 1, "-q", "--no-report") == 0
    result = load_result(tmp_path / "out")
    assert isinstance(result, RateSummary) and "outside" not in capacity_fact(result).text
    lightest = result.curves[0].points[0]
    assert lightest.good
    for run in lightest.row.runs:
        run["outside_profile"] = True
    fact = capacity_fact(result)
    assert fact.text.startswith("1 configuration with steps outside the measured range; ") and fact.tone == "check"
