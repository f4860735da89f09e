"""`sim compare`: pairs, printed sentences, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from servesim.study.compare import ComparedRuns, Difference, batch_means, compare, summarise
from servesim.study.intervals import Interval
from servesim.study.objective import Objective

from . import sweeps

LOW, HIGH = Objective("makespan", "min"), Objective("output_throughput", "max")


def scenario(folder: Path, name: str, **policy: object) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(sweeps.base(policy={"name": "llm-serving", **policy})))
    return path


def test_equal_scenarios_are_the_same_in_every_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = scenario(tmp_path, "a", decode_batch=2), scenario(tmp_path, "b", decode_batch=2, group_width=9)
    assert sweeps.sim("compare", a, b, "-j", 1, "--replications", 3, "--tolerance", "0%") == 0
    text = capsys.readouterr().out
    assert "A and B are the same in every metric. All within the tolerance. 3 pairs of replications" in text


def test_a_better_policy_is_reported_and_exceeds_the_tolerance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = scenario(tmp_path, "a"), scenario(tmp_path, "b", decode_batch=4)
    words = ("compare", a, b, "-j", 1, "--replications", 4, "--metric", "makespan", "--metric", "mean_tpot_ms")
    assert sweeps.sim(*words, "--tolerance", "5%") == 3
    text = capsys.readouterr().out
    assert "By makespan, B is " in text and "% better (interval -" in text
    assert "B is worse in mean_tpot_ms." in text and "Outside the tolerance of 5 %: makespan (-" in text
    assert sweeps.sim(*words, "--tolerance", "500%", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["figures"]["makespan"]["pairs"] == 4 and result["figures"]["makespan"]["part"] < -0.3


def test_runs_in_folders_are_paired_by_batches_of_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, batch in (("a", 1), ("b", 4)):
        assert sweeps.sim("run", scenario(tmp_path, name, decode_batch=batch), "-o", tmp_path / name) == 0
    assert sweeps.sim("compare", tmp_path / "a", tmp_path / "b", "-j", 1, "--metric", "mean_e2el_ms") == 0
    assert "20 pairs of batches" in capsys.readouterr().out
    assert sweeps.sim("compare", tmp_path / "a", tmp_path / "a", "-j", 1) == 0
    assert "the same in every metric" in capsys.readouterr().out


def test_configurations_of_a_sweep_are_paired_by_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert sweeps.sim("sweep", sweeps.sweep_file(tmp_path), "-o", out, "-j", 1, "--no-report") == 0
    summary = (out / "summary.csv").read_text().splitlines()
    expected = float(dict(zip(summary[0].split(","), summary[1].split(",")))["makespan_diff"])
    capsys.readouterr()
    assert sweeps.sim("compare", f"{out}:0", out, "-j", 1, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["figures"]["makespan"]["difference"] == pytest.approx(expected, rel=1e-12)
    assert sweeps.sim("compare", f"{out}:0", out / "best.yaml", "-j", 1, "--replications", 3, "--json") == 0
    assert json.loads(capsys.readouterr().out)["figures"] == result["figures"]
    assert sweeps.sim("compare", f"{out}:99", out, "-j", 1) == 2
    assert "no configuration 99, only 0 to 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("objective", "change", "text"),
    [
        (LOW, Interval(0.0, 0.0, 5), "the same"),
        (LOW, Interval(-4.0, 1.0, 5), "B is 4.00 % better (interval -5.00 to -3.00 %)"),
        (HIGH, Interval(-4.0, 1.0, 5), "B is 4.00 % worse (interval -5.00 to -3.00 %)"),
        (LOW, Interval(1.0, 2.0, 5), "the difference is not significant (interval -1.00 to +3.00 %)"),
        (HIGH, Interval(2.5, None, 1), "B is 2.50 % better (one run each)"),
    ],
)
def test_a_difference_is_described(objective: Objective, change: Interval, text: str) -> None:
    assert Difference(objective, 100.0, 100.0 + change.mean, change, "replications").describe() == text


def test_only_runs_with_the_same_seed_are_paired() -> None:
    a = ComparedRuns("a", {1: {"makespan": 10.0}, 2: {"makespan": 20.0}, 3: {"makespan": 99.0}})
    b = ComparedRuns("b", {2: {"makespan": 22.0}, 1: {"makespan": 12.0}, 4: {"makespan": 0.0}})
    (difference,) = compare(a, b, [LOW])
    assert difference.change == (2.0, 0.0, 2) and (difference.a, difference.b) == (15.0, 17.0)
    assert summarise([difference], 0.2).endswith("All within the tolerance.")
    assert "Outside the tolerance of 10 %: makespan (+13.33 %)" in summarise([difference], 0.1)


def test_batch_means_average_over_consecutive_arrivals() -> None:
    fixed = {"output": 3, "outcome": "finished"}
    times = [{"id": str(k), "arrival": float(k), "first_token": k + 1.0, "finish": k + 3.0} for k in range(80)]
    means = batch_means([{**fixed, **row} for row in times])
    assert len(means) == 20
    assert set(map(tuple, (v.items() for v in means.values()))) == {
        (("mean_ttft_ms", 1000.0), ("mean_e2el_ms", 3000.0), ("mean_tpot_ms", 1000.0))
    }


@pytest.mark.parametrize("words", [("--confidence", "100%"), ("--metric", "speed")])
def test_bad_options_exit_with_2(tmp_path: Path, words: tuple[str, str]) -> None:
    a = scenario(tmp_path, "a")
    assert sweeps.sim("compare", a, a, "-j", 1, *words) == 2


def test_a_folder_without_a_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweeps.sim("compare", tmp_path, scenario(tmp_path, "a"), "-j", 1) == 2
    assert "expected a folder of `sim run -o` or `sim sweep`" in capsys.readouterr().err
