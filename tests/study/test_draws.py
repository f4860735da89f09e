"""Draws of the cost model in sweeps, searches and comparisons: pairs, intervals, wins, and the path without them."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from servesim.core import BadInput
from servesim.statistics.intervals import Interval, with_draws
from servesim.study.compared_runs import load_runs
from servesim.study.executor import Serial
from servesim.study.experiment import planned_draws
from servesim.study.ranking import Row, count_wins
from servesim.study.sweep import load_summary
from servesim.study.sweep_file import read_experiment

from . import sweeps
from .test_compare import scenario

QUIET = ("-j", 1, "-q")


def swept(folder: Path, *words: Any, **keys: Any) -> Path:
    """Run a sweep and return its folder."""
    assert sweeps.sim("sweep", sweeps.sweep_file(folder, **keys), "-o", folder / "out", *QUIET, *words) == 0
    return folder / "out"


def journal(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]


def test_the_effect_of_a_draw_is_the_change_on_the_same_requests() -> None:
    runs = [{"replication": r, "metrics": {"makespan": value}} for r, value in enumerate([10.0, 20.0])]
    draws = [{"replication": k % 2, "draw": k, "metrics": {"makespan": 10.0 * (k % 2) + 11 + k}} for k in range(4)]
    assert Row(0, {}, "", runs, draws=draws).effects("makespan") == {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}
    draws[1]["stuck"], draws[2]["metrics"] = "no request can run", {}
    assert Row(0, {}, "", runs, draws=draws).effects("makespan") == {0: 1.0, 3: 4.0}


def test_draws_take_turns_over_the_replications() -> None:
    assert [(r, draw.number, draw.total) for r, draw in planned_draws(3, 2)] == [(0, 0, 3), (1, 1, 3), (0, 2, 3)]


def test_equal_configurations_win_together() -> None:
    effects = [{0: 0.0, 1: 3.0}, {0: 0.0, 1: 3.0}, {0: 0.0, 1: 0.0}]
    assert count_wins([1.0, 1.0, 2.0], effects) == ([1, 1, 1], 2)
    assert count_wins([], []) == ([], 0)


def test_draws_and_replications_add_as_variances() -> None:
    combined = with_draws(Interval(5.0, 3.0, 4), [-1.0, 0.0, 1.0])
    assert combined.half_width == pytest.approx(math.hypot(3.0, 1.96), abs=1e-3)
    assert with_draws(Interval(5.0, None, 1), [-1.0, 0.0, 1.0]).half_width == pytest.approx(1.96, abs=1e-3)
    assert with_draws(Interval(5.0, 3.0, 4), []) == Interval(5.0, 3.0, 4)


def test_a_sweep_reports_how_often_the_winner_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = swept(tmp_path, "--intervals", 6)
    text, summary = capsys.readouterr().out, load_summary(out)
    wins = summary.winner.draws_won
    assert f"winner in {wins} of 6 draws of the cost model, by makespan" in text
    rows = list(csv.DictReader((out / "summary.csv").open()))
    assert [int(row["draws_won"]) for row in rows] == [row.draws_won for row in summary.rows]
    assert sum(row.draws_won for row in summary.rows) >= summary.draw_count == 6
    assert "draws won" in (out / "report.html").read_text()
    assert "no stored uncertainty" not in text  # a remark, on stderr


def test_draw_k_is_the_same_cost_model_for_every_configuration(tmp_path: Path) -> None:
    """The session factor changes every step: without a queue, all latencies change by the same factor."""
    slow = sweeps.base(workload=sweeps.workload(rate=0.001))
    out = swept(tmp_path, "--intervals", 4, "--no-report", base=slow, replications=2)
    records = journal(out)
    fitted = {(r["config"], r["replication"]): r["metrics"]["mean_e2el_ms"] for r in records if "draw" not in r}
    factors: dict[int, list[float]] = {}
    for record in records:
        if "draw" in record:
            value = record["metrics"]["mean_e2el_ms"] / fitted[record["config"], record["replication"]]
            factors.setdefault(record["draw"], []).append(value)
    assert len(factors) == 4
    assert len({round(values[0], 6) for values in factors.values()}) == 4
    for values in factors.values():
        assert values == pytest.approx([values[0]] * len(values), rel=1e-9)


def test_intervals_widen_and_means_stay(tmp_path: Path) -> None:
    with_intervals = load_summary(swept(tmp_path, "--intervals", 6, "--no-report"))
    (tmp_path / "plain").mkdir()
    without = load_summary(swept(tmp_path / "plain", "--no-report"))
    assert [row.config for row in with_intervals.rows] == [row.config for row in without.rows]
    for row, plain in zip(with_intervals.rows, without.rows):
        for metric in row.means:
            assert row.means[metric].mean == plain.means[metric].mean
            assert (row.means[metric].half_width or 0) > (plain.means[metric].half_width or 0)
            assert with_intervals.without_draws(row, metric)[0] == plain.means[metric]


def test_without_draws_no_file_mentions_them(tmp_path: Path) -> None:
    out = swept(tmp_path, intervals=False)
    for name in sweeps.FILES:
        text = re.sub(r"<script.*?</script>", "", (out / name).read_text(), flags=re.DOTALL)  # scripts draw charts
        assert "draw" not in text, name


def test_a_resumed_sweep_adds_the_missing_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = swept(tmp_path, intervals=3)
    complete = sweeps.contents(out)
    lines = complete["runs.jsonl"].splitlines(keepends=True)
    (out / "runs.jsonl").write_bytes(b"".join(lines[:-4]))
    assert sweeps.sim("sweep", tmp_path / "sweep.yaml", "-o", out, *QUIET, "--resume") == 0
    assert sweeps.contents(out) == complete
    assert sweeps.sim("sweep", sweeps.sweep_file(tmp_path), "-o", out, *QUIET, "--resume") == 2
    assert "holds another sweep: intervals differs" in capsys.readouterr().err


def test_a_search_draws_its_leaders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    file, out = sweeps.sweep_file(tmp_path, trials=4, batch=2, objectives=["makespan"]), tmp_path / "out"
    assert sweeps.sim("search", file, "-o", out, *QUIET, "--no-report", "--intervals", 3) == 0
    assert "of 3 draws of the cost model, by makespan" in capsys.readouterr().out
    configs = {json.dumps(r["assignment"]) for r in journal(out)}
    assert sum("draw" in r for r in journal(out)) == 3 * len(configs)
    size = (out / "runs.jsonl").stat().st_size
    assert sweeps.sim("search", file, "-o", out, *QUIET, "--no-report", "--intervals", 3, "--resume") == 0
    assert (out / "runs.jsonl").stat().st_size == size


def test_a_comparison_pairs_the_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = scenario(tmp_path, "a"), scenario(tmp_path, "b", decode_batch=4)
    words = ("compare", a, b, "-j", 1, "--replications", 3, "--metric", "makespan", "--intervals", 5)
    assert sweeps.sim(*words) == 0
    captured = capsys.readouterr()
    assert "better in 5 of 5 draws" in captured.out
    assert "and 5 draws of the cost model (calibration uncertainty)" in captured.out
    assert captured.err.count("profile inline has no stored uncertainty") == 1
    assert sweeps.sim(*words, "--json") == 0
    result = json.loads(capsys.readouterr().out)["metrics"]["makespan"]
    assert len(result["draws"]) == 5 and all(change < 0 for change in result["draws"])
    runs = [side.effects("makespan") for side in load_runs((str(a), str(b)), (), 3, Serial(), 5)]
    spread = [runs[1][k] - runs[0][k] for k in range(5)]
    assert result["draws"] == pytest.approx([result["difference"] + effect for effect in spread])


@pytest.mark.parametrize("value", [1, 1001, -2, 2.5, "many", math.inf, math.nan, [24], None])
def test_a_wrong_number_of_draws_is_rejected(value: Any, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="intervals: expected true, false or a number of draws from 2 to 1000"):
        read_experiment(sweeps.sweep_file(tmp_path, intervals=value))


def test_true_is_the_default_number_of_draws(tmp_path: Path) -> None:
    assert read_experiment(sweeps.sweep_file(tmp_path, intervals=True)).intervals == 24
