"""Constraints and ties in a sweep: who can win, what the table and the verdict say, exit codes."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from servesim.study.executor import Serial
from servesim.study.ranking import Summary
from servesim.study.sweep import load_summary, sweep
from servesim.study.sweep_file import read_experiment
from servesim.study.sweep_text import describe_needed, format_result
from servesim.study.verdict import verdict_of

from . import sweeps

QUIET = ("-j", 1, "-q", "--no-report")


def run(folder: Path, **keys: Any) -> Summary:
    experiment = read_experiment(sweeps.sweep_file(folder, **keys))
    return Summary(experiment, sweep(experiment, folder / "out", Serial()))


def test_a_configuration_that_misses_a_constraint_cannot_win(tmp_path: Path) -> None:
    free = run(tmp_path, objectives=["makespan"], indifference=0)
    limit = sorted(row.mean("mean_tpot_ms") for row in free.rows)[2]  # three configurations meet it
    assert free.winner.mean("mean_tpot_ms") > limit
    (tmp_path / "second").mkdir()
    bound = f"mean_tpot_ms <= {limit!r}"
    bounded = run(tmp_path / "second", objectives=["makespan"], indifference=0, subject_to=[bound])
    assert bounded.winner is not None and bounded.winner.feasible
    feasible = [row for row in bounded.rows if row.feasible]
    assert len(feasible) == 3 and bounded.rows[:3] == feasible
    assert bounded.winner.mean("makespan") == min(row.mean("makespan") for row in feasible)
    violations = [row.violation for row in bounded.rows[3:]]
    assert violations == sorted(violations) and violations[0] > 0
    assert any(label.startswith("misses mean_tpot_ms <= ") for label in bounded.rows[-1].labels)
    assert bounded.rows[-1].relation.outcome == "cannot win" and not bounded.rows[-1].on_pareto_front
    assert "3 of 7 configurations meet mean_tpot_ms <= " in format_result(bounded)


def test_a_constraint_that_nothing_meets_names_the_nearest_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = sweeps.sweep_file(tmp_path), tmp_path / "out"
    bounds = ("--subject-to", "mean_tpot_ms <= 1", "--subject-to", "failed<=0")
    assert sweeps.sim("sweep", file, "-o", out, *QUIET, *bounds) == 1
    text = capsys.readouterr().out
    summary = load_summary(out)
    nearest = min(summary.rows, key=lambda row: row.mean("mean_tpot_ms"))
    assert "No winner: no configuration meets mean_tpot_ms <= 1, failed <= 0. Nearest: " in text
    assert verdict_of(summary).kind == "infeasible" and verdict_of(summary).nearest is nearest
    assert summary.winner is None and not (out / "best.yaml").exists()
    with (out / "summary.csv").open() as rows:
        first = next(csv.DictReader(rows))
    assert (first["feasible"], first["relation"], int(first["config"])) == ("0", "cannot win", nearest.config)
    assert float(first["violation"]) == pytest.approx(nearest.mean("mean_tpot_ms") - 1)


def test_the_next_objective_breaks_a_tie(tmp_path: Path) -> None:
    """With a wide threshold all configurations are tied by makespan, and the latency decides."""
    summary = run(tmp_path, objectives=["makespan", "mean_ttft_ms"], indifference="99%")
    assert summary.winner is not None
    others = [row for row in summary.rows if row is not summary.winner]
    assert all(row.relation.tied for row in others)
    only = run_again(tmp_path, objectives=["makespan"], indifference="99%")
    assert only.winner is only.baseline and verdict_of(only).kind == "baseline"


def run_again(folder: Path, **keys: Any) -> Summary:
    (folder / "again").mkdir()
    return run(folder / "again", **keys)


def measured(folder: Path, *values: list[float], **keys: Any) -> Summary:
    """Return the summary of a sweep whose runs have these makespans, one list per configuration."""
    params = {"policy.group_width": [4 + config for config in range(1, len(values))]}
    keys = {"objectives": ["makespan"], **keys}
    experiment = read_experiment(sweeps.sweep_file(folder, params=params, **keys))
    lists = [(c, r, value) for c, group in enumerate(values) for r, value in enumerate(group)]
    runs = {(c, r): {"config": c, "replication": r, "metrics": {"makespan": v, "failed": 0}} for c, r, v in lists}
    return Summary(experiment, runs)


def test_the_table_separates_equal_undecided_and_worse_configurations(tmp_path: Path) -> None:
    best, equal = [100.0, 104.0, 102.0], [100.1, 104.2, 102.1]
    undecided, worse = [101.0, 103.0, 105.0], [110.0, 115.0, 112.0]
    summary = measured(tmp_path, equal, best, undecided, worse)
    outcomes = {row.config: row.relation.outcome for row in summary.rows}
    assert outcomes == {0: "best", 1: "equal", 2: "undecided", 3: "worse"}  # tied: the baseline has no changes
    assert summary.winner is summary.baseline
    text = format_result(summary)
    assert "=: 1 configuration equal to the best in makespan within 0.5 %" in text
    replications = next(row for row in summary.rows if row.config == 2).relation.replications
    assert replications is not None and replications > 3
    assert f"about {replications} replications would decide" in text
    expected = "No winner: nothing beats the baseline (1 configuration equal within 0.5 %, 1 not decided)."
    assert verdict_of(summary).text == expected
    assert [line[0] for line in text.splitlines()[1:5]] == ["1", "=", "?", "4"]


def test_the_verdict_names_the_best_mean_if_the_winner_has_another_one(tmp_path: Path) -> None:
    baseline, other = [100.0, 109.0, 104.0], [99.0, 103.0, 101.0]
    summary = measured(tmp_path, baseline, other, [150.0, 151.0, 152.0])
    assert summary.winner is summary.baseline and summary.best_mean is not None and summary.best_mean.config == 1
    assert verdict_of(summary).text == (
        "No winner: nothing beats the baseline (1 not decided). The lowest mean of makespan is "
        "101.0 ± 5.0 s (group_width=5), but the difference is not decided."
    )
    (tmp_path / "max").mkdir()
    highest = measured(tmp_path / "max", baseline, other, objectives=["max:makespan"])
    assert highest.winner is highest.baseline is highest.best_mean
    assert "mean of" not in verdict_of(highest).text


def test_the_note_on_open_ties_says_how_many_runs_decide_half_and_all() -> None:
    assert describe_needed([7]) == "about 7 replications would decide"
    assert describe_needed([4, 4]) == "about 4 replications would decide"
    assert describe_needed([90, 4, 16, 4]) == "about 4 replications would decide half of them, 90 all"
    assert describe_needed([4, None, 8]) == (
        "about 4 replications would decide half of them, 8 all, the uncertainty of the cost model leaves 1 open"
    )
    assert describe_needed([None]) == "the uncertainty of the cost model leaves it open"


def test_a_clear_winner_has_no_ties(tmp_path: Path) -> None:
    summary = measured(tmp_path, [110.0, 115.0, 112.0], [100.0, 104.0, 102.0])
    assert summary.winner is not None and summary.winner.config == 1 and summary.decided_by == []
    assert verdict_of(summary).text.startswith("Winner: group_width=5: makespan 102.0 ± 5.0 s, -9.2")


def test_terms_of_the_ranking_are_kept(tmp_path: Path) -> None:
    summary = run(tmp_path, subject_to="makespan <= 1000", indifference="2 %")
    stored = json.loads((tmp_path / "out/experiment.json").read_text())
    assert stored["subject_to"] == ["makespan <= 1000"] and stored["indifference"] == 0.02
    again = load_summary(tmp_path / "out")
    assert again.experiment.subject_to == summary.experiment.subject_to
    assert again.experiment.indifference == 0.02
