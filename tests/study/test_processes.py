"""Commands on two processes write the same bytes as on one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import servesim
import yaml
from servesim.study.executor import Pool, process_pool

from ..runs.test_intervals import scenario_file
from . import sweeps
from .test_check import scenario
from .test_rates import file_of, queue
from .test_search import results, search_file

QUIET = ("-q", "--no-report", "-j")


class Kept:
    """A pool that a command does not end: to start two processes takes longer than these studies."""

    def __init__(self, pool: Pool) -> None:
        self.run = pool.run

    def close(self) -> None:
        """Nothing ends here."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = process_pool(2)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _two_processes(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servesim.study.executor.process_pool", lambda jobs: Kept(pool))


def test_the_intervals_of_a_run_are_the_same_in_python_too(tmp_path: Path) -> None:
    file = scenario_file(tmp_path)
    for jobs in (1, 2):
        assert sweeps.sim("run", file, "--intervals", 4, "-j", jobs, "-o", tmp_path / str(jobs)) == 0
    results = [json.loads((tmp_path / str(jobs) / "result.json").read_text()) for jobs in (1, 2)]
    assert results[0] == results[1]
    assert servesim.run(file, intervals=4).metrics == results[0]


def test_a_check_prints_and_writes_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, other = scenario(tmp_path), scenario(tmp_path, "other", policy={"name": "llm-serving", "decode_batch": 4})
    printed = []
    for jobs in (1, 2):
        files = [tmp_path / f"{jobs}.{suffix}" for suffix in ("xml", "md")]
        words = ("check", file, "--baseline", other, "--subject-to", "makespan <= 1.1 * baseline", "-j", jobs)
        sweeps.sim(*words, "--replications", 4, "--junit", files[0], "--summary", files[1])
        printed.append([capsys.readouterr().out, *(path.read_bytes() for path in files)])
    assert printed[0] == printed[1]


@pytest.mark.usefixtures("short_runs")
def test_a_sweep_over_rates_has_the_same_records(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,prompt,output\n" + "".join(f"{k / 4},20,{5 + k % 7}\n" for k in range(40)))
    base = {**queue(), "trace": str(trace)}
    del base["workload"]
    file = file_of(tmp_path, base=base, subject_to=["p99_ttft_ms <= 500"])
    for jobs in (1, 2):
        assert sweeps.sim("sweep", file, "-o", tmp_path / f"out{jobs}", *QUIET, jobs) == 0
    assert (tmp_path / "out1/runs.jsonl").read_bytes() == (tmp_path / "out2/runs.jsonl").read_bytes()
    best = yaml.safe_load((tmp_path / "out1/best.yaml").read_text())
    assert best["trace"]["rate"] in (2.0, 8.0, 16.0) and sweeps.sim("run", tmp_path / "out1/best.yaml") == 0


def test_a_search_has_the_same_files(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="needs the extra `search` (optuna)")
    file = search_file(tmp_path, trials=8, batch=4)
    for jobs in (1, 2):
        assert sweeps.sim("search", file, "-o", tmp_path / f"out{jobs}", *QUIET, jobs) == 0
    assert results(tmp_path / "out1") == results(tmp_path / "out2")
