"""Sweeps from file to winner: common random numbers, intervals, labels, files, and what is refused."""

from __future__ import annotations

import csv
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.config.overrides import read_tree
from servesim.config.scenario import scenario_from
from servesim.core import BadInput, Request
from servesim.runs.simulate import simulate
from servesim.study.executor import Serial
from servesim.study.experiment import read_experiment
from servesim.study.files import table
from servesim.study.ranking import FRESH, Summary
from servesim.study.single_run import Bench, Task, seed_of
from servesim.study.sweep import load, rounds, sweep

from . import sweeps


def run(folder: Path, **keys: Any) -> Summary:
    experiment = read_experiment(sweeps.sweep_file(folder, **keys))
    return Summary(experiment, sweep(experiment, folder / "out", Serial()))


def test_a_sweep_ranks_all_and_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweeps.sim("sweep", sweeps.sweep_file(tmp_path), "-o", tmp_path / "out", "-j", 1) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(sweeps.FILES)
    with open(tmp_path / "out/summary.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["rank"]) for row in rows] == list(range(1, 8))
    assert [float(row["makespan"]) for row in rows] == sorted(float(row["makespan"]) for row in rows)
    assert sorted(int(row["config"]) for row in rows) == list(range(7))
    assert {row["counted"] for row in rows} == {"terminating: all requests"}
    baseline = next(row for row in rows if row["config"] == "0")
    assert baseline["labels"].startswith("baseline") and float(baseline["makespan_diff"]) == 0.0
    text = capsys.readouterr().out
    assert "7 configurations, 21 runs; terminating: all requests; common random numbers, 95 % t intervals" in text


def test_the_best_scenario_runs_as_it_is_and_repeats_the_first_replication(tmp_path: Path) -> None:
    summary = run(tmp_path)
    sweeps.sim("sweep", sweeps.sweep_file(tmp_path), "-o", tmp_path / "out", "-j", 1, "--resume")
    assert sweeps.sim("run", tmp_path / "out/best.yaml", "-o", tmp_path / "run") == 0
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert summary.winner is not None
    first = summary.winner.runs[0]["figures"]
    assert {key: result[key] for key in first} == first


def test_all_configurations_meet_the_same_requests_and_replications_different_ones() -> None:
    bench = Bench(sweeps.base(seed=5))
    one, other = (bench.scenario(Task(0, 2, {"policy.decode_batch": batch})) for batch in (1, 8))
    assert one.seed == other.seed == seed_of(5, 2)
    assert bench.trace(one, Task(0, 2, {})) is bench.trace(other, Task(1, 2, {}))
    arrivals = [tuple(bench.trace(bench.scenario(Task(0, r, {})), Task(0, r, {})).arrivals) for r in range(4)]
    assert len(set(arrivals)) == 4
    assert len({seed_of(seed, r) for seed in range(20) for r in range(50)}) == 1000
    assert seed_of(7, 0) == 7


def test_a_change_that_changes_nothing_differs_by_exactly_zero(tmp_path: Path) -> None:
    summary = run(tmp_path, params={"policy.group_width": [64, 1, 7], "policy.decode_batch": [1, 2]}, baseline={})
    for row in summary.rows:
        if row.assignment.get("policy.decode_batch", 1) == 1:
            assert row.change["makespan"] == (0.0, 0.0, 3) and row.change["mean_ttft_ms"] == (0.0, 0.0, 3)


def test_figures_of_a_record_are_those_of_the_same_run_alone(tmp_path: Path) -> None:
    summary = run(tmp_path)
    row = summary.rows[2]
    tree = summary.experiment.tree(row.config)
    alone = simulate(scenario_from({**tree, "seed": seed_of(0, 1)})).result()
    assert row.runs[1]["figures"] == {key: alone[key] for key in row.runs[1]["figures"]}
    assert row.runs[1]["where"] == alone["mean_seconds"]


def test_the_baseline_is_configuration_0_whether_the_grid_has_it_or_not(tmp_path: Path) -> None:
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
    summary = run(tmp_path, params=params, replications=1)
    assert len(summary.rows) == 5
    best = {row.mean("makespan") for row in summary.rows[:2]}
    assert len(best) == 1 and summary.rows[1].tied


def test_replications_go_on_until_the_half_width_is_reached(tmp_path: Path) -> None:
    summary = run(tmp_path, ci="3%", replications=2, max_replications=40)
    for row in summary.rows:
        found, apart = row.found["makespan"], row.change["makespan"]
        assert found.half is not None and apart.half is not None
        if len(row.runs) < 40 and row is not summary.baseline:
            assert found.half <= 0.03 * found.mean and apart.half <= 0.03 * summary.baseline.mean("makespan")
    assert "half-widths of makespan within 3 % after " in table(summary)
    counts = {len(row.runs) for row in summary.rows}
    assert min(counts) >= 3 and len(summary.baseline.runs) == max(counts)


def test_rounds_are_planned_alike_by_whoever_comes_back_in_the_middle(tmp_path: Path) -> None:
    experiment = read_experiment(sweeps.sweep_file(tmp_path, ci="5%", max_replications=16))
    found = sweep(experiment, tmp_path / "whole", Serial())
    whole = [tuple(task[:2]) for wanted in rounds(experiment, found) for task in wanted]
    lines = (tmp_path / "whole/runs.jsonl").read_bytes().splitlines(keepends=True)
    for cut in (1, 8, 22, len(lines) - 1):
        folder = tmp_path / f"cut{cut}"
        folder.mkdir()
        (folder / "experiment.json").write_bytes((tmp_path / "whole/experiment.json").read_bytes())
        (folder / "runs.jsonl").write_bytes(b"".join(lines[:cut]))
        assert sweep(experiment, folder, Serial(), resume=True) == found
        assert (folder / "runs.jsonl").read_bytes() == b"".join(lines)
    assert set(whole) == set(found)


def test_steady_state_cuts_warm_up_and_drain_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = sweeps.sweep_file(tmp_path, steady={"warm_up": 0.25, "drain": 0.25})
    assert sweeps.sim("sweep", file, "-o", tmp_path / "out", "-j", 1, "--replications", 1) == 0
    assert "steady state: without the first 25% and the last 25% of arrivals" in capsys.readouterr().out
    summary = load(tmp_path / "out")
    row = summary.rows[0]
    requests = simulate(scenario_from(summary.experiment.tree(row.config))).requests
    first, last = requests[0].arrival, requests[-1].arrival
    low, high = first + 0.25 * (last - first), last - 0.25 * (last - first)
    inside = [r for r in requests if low <= r.arrival < high]
    assert row.mean("completed") == len(inside)
    mean = sum(r.seen - r.arrival for r in inside if r.seen is not None) / len(inside)
    assert row.mean("mean_e2el_ms") == pytest.approx(1e3 * mean)
    ended = sum(r.written for r in requests if r.seen is not None and low <= r.seen < high)
    assert row.mean("output_throughput") == pytest.approx(ended / (high - low))


def test_saturated_points_are_those_whose_backlog_grows(tmp_path: Path) -> None:
    base = sweeps.base(workload=sweeps.workload(300, 4.0))
    summary = run(tmp_path, base=base, params={"policy.decode_batch": [1, 32]}, replications=2)
    labels = {row.assignment["policy.decode_batch"]: row.labels for row in summary.rows}
    assert "saturated" in labels[1] and "saturated" not in labels[32]


def test_saturation_follows_the_load_and_not_the_swings_of_a_stable_queue() -> None:
    from servesim.runs.steady_state import growth, saturated

    def served(gap: float, service: float, count: int = 400) -> list[Request]:
        requests, free = [], 0.0
        for k in range(count):
            request = Request(k, k * gap, 1, 1)
            free = request.seen = max(free, request.arrival) + service
            requests.append(request)
        return requests

    assert not saturated(served(1.0, 0.99))
    assert saturated(served(1.0, 1.25))
    assert growth(served(1.0, 1.25))[0] == pytest.approx(0.2, abs=0.02)  # of five that come, four are served
    assert not saturated(served(0.0, 1.0))  # all at once: no rate to keep up with
    assert not saturated([])


def test_points_outside_the_profile_stuck_or_serving_fewer_are_labelled(tmp_path: Path) -> None:
    params = [{"policy.decode_batch": [4, 500]}, {"engine.num_blocks": [3]}]
    params += [{"engine.max_model_len": [40], "policy.decode_batch": [8]}]
    base = sweeps.base(profile="ascend910b4-llama2-7b", engine={"num_blocks": 200})
    summary = run(tmp_path, base=base, params=params, replications=1)
    labels = {row.label: row.labels for row in summary.rows}
    assert "stuck" in labels["engine.num_blocks=3"]
    short = next(row for row in summary.rows if row.assignment.get("engine.max_model_len") == 40)
    assert "serves fewer" in short.labels and not short.eligible
    wide = next(row for row in summary.rows if row.assignment == {"policy.decode_batch": 500})
    assert "outside profile" in wide.labels
    assert summary.rows[0].eligible and not summary.rows[-1].eligible


def test_a_run_that_fails_is_recorded_and_the_rest_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from servesim.policies.llm_serving import LLMServing\n\nclass Faulty(LLMServing):\n"
        "    def decide(self, view):\n        raise RuntimeError('no idea')\n"
    )
    params = [{"policy.decode_batch": [2]}, {"policy.name": f"{own}:Faulty"}]
    file = sweeps.sweep_file(tmp_path, params=params, replications=1)
    assert sweeps.sim("sweep", file, "-o", tmp_path / "out", "-j", 1) == 1
    text = capsys.readouterr().out
    assert "failed: configuration 2: RuntimeError: no idea" in text
    assert yaml.safe_load((tmp_path / "out/best.yaml").read_text())["policy"]["decode_batch"] == 2


