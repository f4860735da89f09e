"""The trace file of an experiment: every worker reads it once, and gives the records of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from servesim.config.scenario import Scenario
from servesim.study import single_run
from servesim.study.executor import Serial, process_pool
from servesim.study.single_run import RunContext, Task, context_json, run_tasks
from servesim.traces.trace import Trace

from ..study import sweeps

TASKS = [Task(config, 0, {"policy.decode_batch": batch}) for config, batch in enumerate((1, 4, 8))]


def write_trace(path: Path, rows: int = 30, prompt: int = 20) -> Path:
    lines = [f"{k / 4},{prompt + k},{5 + k % 7}" for k in range(rows)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]) + "\n")
    return path


def base(path: Path) -> dict[str, Any]:
    tree = sweeps.base(trace={"path": str(path)})
    del tree["workload"]
    return tree


def test_a_file_is_read_once_with_one_seed_for_all_replications_and_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some formats are sampled: the trace must not depend on the replication that a worker runs first."""
    seeds = []

    def load(scenario: Scenario) -> Trace:
        seeds.append(scenario.seed)
        return original(scenario)

    original = single_run.load_trace
    monkeypatch.setattr(single_run, "load_trace", load)
    tree = {**base(write_trace(tmp_path / "t.csv")), "seed": 7}
    context = RunContext(tree)
    tasks = [Task(0, 3, {}), Task(0, 0, {}), Task(0, 3, {}, 2.0), Task(0, 0, {}, None, 5)]
    records = [context.run(task) for task in tasks]
    assert seeds == [7] and records == [RunContext(tree).run(task) for task in tasks]
    assert len({record["metrics"]["mean_e2el_ms"] for record in records}) == 3
    other = write_trace(tmp_path / "other.csv", prompt=50)
    changed = context.run(Task(1, 0, {"trace": str(other)}))
    assert changed["metrics"]["mean_e2el_ms"] != records[1]["metrics"]["mean_e2el_ms"]


def test_a_process_pool_gives_the_records_of_one_process(tmp_path: Path) -> None:
    context, pool = context_json(base(write_trace(tmp_path / "t.csv"))), process_pool(2)
    try:
        assert dict(pool.run(context, TASKS)) == dict(Serial().run(context, TASKS))
    finally:
        pool.close()


@pytest.mark.parametrize("content", [None, "arrival_s,prompt_tokens,output_tokens\n1,x,3\n"])
def test_every_run_reports_an_unusable_trace(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "t.csv"
    if content is not None:
        path.write_text(content)
    records = run_tasks(context_json(base(path)), TASKS)
    assert all(str(path) in record["error"] for record in records)
