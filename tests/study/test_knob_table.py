"""`sim table`: a metric over two parameters of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from servesim.study.knob_table import format_knob_table, knob_table
from servesim.study.ranking import Summary
from servesim.study.sweep import load_summary
from servesim.study.sweep_file import read_experiment
from servesim.study.table import changed_settings

from . import sweeps

PARAMS = {
    "policy.decode_batch": [8, 2, 4],
    "policy.prefill_batch": [1, 2],
    "policy.order": ["arrival", "longest-output"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table")
    file = sweeps.sweep_file(path, params=PARAMS, replications=1, objectives=["makespan", "mean_ttft_ms"])
    assert sweeps.sim("sweep", file, "-o", path / "out", "-j", 1, "-q", "--no-report") == 0
    return path / "out"


@pytest.fixture
def summary(folder: Path) -> Summary:
    return load_summary(folder)


def test_every_cell_is_the_configuration_with_these_values(summary: Summary) -> None:
    table = knob_table(summary, "decode_batch", "policy.prefill_batch")
    assert table.row_values == [2, 4, 8] and table.column_values == [1, 2]
    assert summary.winner is not None and table.fixed == {"policy.order": summary.winner.assignment["policy.order"]}
    for value, cells in zip(table.row_values, table.cells):
        for other, row in zip(table.column_values, cells):
            expected = {"policy.decode_batch": value, "policy.prefill_batch": other, **table.fixed}
            assert row.assignment == expected
    assert table.note == f"other parameters: order={table.fixed['policy.order']}"
    assert format_knob_table(table).count(" *") == 1


def test_best_takes_the_best_of_the_other_parameters(summary: Summary) -> None:
    table = knob_table(summary, "policy.decode_batch", "policy.prefill_batch", "max:output_throughput", best=True)
    for value, cells in zip(table.row_values, table.cells):
        for other, row in zip(table.column_values, cells):
            values = {"policy.decode_batch": value, "policy.prefill_batch": other}
            same = [r for r in summary.rows if values.items() <= r.assignment.items()]
            assert row is not None and len(same) == 2
            assert row.mean("output_throughput") == max(r.mean("output_throughput") for r in same)
    assert table.best and "the best values for each cell" in format_knob_table(table)


def test_the_default_parameters_are_those_that_change_the_metric_most(summary: Summary) -> None:
    assert knob_table(summary).row_key == "policy.decode_batch"


def union(folder: Path, winner: dict[str, Any]) -> Summary:
    """Return a sweep of two grids, of which only the second sets refill_from; this configuration is the best one."""
    common = {"policy.decode_batch": [2, 4], "policy.prefill_batch": [1, 2]}
    params = [
        {**common, "policy.preempted_to": ["front"]},
        {**common, "policy.preempted_to": ["swapped"], "policy.refill_from": ["swapped", "waiting"]},
    ]
    experiment = read_experiment(sweeps.sweep_file(folder, params=params, replications=1, objectives=["makespan"]))
    runs = {}
    for config, assignment in enumerate(experiment.configs):
        value = 50.0 if assignment == winner else 100.0 + config
        runs[config, 0] = {"config": config, "replication": 0, "metrics": {"makespan": value, "failed": 0}}
    return Summary(experiment, runs)


def test_the_other_parameters_are_the_winners_also_if_it_does_not_set_all(tmp_path: Path) -> None:
    """Configurations that set a parameter which the winner does not set are not in the table."""
    best = {"policy.decode_batch": 4, "policy.prefill_batch": 2, "policy.preempted_to": "front"}
    summary = union(tmp_path, best)
    assert summary.winner is not None and summary.winner.assignment == best
    for table in (knob_table(summary, "decode_batch", "prefill_batch"), knob_table(summary)):
        shown = [row for cells in table.cells for row in cells if row is not None]
        assert summary.winner in shown and table.reference is summary.winner
        assert "policy.refill_from" not in (table.row_key, table.column_key)
        assert not any("policy.refill_from" in row.assignment for row in shown)
    table = knob_table(summary, "decode_batch", "prefill_batch")
    assert table.note == "other parameters: preempted_to=front, no refill_from"
    assert [[row is None for row in cells] for cells in table.cells] == [[False, False], [False, False]]


def test_a_parameter_that_the_winner_does_not_set_is_shown_at_the_best_configuration_that_does(tmp_path: Path) -> None:
    summary = union(tmp_path, {"policy.decode_batch": 4, "policy.prefill_batch": 2, "policy.preempted_to": "front"})
    table = knob_table(summary, "refill_from", "decode_batch")
    assert table.reference is not None and table.reference is not summary.winner
    assert table.fixed["policy.preempted_to"] == "swapped" and table.note.endswith(
        f"(as in rank {table.reference.rank})"
    )
    assert all(row is not None for cells in table.cells for row in cells)


def test_equal_numbers_of_different_types_are_one_value(tmp_path: Path) -> None:
    params = [{"policy.delay_factor": [1, 2], "policy.decode_batch": [2]},
              {"policy.delay_factor": [1.0, 2.0], "policy.decode_batch": [4]}]  # fmt: skip
    file = sweeps.sweep_file(tmp_path, params=params, replications=1)
    assert sweeps.sim("sweep", file, "-o", tmp_path / "out", "-j", 1, "-q", "--no-report") == 0
    table = knob_table(load_summary(tmp_path / "out"))
    assert all(row is not None for cells in table.cells for row in cells)


def test_a_key_that_only_the_baseline_sets_does_not_empty_the_table(tmp_path: Path) -> None:
    params = {"policy.prefill_batch": [1, 2], "policy.order": ["arrival", "longest-output"]}
    base = sweeps.base(policy={"name": "llm-serving", "decode_batch": 8})
    file = sweeps.sweep_file(
        tmp_path, base=base, params=params, baseline={"policy.decode_batch": 1}, replications=1, objectives=["makespan"]
    )
    assert sweeps.sim("sweep", file, "-o", tmp_path / "out", "-j", 1, "-q", "--no-report") == 0
    summary = load_summary(tmp_path / "out")
    table = knob_table(summary, "prefill_batch", "order")
    cells = [row for line in table.cells for row in line]
    assert {row.config for row in cells if row is not None} == {1, 2, 3, 4}
    assert table.note == "other parameters: decode_batch=8" and "–" not in format_knob_table(table)
    winner = next(row for row in summary.rows if row is not summary.baseline)
    assert changed_settings(winner, summary).endswith("decode_batch=8")  # the value of the base, which it runs with


def test_changed_settings_compare_the_values_that_the_runs_have(tmp_path: Path) -> None:
    base = sweeps.base(policy={"name": "vllm-v1", "max_num_seqs": 8, "max_num_batched_tokens": 512})
    params = [
        {"policy.name": ["sarathi"], "policy.chunk_size": [64, 512]},
        {"policy.name": ["vllm-v1"], "policy.max_num_seqs": [8, 16], "policy.max_num_batched_tokens": [512]},
    ]
    baseline = {"policy.name": "vllm-v1", "policy.max_num_seqs": 8}
    file = sweeps.sweep_file(tmp_path, base=base, params=params, baseline=baseline, replications=1)
    assert sweeps.sim("sweep", file, "-o", tmp_path / "out", "-j", 1, "-q", "--no-report") == 0
    summary = load_summary(tmp_path / "out")
    texts = {changed_settings(row, summary) for row in summary.rows if row is not summary.baseline}
    assert texts == {"name=sarathi chunk_size=64", "name=sarathi chunk_size=512", "max_num_seqs=16"}