def test_nothing_random_means_one_run_and_no_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,prompt,output\n" + "".join(f"{k / 4},20,{5 + k % 7}\n" for k in range(20)))
    given = {key: value for key, value in sweeps.base(trace=str(trace)).items() if key != "workload"}
    assert sweeps.sim("sweep", sweeps.sweep_file(tmp_path, base=given), "-o", tmp_path / "out", "-j", 1) == 0
    assert "nothing is random here" in capsys.readouterr().out
    assert all(len(row.runs) == 1 and row.found["makespan"].half is None for row in load(tmp_path / "out").rows)


def test_a_base_can_be_a_file_a_preset_or_keys_and_set_overrides_it(tmp_path: Path) -> None:
    (tmp_path / "scenario.yaml").write_text(yaml.safe_dump(sweeps.base()))
    from_file = read_experiment(sweeps.sweep_file(tmp_path, base="scenario.yaml"), ["engine.num_blocks=77"])
    assert from_file.base["engine"]["num_blocks"] == 77 and from_file.base["workload"] == sweeps.workload()
    with pytest.raises(BadInput, match=r"base: no file .* and no preset 'nowhere'"):
        read_experiment(sweeps.sweep_file(tmp_path, base="nowhere"))


def test_several_objectives_make_a_front_and_goals_can_be_turned(tmp_path: Path) -> None:
    summary = run(tmp_path, objectives=["max:output_throughput", {"metric": "mean_tpot_ms", "goal": "min"}])
    front = [row for row in summary.rows if row.front]
    assert summary.winner in front and len(front) >= 2
    means = [row.mean("output_throughput") for row in summary.rows]
    assert means == sorted(means, reverse=True)


