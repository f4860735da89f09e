"""Messages and numbers that a user of sweeps meets first: wrong files, progress, units of tables."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import servesim
import yaml
from servesim.core import BadInput
from servesim.study import progress as progressing
from servesim.study import recommend as recommending
from servesim.study.progress import Progress

from ..commands.running import run_sim
from .test_capacity import constant

pytestmark = pytest.mark.usefixtures("short_runs")


def write(path: Path, **keys: Any) -> str:
    path.write_text(yaml.safe_dump(keys))
    return str(path)


@pytest.mark.parametrize(
    ("command", "keys", "hint"),
    [
        ("sweep", {"preset": "vllm-v1-0.32"}, "this is a scenario key"),
        ("sweep", {"params": {}, "trials": 5}, "this is a key of `sim search FILE`"),
        ("search", {"params": {}, "ci": "1%"}, "this is a key of `sim sweep FILE`"),
    ],
)
def test_a_file_of_another_command_is_named(
    command: str, keys: dict[str, Any], hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run_sim(capsys, command, write(tmp_path / "file.yaml", **keys))
    assert said.code == 2 and said.error.count("\n") == 1 and hint in said.error


def test_both_sides_of_a_comparison_are_checked_before_the_first_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("servesim.study.compared_runs.from_scenario", lambda *_: pytest.fail("A ran"))
    a, b = write(tmp_path / "a.yaml", **constant(1.0)), write(tmp_path / "b.yaml", **constant(1.0), seeds=1)
    for other, text in ((b, "b.yaml: seeds: unknown key"), (str(tmp_path / "c.yaml"), "c.yaml: no such file")):
        said = run_sim(capsys, "compare", a, other, "-j", "1")
        assert said.code == 2 and text in said.error


def test_a_metric_without_values_says_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a.yaml", **constant(1.0, 5))
    said = run_sim(capsys, "compare", a, a, "-j", "1", "--metric", "request_goodput", "--replications", "1")
    assert said.code == 2 and "expected a `slo` in the scenario" in said.error


def test_drafts_of_an_engine_without_them_are_refused_in_the_words_of_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recommending, "REQUESTS", 10)
    words = "--model llama-3.1-8b --device H100 --rate 1 --prompt 9 --output 9 --engine mindie --speculative eagle:0.7"
    said = run_sim(capsys, "recommend", *words.split())
    assert said.code == 2 and said.error.startswith("sim: --speculative: speculative: expected a policy with")


def test_a_recommendation_prints_the_warnings_of_its_scenario(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace has only lengths here, and vLLM's prefix cache is on: `sim sweep` and `sim check` warn of it too."""
    monkeypatch.chdir(tmp_path)
    tuning = recommending.tunings()["vllm"]._replace(grids=[{"policy.max_num_seqs": (8,)}])
    monkeypatch.setattr(recommending, "tunings", lambda: {"vllm": tuning})
    Path("my.csv").write_text("arrival,prompt,output\n" + "".join(f"{k},20,5\n" for k in range(10)))
    words = "recommend --model llama-3.1-8b --device H100 --trace my.csv -j 1 -q"
    said = run_sim(capsys, *words.split())
    assert said.code == 0 and "sim: warning: the prefix cache is on, but the trace has only the lengths" in said.error


def test_progress_counts_each_of_several_sweeps_from_its_own_start(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progressing.time, "monotonic", lambda: now[0])
    lines = io.StringIO()
    with Progress("runs", file=lines) as progress:
        for runs, seconds in ((100, 1000.0), (4, 20.0)):
            progress.expect(runs, 0)
            for _ in range(runs):
                now[0] += seconds / runs
                progress.advance(1)
    said = lines.getvalue().splitlines()
    assert said[-1] == "runs: 4/4 runs, 0.2/s" and said.count(said[-1]) == 1


