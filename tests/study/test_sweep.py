"""Sweeps from file to winner: common random numbers, intervals, labels, files, and errors."""

from __future__ import annotations

import csv
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.config.layers import read_scenario_file
from servesim.config.scenario import scenario_from
from servesim.config.user_code import allow_code
from servesim.core import BadInput, Request
from servesim.runs.simulate import simulate
from servesim.study.executor import Serial
from servesim.study.ranking import CONFIRM_REPLICATION_OFFSET, Summary
from servesim.study.single_run import RunContext, Task, replication_seed
from servesim.study.sweep import load_summary, plan_rounds, sweep
from servesim.study.sweep_file import read_experiment
from servesim.study.sweep_text import format_result
from servesim.study.table import write_summary

from ..pseudo_terminal import on_terminal
from . import sweeps


def run(folder: Path, **keys: Any) -> Summary:
    experiment = read_experiment(sweeps.sweep_file(folder, **keys))
    return Summary(experiment, sweep(experiment, folder / "out", Serial()))


def test_a_sweep_ranks_configurations_and_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweeps.sim("sweep", sweeps.sweep_file(tmp_path), "-o", tmp_path / "out", "-j", 1) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(sweeps.FILES)
    with open(tmp_path / "out/summary.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["rank"]) for row in rows] == list(range(1, 8))
    assert [float(row["makespan"]) for row in rows] == sorted(float(row["makespan"]) for row in rows)
    assert sorted(int(row["config"]) for row in rows) == list(range(7))
    assert {row["counted"] for row in rows} == {"terminating: all requests"}
    baseline = next(row for row in rows if row["config"] == "0")
    assert baseline["labels"].startswith("baseline") and float(baseline["makespan_difference"]) == 0.0
    text = capsys.readouterr().out
    assert "7 configurations, 21 runs; terminating: all requests; common random numbers, 95 % t intervals" in text


def test_best_yaml_repeats_the_first_replication_of_the_winner(tmp_path: Path) -> None:
    summary = run(tmp_path)
    sweeps.sim("sweep", sweeps.sweep_file(tmp_path), "-o", tmp_path / "out", "-j", 1, "--resume")
    assert sweeps.sim("run", tmp_path / "out/best.yaml", "-o", tmp_path / "run") == 0
    result = json.loads((tmp_path / "run/result.json").read_text())
    first = summary.winner.runs[0]["metrics"]
    assert {key: result[key] for key in first} == first


def test_configurations_share_requests_and_replications_do_not() -> None:
    context = RunContext(sweeps.base(seed=5))
    one, other = (context.scenario(Task(0, 2, {"policy.decode_batch": batch})) for batch in (1, 8))
    assert one.seed == other.seed == replication_seed(5, 2)
    assert context.trace(one, Task(0, 2, {})) is context.trace(other, Task(1, 2, {}))
    arrivals = [tuple(context.trace(context.scenario(Task(0, r, {})), Task(0, r, {})).arrivals) for r in range(4)]
    assert len(set(arrivals)) == 4
    assert len({replication_seed(seed, r) for seed in range(20) for r in range(50)}) == 1000
    assert replication_seed(7, 0) == 7


def test_a_setting_without_effect_has_a_difference_of_exactly_zero(tmp_path: Path) -> None:
    summary = run(tmp_path, params={"policy.group_width": [64, 1, 7], "policy.decode_batch": [1, 2]}, baseline={})
    for row in summary.rows:
        if row.assignment.get("policy.decode_batch", 1) == 1:
            assert row.differences["makespan"] == (0.0, 0.0, 3) and row.differences["mean_ttft_ms"] == (0.0, 0.0, 3)


def test_a_record_has_the_metrics_of_the_same_single_run(tmp_path: Path) -> None:
    summary = run(tmp_path)
    row = summary.rows[2]
    tree = summary.experiment.tree(row.config)
    single = simulate(scenario_from({**tree, "seed": replication_seed(0, 1)})).result()
    assert row.runs[1]["metrics"] == {key: single[key] for key in row.runs[1]["metrics"]}
    assert row.runs[1]["time_breakdown"] == single["mean_seconds"]


def test_the_baseline_is_configuration_0_inside_or_outside_the_grid(tmp_path: Path) -> None:
    inside = read_experiment(sweeps.sweep_file(tmp_path, baseline={"policy.decode_batch": 4}))
    assert inside.configs[0] == {"policy.decode_batch": 4, "policy.order": "arrival"}
    assert len(inside.configs) == 6
    outside = read_experiment(sweeps.sweep_file(tmp_path, baseline={"policy.decode_batch": 3}))
    assert outside.configs[0] == {"policy.decode_batch": 3} and len(outside.configs) == 7


def test_a_policy_family_can_be_a_parameter(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("from servesim.policies.llm_serving import LLMServing\n\nclass Mine(LLMServing):\n    pass\n")
    names = ["llm-serving", f"{own}:Mine"]
    params = [{"policy.name": names, "policy.decode_batch": [2, 4]}, {"policy": ["llm-serving"]}]
    with allow_code(trust=True):
        summary = run(tmp_path, params=params, replications=1)
    assert len(summary.rows) == 5
    best = {row.mean("makespan") for row in summary.rows[:2]}
    assert len(best) == 1 and summary.rows[1].relation.tied


def test_replications_are_added_until_the_half_width_is_reached(tmp_path: Path) -> None:
    summary = run(tmp_path, ci="3%", replications=2, max_replications=40)
    for row in summary.rows:
        mean, change = row.means["makespan"], row.differences["makespan"]
        assert mean.half_width is not None and change.half_width is not None
        if len(row.runs) < 40 and row is not summary.baseline:
            assert mean.half_width <= 0.03 * mean.mean
            assert change.half_width <= 0.03 * summary.baseline.mean("makespan")
    assert "half-widths of makespan within 3 % after " in format_result(summary)
    counts = {len(row.runs) for row in summary.rows}
    assert min(counts) >= 3 and len(summary.baseline.runs) == max(counts)


def test_a_sweep_resumed_in_the_middle_plans_the_same_rounds(tmp_path: Path) -> None:
    experiment = read_experiment(sweeps.sweep_file(tmp_path, ci="5%", max_replications=8))
    records = sweep(experiment, tmp_path / "whole", Serial())
    whole = [tuple(task[:2]) for planned in plan_rounds(experiment, records) for task in planned]
    lines = (tmp_path / "whole/runs.jsonl").read_bytes().splitlines(keepends=True)
    for cut in (1, 8, 22, len(lines) - 1):
        folder = tmp_path / f"cut{cut}"
        folder.mkdir()
        (folder / "experiment.json").write_bytes((tmp_path / "whole/experiment.json").read_bytes())
        (folder / "runs.jsonl").write_bytes(b"".join(lines[:cut]))
        assert sweep(experiment, folder, Serial(), resume=True) == records
        assert (folder / "runs.jsonl").read_bytes() == b"".join(lines)
    assert set(whole) == set(records)


def test_steady_state_cuts_warm_up_and_drain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = sweeps.sweep_file(tmp_path, steady={"warm_up": 0.25, "drain": 0.25})
    assert sweeps.sim("sweep", file, "-o", tmp_path / "out", "-j", 1, "--replications", 1) == 0
    assert "steady state: without the first 25% and the last 25% of arrivals" in capsys.readouterr().out
    summary = load_summary(tmp_path / "out")
    row = summary.rows[0]
    requests = simulate(scenario_from(summary.experiment.tree(row.config))).requests
    first, last = requests[0].arrival, requests[-1].arrival
    low, high = first + 0.25 * (last - first), last - 0.25 * (last - first)
    inside = [r for r in requests if low <= r.arrival < high]
    assert row.mean("completed") == len(inside)
    mean = sum(r.client_end - r.arrival for r in inside if r.client_end is not None) / len(inside)
    assert row.mean("mean_e2el_ms") == pytest.approx(1e3 * mean)
    ended = sum(r.written for r in requests if r.client_end is not None and low <= r.client_end < high)
    assert row.mean("output_throughput") == pytest.approx(ended / (high - low))


def test_a_configuration_with_a_growing_backlog_is_saturated(tmp_path: Path) -> None:
    base = sweeps.base(workload=sweeps.workload(300, 4.0))
    summary = run(tmp_path, base=base, params={"policy.decode_batch": [1, 32]}, replications=2)
    labels = {row.assignment["policy.decode_batch"]: row.labels for row in summary.rows}
    assert "saturated" in labels[1] and "saturated" not in labels[32]


def test_a_stable_queue_is_not_saturated() -> None:
    from servesim.runs.steady_state import backlog_growth, is_saturated

    def served(gap: float, service: float, count: int = 400) -> list[Request]:
        requests, free = [], 0.0
        for k in range(count):
            request = Request(k, k * gap, 1, 1)
            free = request.client_end = max(free, request.arrival) + service
            requests.append(request)
        return requests

    assert not is_saturated(served(1.0, 0.99))
    assert is_saturated(served(1.0, 1.25))
    assert backlog_growth(served(1.0, 1.25))[0] == pytest.approx(
        0.2, abs=0.02
    )  # four of five arriving requests are served
    assert not is_saturated(served(0.0, 1.0))  # all arrive at once: no arrival rate
    assert not is_saturated([])


def test_configurations_are_labelled_outside_profile_stuck_or_more_unserved(tmp_path: Path) -> None:
    params = [{"policy.decode_batch": [4, 500]}, {"engine.num_blocks": [3]}]
    params += [{"engine.max_model_len": [40], "policy.decode_batch": [8]}]
    base = sweeps.base(profile="ascend910b4-llama2-7b", engine={"num_blocks": 200})
    summary = run(tmp_path, base=base, params=params, replications=1)
    labels = {row.label: row.labels for row in summary.rows}
    assert "stuck" in labels["engine.num_blocks=3"]
    short = next(row for row in summary.rows if row.assignment.get("engine.max_model_len") == 40)
    assert "serves fewer" in short.labels and not short.eligible
    assert "more unserved: " in (text := format_result(summary)) and "serves fewer" not in text
    write_summary(summary, tmp_path)
    assert "serves fewer" in (tmp_path / "summary.csv").read_text()  # the name in files stays
    wide = next(row for row in summary.rows if row.assignment == {"policy.decode_batch": 500})
    assert "outside profile" in wide.labels
    assert summary.rows[0].eligible and not summary.rows[-1].eligible


def test_a_failed_run_is_recorded_and_the_sweep_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from servesim.policies.llm_serving import LLMServing\n\nclass Faulty(LLMServing):\n"
        "    def decide(self, view):\n        raise RuntimeError('no idea')\n"
    )
    params = [{"policy.decode_batch": [2]}, {"policy.name": f"{own}:Faulty"}]
    file = sweeps.sweep_file(tmp_path, params=params, replications=1)
    assert sweeps.sim("sweep", file, "-o", tmp_path / "out", "-j", 1, "--trust") == 1
    text = capsys.readouterr().out
    assert f"failed: configuration 2: {own}:5: RuntimeError: no idea" in text
    assert yaml.safe_load((tmp_path / "out/best.yaml").read_text())["policy"]["decode_batch"] == 2


def test_without_randomness_there_is_one_run_per_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,prompt,output\n" + "".join(f"{k / 4},20,{5 + k % 7}\n" for k in range(20)))
    base = {key: value for key, value in sweeps.base(trace=str(trace)).items() if key != "workload"}
    assert sweeps.sim("sweep", sweeps.sweep_file(tmp_path, base=base), "-o", tmp_path / "out", "-j", 1) == 0
    assert "no randomness: one run per configuration, no confidence intervals" in capsys.readouterr().out
    assert all(
        len(row.runs) == 1 and row.means["makespan"].half_width is None for row in load_summary(tmp_path / "out").rows
    )


def test_a_base_can_be_a_file_a_preset_or_keys_and_set_overrides_it(tmp_path: Path) -> None:
    (tmp_path / "scenario.yaml").write_text(yaml.safe_dump(sweeps.base()))
    from_file = read_experiment(sweeps.sweep_file(tmp_path, base="scenario.yaml"), ["engine.num_blocks=77"])
    assert from_file.base["engine"]["num_blocks"] == 77 and from_file.base["workload"] == sweeps.workload()
    with pytest.raises(BadInput, match=r"base: no file .* and no preset 'nowhere'"):
        read_experiment(sweeps.sweep_file(tmp_path, base="nowhere"))


def test_several_objectives_give_a_pareto_front_and_a_goal_can_be_max(tmp_path: Path) -> None:
    summary = run(tmp_path, objectives=["max:output_throughput", {"metric": "mean_tpot_ms", "goal": "min"}])
    front = [row for row in summary.rows if row.on_pareto_front]
    assert summary.winner in front and len(front) >= 2
    means = [row.mean("output_throughput") for row in summary.rows if row is not summary.winner]
    assert means == sorted(means, reverse=True)
    assert summary.winner is summary.rows[0] and not summary.winner.relation.tied


def test_the_winner_of_a_folder_is_exported_as_the_server_s_yaml(tmp_path: Path) -> None:
    file = sweeps.sweep_file(tmp_path, replications=1, params={"policy.decode_batch": [8]})
    assert sweeps.sim("sweep", file, "-o", tmp_path / "out", "-j", 1, "--no-report") == 0
    out = tmp_path / "out/llm-serving.yaml"
    assert sweeps.sim("export", tmp_path / "out", "--to", "llm-serving", "-o", out) == 0
    config = yaml.safe_load((tmp_path / "out/llm-serving.yaml").read_text())
    assert config["model_config"]["decode_batch_size"] == [8]
    assert not (tmp_path / "out/report.html").exists()
    assert read_scenario_file(tmp_path / "out/llm-serving.yaml")["policy"]["decode_batch"] == 8


def test_an_experiment_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = sweeps.sweep_file(tmp_path, replications=1), tmp_path / "out"
    assert sweeps.sim("sweep", file, "-o", out, "-j", 1) == 0
    before = sweeps.contents(out)
    assert sweeps.sim("sweep", file, "-o", out, "-j", 1) == 2
    message = "already holds a sweep; continue with --resume, or use --fresh or another folder (-o)"
    assert message in capsys.readouterr().err
    other = sweeps.sweep_file(tmp_path, replications=1, params={"policy.decode_batch": [3]})
    assert sweeps.sim("sweep", other, "-o", out, "-j", 1, "--resume") == 2
    assert "holds another sweep: configs differs" in capsys.readouterr().err
    assert sweeps.contents(out) == before
    assert sweeps.sim("sweep", sweeps.sweep_file(tmp_path, replications=1), "-o", out, "-j", 1, "--fresh") == 0
    assert sweeps.contents(out) == before == sweeps.contents(tmp_path / "out-2")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/diary.txt").write_text("mine")
    assert sweeps.sim("sweep", file, "-o", tmp_path / "full", "-j", 1) == 2
    assert "found diary.txt in it" in capsys.readouterr().err
    assert sweeps.sim("sweep", file, "-o", file, "-j", 1) == 2
    assert "expected a folder to write to, found a file" in capsys.readouterr().err


def test_the_winner_is_confirmed_on_new_replications(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = run(tmp_path)
    file = sweeps.sweep_file(tmp_path, confirm=4)
    assert sweeps.sim("sweep", file, "-o", tmp_path / "more", "-j", 1) == 0
    assert "winner vs. baseline on 4 new replications (not used to choose it): makespan -" in capsys.readouterr().out
    summary = load_summary(tmp_path / "more")
    assert [row.config for row in summary.rows] == [row.config for row in plain.rows]
    assert [row.means for row in summary.rows] == [row.means for row in plain.rows]
    change = summary.confirm_difference("makespan")
    assert change.n == 4 and change.excludes_zero and change.mean < 0 and summary.run_count == plain.run_count + 8
    assert plain.confirm_difference("makespan").n == 0
    records = [json.loads(line) for line in (tmp_path / "more/runs.jsonl").read_text().splitlines()]
    base = [
        run for run in records if run.get("config") == 0 and run.get("replication", 0) >= CONFIRM_REPLICATION_OFFSET
    ]
    assert summary.confirm_baseline_mean("makespan") == pytest.approx(
        statistics.mean(run["metrics"]["makespan"] for run in base)
    )
    whole = (tmp_path / "more/runs.jsonl").read_bytes()
    (tmp_path / "more/runs.jsonl").write_bytes(whole[: len(whole) - 3000])
    assert sweeps.sim("sweep", file, "-o", tmp_path / "more", "-j", 1, "--resume") == 0
    assert (tmp_path / "more/runs.jsonl").read_bytes() == whole


@pytest.mark.skipif(sys.platform == "win32", reason="needs pseudo-terminals")
def test_a_terminal_gets_a_bar_with_rate_and_time_left(tmp_path: Path) -> None:
    file = sweeps.sweep_file(tmp_path, replications=2)
    text = on_terminal(["sweep", str(file), "-o", str(tmp_path / "out"), "-j", "1", "--no-report"])
    assert re.search(r"sweep: +\d+%\|.*\| \d+/14 \[\d\d:\d\d<\d\d:\d\d, +[\d.]+(run/s|s/run)\]", text)
    assert re.search(r"sweep: 100%\|.*\| 14/14 \[", text)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["mean_e2el_ms", "p99_ttft_ms"]),
        ({"slo": {"ttft": 500}}, ["request_goodput", "p99_ttft_ms"]),
        ({"workload": {"contest": {"X": 5, "T": 4}}}, ["makespan", "mean_ttft_ms"]),
    ],
)
def test_a_sweep_without_objectives_ranks_by_what_fits_the_load(
    tmp_path: Path, changes: dict[str, Any], expected: list[str]
) -> None:
    file = sweeps.sweep_file(tmp_path, base=sweeps.base(**changes), objectives=[])
    assert [objective.metric for objective in read_experiment(file).objectives] == expected