def test_the_server_s_own_configuration_is_written_on_demand(tmp_path: Path) -> None:
    file = sweeps.sweep_file(tmp_path, replications=1, params={"policy.decode_batch": [8]})
    words = ("-j", 1, "--emit-config", "llm-serving", "--no-report")
    assert sweeps.sim("sweep", file, "-o", tmp_path / "out", *words) == 0
    config = yaml.safe_load((tmp_path / "out/llm-serving.yaml").read_text())
    assert config["model_config"]["decode_batch_size"] == [8]
    assert not (tmp_path / "out/report.html").exists()
    assert read_tree(tmp_path / "out/llm-serving.yaml")["policy"]["decode_batch"] == 8


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"parms": {}}, "parms: unknown key; known: name, base, params"),
        ({"objectives": ["makspan"]}, "objectives: no figure 'makspan'; known: makespan"),
        ({"objectives": [{"metric": "makespan", "goal": "low"}]}, "makespan: goal: expected min or max, got 'low'"),
        ({"objectives": ["request_goodput"]}, "objectives: request_goodput: expected a `slo` in the base scenario"),
        ({"steady": True, "objectives": ["makespan"]}, "objectives: makespan: of the whole run"),
        ({"params": {"policy.decode_batch": [0]}}, "policy.decode_batch: expected at least 1, got 0"),
        ({"params": {"policy.dekode": [1]}}, "policy.dekode: unknown key of llm-serving; known: "),
        ({"params": {"engine.blocks": [1]}}, "engine.blocks: unknown key; known: num_blocks"),
        ({"base": {"policy": "llm-serving"}}, "base: expected a trace or a workload, got neither"),
        ({"replications": 0}, "replications: expected greater than 0, got 0"),
        ({"ci": "wide"}, "ci: expected"),
    ],
)
def test_a_bad_sweep_file_is_one_clear_line_and_exit_2(
    tmp_path: Path, keys: dict[str, Any], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweeps.sim("sweep", sweeps.sweep_file(tmp_path, **keys), "-o", tmp_path / "out", "-j", 1) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_experiment_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = sweeps.sweep_file(tmp_path, replications=1), tmp_path / "out"
    assert sweeps.sim("sweep", file, "-o", out, "-j", 1) == 0
    before = sweeps.contents(out)
    assert sweeps.sim("sweep", file, "-o", out, "-j", 1) == 2
    assert "holds an experiment, which is never overwritten; --resume continues it" in capsys.readouterr().err
    other = sweeps.sweep_file(tmp_path, replications=1, params={"policy.decode_batch": [3]})
    assert sweeps.sim("sweep", other, "-o", out, "-j", 1, "--resume") == 2
    assert "holds another experiment: configs differs" in capsys.readouterr().err
    assert sweeps.contents(out) == before
    assert sweeps.sim("sweep", sweeps.sweep_file(tmp_path, replications=1), "-o", out, "-j", 1, "--fresh") == 0
    assert sweeps.contents(out) == before == sweeps.contents(tmp_path / "out-2")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/diary.txt").write_text("mine")
    assert sweeps.sim("sweep", file, "-o", tmp_path / "full", "-j", 1) == 2
    assert "found diary.txt in it" in capsys.readouterr().err
    assert sweeps.sim("sweep", file, "-o", file, "-j", 1) == 2
    assert "expected a folder to write to, found a file" in capsys.readouterr().err


def test_shards_put_together_are_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = sweeps.sweep_file(tmp_path)
    assert sweeps.sim("sweep", file, "-o", tmp_path / "whole", "-j", 1) == 0
    for part in (3, 1):
        assert sweeps.sim("sweep", file, "-o", tmp_path / "parts", "-j", 1, "--shard", f"{part}/3") == 0
    assert sweeps.sim("sweep", "merge", tmp_path / "parts") == 2
    assert "6 of 21 runs are missing: shard 2/3 lacks 6" in capsys.readouterr().err
    assert sweeps.sim("sweep", file, "-o", tmp_path / "parts", "-j", 1, "--shard", "1/3") == 2  # done already
    assert sweeps.sim("sweep", file, "-o", tmp_path / "parts", "-j", 1, "--shard", "2/3") == 0
    assert sweeps.sim("sweep", "merge", tmp_path / "parts") == 0
    assert sweeps.contents(tmp_path / "parts") == sweeps.contents(tmp_path / "whole")
    assert sweeps.sim("sweep", file, "-o", tmp_path / "x", "--shard", "4/3") == 2
    assert sweeps.sim("sweep", file, "-o", tmp_path / "x", "--shard", "1/3", "--ci", "1%") == 2
    assert sweeps.sim("sweep", "merge", tmp_path / "nowhere") == 2


def test_the_winner_is_confirmed_on_replications_that_had_no_part_in_the_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = run(tmp_path)
    file = sweeps.sweep_file(tmp_path, confirm=4)
    assert sweeps.sim("sweep", file, "-o", tmp_path / "more", "-j", 1) == 0
    assert "confirmed on 4 fresh replications that had no part in the choice: makespan -" in capsys.readouterr().out
    summary = load(tmp_path / "more")
    assert [row.config for row in summary.rows] == [row.config for row in plain.rows]
    assert [row.found for row in summary.rows] == [row.found for row in plain.rows]
    fresh = summary.confirmed("makespan")
    assert fresh.size == 4 and fresh.certain and fresh.mean < 0 and summary.runs == plain.runs + 8
    assert plain.confirmed("makespan").size == 0
    records = [json.loads(line) for line in (tmp_path / "more/runs.jsonl").read_text().splitlines()]
    base = [run for run in records if run.get("config") == 0 and run.get("replication", 0) >= FRESH]
    assert summary.fresh_level("makespan") == pytest.approx(statistics.mean(run["figures"]["makespan"] for run in base))
    whole = (tmp_path / "more/runs.jsonl").read_bytes()
    (tmp_path / "more/runs.jsonl").write_bytes(whole[: len(whole) - 3000])
    assert sweeps.sim("sweep", file, "-o", tmp_path / "more", "-j", 1, "--resume") == 0
    assert (tmp_path / "more/runs.jsonl").read_bytes() == whole


def test_one_replication_has_means_and_no_intervals(tmp_path: Path) -> None:
    summary = run(tmp_path, replications=1)
    found = [row.found["makespan"] for row in summary.rows]
    assert all(one.half is None and not math.isnan(one.mean) for one in found)


def test_plain_lines_of_progress_tell_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from servesim.study import progress as module

    clock = iter([0.0, 0.0, 10.0, 10.0, 12.0, 20.0, 20.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    with module.Progress("sweep", file=out) as progress:
        progress.expect(100, 20)
        progress.advance(0)
        progress.advance(40)
    assert out.getvalue().splitlines()[-1].startswith("sweep: 60/100 runs, ")
    assert "s left" in out.getvalue()
