"""The trust panel: what it says about profiles, policies, ranges and replications."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from servesim import api
from servesim.cli import main
from servesim.config.scenario import Scenario
from servesim.costs.device_profile import load_profile
from servesim.engine.rules import rules_of
from servesim.policies.vllm_v1 import VLLMV1
from servesim.report.recorded_runs import compared_rows, record_runs
from servesim.report.trust import capacity_fact, policy_fact, profile_facts, sweep_facts
from servesim.runs.run_warnings import source_notes
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


def test_a_measured_profile_names_its_source_and_its_error() -> None:
    facts = {fact.name: fact for fact in profile_facts("h200-llama2-7b")}
    assert facts["Profile"].text == "h200-llama2-7b: NVIDIA H200, bfloat16, llama2-7b"
    assert "14790 samples" in facts["Measured"].text and facts["Measured"].text.endswith("on 2026-11-15")
    [note] = source_notes([load_profile("h200-llama2-7b")])
    assert facts["Backend"].text == f"P{note.text[1:]}." and "step times of vLLM" in note.text
    assert facts["Held-out error"].text.startswith("prefill 2.6 %, decode 1.5 %, mixed 2.6 %")
    contest = {fact.name: fact for fact in profile_facts("ascend910b4-llama2-7b")}
    assert "Backend" not in contest and contest["Measured"].tone == "check"  # it has no date


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


def test_every_report_says_how_the_policy_was_validated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    workload = {"requests": 4, "arrivals": {"kind": "burst"}, "lengths": {"prompt": 20, "output": 3}}
    tree = {"policy": {"name": "vllm-v1"}, "profile": {"base": 0.01}, "workload": workload}
    text = rules_of(VLLMV1()).validated_against
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(tree))
    assert main(["run", str(tmp_path / "s.yaml")]) == 0
    assert f"\npolicy validated against: {text}\n" in capsys.readouterr().out
    note = f"Policy validated: vllm-v1: {text}"
    assert note in api.run(tree)._repr_html_()
    mixed = api.compare(tree, {**tree, "policy": {"name": "orca"}}, replications=2)
    assert note in mixed._repr_html_() and "orca: hand-worked cases" in mixed._repr_html_()
    mixed.report(tmp_path / "page.html")
    assert "orca: hand-worked cases" in (tmp_path / "page.html").read_text()
    keys = {"params": {"policy.max_num_seqs": [2, 4]}, "objectives": ["mean_e2el_ms"]}
    assert note in api.sweep({"base": tree, **keys})._repr_html_()


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


def test_the_panel_names_the_mean_and_the_largest_error_of_runs() -> None:
    (error,) = [fact for fact in profile_facts("ascend910b4-llama2-7b") if fact.name == "Held-out error"]
    runs = load_profile("ascend910b4-llama2-7b").about["fit"]["predicted"]
    errors = [abs(run["error"]) for run in runs]
    mean, largest = 100 * sum(errors) / len(errors), 100 * max(errors)
    assert error.text == f"makespan {mean:.1f} % (mean); largest: makespan {largest:.1f} %"
    assert (f"{mean:.2f}", f"{largest:.1f}") == ("0.62", "1.4")


def test_one_replication_is_a_warning(tmp_path: Path) -> None:
    file = sweeps.sweep_file(tmp_path, replications=1)
    assert sweeps.sim("sweep", file, "-o", tmp_path / "out", "-j", 1, "-q") == 0
    facts = facts_of(tmp_path / "out")
    assert facts["Replications"] == ("1: differences have no confidence interval", "warn")
    assert facts["Profile"][1] == "warn"


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
