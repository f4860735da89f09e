"""A trace file is read once for all workers of a machine, and gives the same records as reading it in every worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from servesim.config.scenario import Scenario
from servesim.study import single_run
from servesim.study.executor import Serial, process_pool
from servesim.study.single_run import SharedTraces, Task, context_json, run_tasks, with_shared_trace
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


def test_a_worker_takes_the_shared_arrays_and_not_the_file(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.csv")
    context, traces = context_json(base(path)), SharedTraces()
    expected = run_tasks(context, TASKS)
    shared = with_shared_trace(context, traces)
    path.unlink()
    assert run_tasks(shared, TASKS) == expected
    assert all("metrics" in record for record in expected)
    traces.close()


def test_a_configuration_with_another_trace_or_rate_does_not_take_the_shared_one(tmp_path: Path) -> None:
    path, other = write_trace(tmp_path / "t.csv"), write_trace(tmp_path / "other.csv", prompt=50)
    context, traces = context_json(base(path)), SharedTraces()
    tasks = [Task(0, 0, {}), Task(1, 0, {"trace": str(other)}), Task(2, 0, {}, 2.0), Task(3, 0, {}, None, 5)]
    expected = run_tasks(context, tasks)
    assert run_tasks(with_shared_trace(context, traces), tasks) == expected
    assert len({record["metrics"]["mean_e2el_ms"] for record in expected}) == 4
    traces.close()


def test_a_process_pool_gives_the_records_of_one_process_and_removes_its_files(tmp_path: Path) -> None:
    context, pool = context_json(base(write_trace(tmp_path / "t.csv"))), process_pool(2)
    try:
        assert dict(pool.run(context, TASKS)) == dict(Serial().run(context, TASKS))
        folder = pool._traces._folder.name  # type: ignore[union-attr]
        assert len(list(Path(folder).glob("*.pickle"))) == 1
    finally:
        pool.close()
    assert not Path(folder).exists()


@pytest.mark.parametrize("content", [None, "arrival_s,prompt_tokens,output_tokens\n1,x,3\n"])
def test_every_run_reports_an_unusable_trace(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "t.csv"
    if content is not None:
        path.write_text(content)
    context, traces = context_json(base(path)), SharedTraces()
    records = run_tasks(with_shared_trace(context, traces), TASKS)
    assert records == run_tasks(context, TASKS)
    assert all(str(path) in record["error"] for record in records)


def test_a_workload_is_not_shared_and_a_removed_folder_is_no_error(tmp_path: Path) -> None:
    traces = SharedTraces()
    assert traces.share(sweeps.base()) is None
    context = context_json(base(write_trace(tmp_path / "t.csv")))
    shared = with_shared_trace(context, traces)
    traces.close()
    assert run_tasks(shared, TASKS[:1]) == run_tasks(context, TASKS[:1])


def test_all_replications_read_a_trace_file_with_one_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some formats are sampled: the trace must not depend on the replication that a worker runs first."""
    seeds = []

    def load(scenario: Scenario) -> Trace:
        seeds.append(scenario.seed)
        return original(scenario)

    original = single_run.load_trace
    monkeypatch.setattr(single_run, "load_trace", load)
    tree = {**base(write_trace(tmp_path / "t.csv")), "seed": 7, "noise": True}
    for replication in (0, 3):
        single_run.RunContext(tree).run(Task(0, replication, {}))
    assert seeds == [7, 7]
