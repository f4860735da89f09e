"""Search: Optuna trials on the simulator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.study.executor import Serial
from servesim.study.ranking import Summary
from servesim.study.sweep import load_summary, sweep
from servesim.study.sweep_file import read_experiment

from ..study import sweeps

QUIET = ("-j", 1, "-q", "--no-report")


def search_file(folder: Path, **keys: Any) -> Path:
    params = {"policy.decode_batch": {"integers": [1, 32]}, "policy.order": ["arrival", "longest-output"]}
    path = folder / "search.yaml"
    tree = {"base": sweeps.base(), "params": params, "objectives": ["makespan"], "trials": 24, **keys}
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def trials(folder: Path) -> list[Any]:
    """Return the assignments that ran, in order."""
    return [json.loads(line)["assignment"] for line in (folder / "runs.jsonl").read_text().splitlines()]


def results(folder: Path) -> dict[str, bytes]:
    """Return the files of a search."""
    names = ("search.json", "experiment.json", "runs.jsonl", "summary.csv", "pareto.csv", "best.yaml")
    return {name: (folder / name).read_bytes() for name in names}


@pytest.fixture(autouse=True)
def _library() -> None:
    pytest.importorskip("optuna", reason="needs the extra `search` (optuna)")


def test_a_search_comes_within_1_percent_of_the_full_grid_and_writes_the_files_of_a_sweep(tmp_path: Path) -> None:
    assert sweeps.sim("search", search_file(tmp_path), "-o", tmp_path / "out", "-j", 1, "-q") == 0
    grid = {"policy.decode_batch": {"range": [1, 32], "step": 1}, "policy.order": ["arrival", "longest-output"]}
    experiment = read_experiment(sweeps.sweep_file(tmp_path, params=grid, replications=1))
    exhaustive = Summary(experiment, sweep(experiment, tmp_path / "all", Serial())).rows[0].mean("makespan")
    assert load_summary(tmp_path / "out").rows[0].mean("makespan") <= 1.01 * exhaustive
    assert sweeps.sim("run", tmp_path / "out/best.yaml") == 0
    assert sweeps.sim("report", tmp_path / "out") == 0
    journal = [json.loads(line) for line in (tmp_path / "out/runs.jsonl").read_text().splitlines()]
    keys = [(json.dumps(run["assignment"], sort_keys=True), run["replication"]) for run in journal]
    assert len(keys) == len(set(keys)), "a configuration was run twice"


SAMPLERS: dict[str, dict[str, Any]] = {
    "tpe": {"sampler": "tpe", "subject_to": ["mean_tpot_ms <= 32"]},
    "nsga2": {"sampler": "nsga2", "objectives": ["makespan", "mean_tpot_ms"]},
    "random": {"sampler": "random"},
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_search_cut_at_any_run_continues_with_the_same_trials_and_the_same_winner(
    sampler: str, tmp_path: Path
) -> None:
    """Batches of 5 of 13 trials: most cuts are inside a batch, some inside a line."""
    base = sweeps.base(workload=sweeps.workload(8))
    file, whole = search_file(tmp_path, base=base, trials=13, batch=5, **SAMPLERS[sampler]), tmp_path / "whole"
    assert sweeps.sim("search", file, "-o", whole, *QUIET) == 0
    text = (whole / "runs.jsonl").read_bytes()
    ends = [0, *(k + 1 for k, byte in enumerate(text) if byte == 10)]
    for cut in (0, ends[1], ends[3], ends[6], ends[7] + 9, ends[8], ends[-3] + 40, ends[-2], len(text)):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / "search.json").write_bytes((whole / "search.json").read_bytes())
        (folder / "runs.jsonl").write_bytes(text[:cut])
        assert sweeps.sim("search", file, "-o", folder, "--resume", *QUIET) == 0
        assert results(folder) == results(whole), cut


@pytest.mark.parametrize("sampler", ["tpe", "nsga2"])
def test_a_search_with_more_trials_keeps_the_first_ones(sampler: str, tmp_path: Path) -> None:
    base = sweeps.base(workload=sweeps.workload(8))
    out, before = tmp_path / "out", b""
    for count in (13, 21, 30):
        file = search_file(tmp_path, base=base, trials=count, batch=5, **SAMPLERS[sampler])
        assert sweeps.sim("search", file, "-o", out, "--resume", *QUIET) == 0
        text = (out / "runs.jsonl").read_bytes()
        assert text.startswith(before) and len(text) > len(before)
        before = text
    file = search_file(tmp_path, base=base, trials=4, batch=5, **SAMPLERS[sampler])
    assert sweeps.sim("search", file, "-o", out, "--resume", *QUIET) == 0
    assert (out / "runs.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_full_disk_ends_a_search_with_one_line_and_it_continues_with_the_same_trials(tmp_path: Path) -> None:
    base = sweeps.base(workload=sweeps.workload(8))
    file, whole = search_file(tmp_path, base=base, trials=40, batch=8), tmp_path / "whole"
    assert sweeps.sim("search", file, "-o", whole, *QUIET) == 0
    size, folder = (whole / "runs.jsonl").stat().st_size, tmp_path / "out"
    limits = range(8, size // 1024 + 1, 3)
    assert len(limits) >= 4
    for limit in limits:
        words = f"'{sys.executable}' -m servesim search '{file}' -o '{folder}' --resume -j 1 -q --no-report"
        done = subprocess.run(["bash", "-c", f"ulimit -f {limit}; exec {words}"], capture_output=True, text=True)
        assert done.returncode == 1, done.stderr
        assert done.stderr == (
            f"sim: {folder}/runs.jsonl: File too large; free disk space, then continue with --resume\n"
        )
    assert sweeps.sim("search", file, "-o", folder, "--resume", *QUIET) == 0
    assert results(folder) == results(whole)


def test_a_search_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = search_file(tmp_path, trials=2)
    assert sweeps.sim("search", file, "-o", tmp_path / "out", "-j", 1, "-q", "--no-report") == 0
    assert sweeps.sim("search", file, "-o", tmp_path / "out", "-j", 1, "-q") == 2
    assert "already holds a search; continue with --resume" in capsys.readouterr().err
    file = search_file(tmp_path, trials=5)
    assert sweeps.sim("search", file, "-o", tmp_path / "out", "-j", 1, "-q", "--no-report", "--resume") == 0
    assert len(trials(tmp_path / "out")) == 6  # the baseline too


@pytest.mark.parametrize("keys", [{}, {"sampler": "nsga2", "objectives": ["makespan", "busy_s"]}])
def test_a_search_prefers_trials_that_meet_the_constraints(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Large batches have the smallest makespan, but only batches up to about 8 meet the bound."""
    bound = {"subject_to": ["mean_tpot_ms <= 32"], **keys}
    assert (
        sweeps.sim("search", search_file(tmp_path, **bound), "-o", tmp_path / "out", "-j", 1, "-q", "--no-report") == 0
    )
    summary = load_summary(tmp_path / "out")
    assert summary.winner is not None and summary.winner.feasible and summary.winner.mean("mean_tpot_ms") <= 32
    assert any(not row.feasible for row in summary.rows)
    best = yaml.safe_load((tmp_path / "out/best.yaml").read_text())
    assert best["policy"]["decode_batch"] > 1
    assert (
        sweeps.sim("search", search_file(tmp_path, **bound, trials=26), "-o", tmp_path / "out", *QUIET, "--resume") == 0
    )