def test_the_unit_of_a_column_is_that_of_the_rates_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bisection also runs rates at which requests wait for seconds; the table does not show them."""
    base, params = constant(1.0, 100), {"policy.delay_factor": [0, 0.1]}
    keys = {"params": params, "rates": [1, 2], "precision": "20%", "subject_to": "p99_ttft_ms <= 45"}
    said = run_sim(capsys, "sweep", write(tmp_path / "s.yaml", base=base, **keys), "-o", str(tmp_path / "o"), "-j", "1")
    assert "at 1 req/s (ms)" in said.out and "at 2 req/s (ms)" in said.out


@pytest.mark.parametrize("intervals", ["many", 2.5, float("nan"), 1, -3, 10**6])
def test_a_wrong_number_of_draws_is_one_line_in_python_too(intervals: Any) -> None:
    with pytest.raises(BadInput, match="intervals: expected true or a number of draws from 2 to 1000"):
        servesim.run(constant(1.0, 3), intervals=intervals)


@pytest.mark.parametrize(
    ("space", "problem"),
    [
        ({"loguniform": [0, 10]}, "loguniform: expected numbers above 0, got [0, 10]"),
        ({"range": [2, 64], "step": 0}, "step: expected more than 0, got 0"),
        ({"range": [2, 64], "step": "two"}, "step: expected a number, got 'two'"),
        ({"range": [0, 64], "scale": "log"}, "scale: expected linear, or log and a range above 0, got 'log'"),
        ({"range": [1, 64], "scale": "root"}, "scale: expected linear, or log and a range above 0, got 'root'"),
        ({"range": [1, 64], "scale": "log", "step": 2}, "step: expected none with a logarithmic scale, got 2"),
        ({"integers": [1.5, 4]}, "integers: expected whole numbers, got [1.5, 4]"),
    ],
)
def test_a_wrong_space_of_a_search_is_one_line(
    space: dict[str, Any], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "s.yaml", base=constant(1.0, 5), params={"engine.num_blocks": space}, trials=2)
    said = run_sim(capsys, "search", file, "-j", "1", "-o", str(tmp_path / "out"))
    assert said.code == 2 and said.error.count("\n") == 1, said.error
    assert f"params.engine.num_blocks.{problem}" in said.error


@pytest.mark.parametrize("command", ["sweep", "search"])
def test_an_error_names_the_file(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for keys in ({"objectives": ["makspan"]}, {"baseline": {"engine.num_block": 3}}):
        file = write(tmp_path / "s.yaml", base=constant(1.0, 5), params={"engine.num_blocks": [64, 128]}, **keys)
        said = run_sim(capsys, command, file, "-j", "1", "-o", str(tmp_path / "out"))
        assert said.code == 2 and said.error.startswith(f"sim: {file}: {next(iter(keys))}: "), said.error


def test_a_constraint_without_values_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With one output token there is no time per further token."""
    base = constant(1.0, 5)
    base["workload"]["lengths"]["output"] = 1
    keys = {"base": base, "params": {"policy.delay_factor": [0, 0.1]}, "subject_to": "mean_tpot_ms <= 5"}
    file, scenario = write(tmp_path / "s.yaml", **keys), write(tmp_path / "a.yaml", **base)
    for command in (("sweep", file), ("sweep", file, "--rates", "1"), ("capacity", scenario, "--rates", "1")):
        words = (*command, "-j", "1", "-q", "--no-report", "-o", str(tmp_path / f"{command[0]}{len(command)}"))
        said = run_sim(capsys, *words, *(["--subject-to", "mean_tpot_ms <= 5"] if command[0] == "capacity" else []))
        assert said.code == 1 and "(no value), for example because" in said.out.splitlines()[-1], said.out


def test_a_sweep_without_charts_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    file = write(tmp_path / "s.yaml", base=constant(1.0, 5), params={})
    assert run_sim(capsys, "sweep", file, "-j", "1", "-q", "--no-report", "-o", out).code == 0
    said = run_sim(capsys, "plot", out)
    assert said.code == 0 and said.out == "" and "sim: warning: " in said.error and "no chart" in said.error


def test_a_wrong_configuration_or_rate_of_a_result_is_one_line() -> None:
    keys: dict[str, Any] = {"base": constant(1.0, 5), "params": {"policy.delay_factor": [0, 0.1]}}
    swept, rates = servesim.sweep(**keys), servesim.sweep(**keys, rates=[1, 2])
    last = len(swept.table) - 1
    for number in (-1, last + 1):
        for read in (swept.scenario, swept.run, swept.compare, lambda config: rates.scenario(config, 1)):
            with pytest.raises(BadInput, match=f"configuration {number}: expected a number from 0 to {last}"):
                read(number)
    for rate in (-1, 0, float("nan")):
        with pytest.raises(BadInput, match="rate: expected requests per second from"):
            rates.scenario(0, rate)
    with pytest.raises(BadInput, match="no configuration wins by capacity"):
        rates.scenario(rate=1)


@pytest.mark.parametrize(
    ("steady", "problem"),
    [
        ({"warm_up": 0.6, "drain": 0.4}, "steady: expected warm_up and drain that are together less than 1"),
        ({"warm_up": 2}, r"steady\.warm_up: expected less than 1, got 2"),
        ({"warmup": 0.1}, r"steady\.warmup: unknown key; known: warm_up, drain"),
    ],
)
def test_a_wrong_window_names_its_key_and_leaves_a_part_of_the_run(steady: dict[str, float], problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        servesim.sweep(base=constant(1.0, 5), params={}, steady=steady)
