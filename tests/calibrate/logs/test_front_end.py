"""The front end as a parameter of a fit to logs: engines with a known one, and data that cannot show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.calibrate.logs.fit import LogFit, fit_logs
from servesim.calibrate.logs.observed_runs import read_runs
from servesim.calibrate.logs.parameters import value_of, with_values
from servesim.calibrate.logs.text import format_table
from servesim.cli import main
from servesim.config.scenario import scenario_from
from servesim.core import BadInput, Request
from servesim.costs.device_profile import Profile, load_profile
from servesim.costs.linear import LinearCost
from servesim.engine.inbox import Inbox
from servesim.runs.simulate import simulate

COST = {"base": 0.006, "prefill_token": 4e-5, "prefill_cross": 1e-9, "decode_row": 1e-4}
START = {"kind": "linear", "base": 0.008, "prefill_token": 6e-5, "prefill_cross": 1.2e-9, "decode_row": 1e-4}
FREE = {"base": 1.0, "prefill_token": 1.0, "front_end.seconds": 1.0, "front_end.per_token": 1.0}
FRONT_END = {"seconds": 0.012, "per_token": 7e-6}
COMMON: dict[str, Any] = {
    "policy": {"name": "vllm-v1", "enable_prefix_caching": False},
    "engine": {"num_blocks": 20000},
}


def fit_of(folder: Path, workloads: list[dict[str, Any]], free: Any, budgets: tuple[int, ...]) -> LogFit:
    """Return the fit to the means of runs of an engine whose costs and front end are known."""
    runs = []
    engine = {**COMMON["engine"], "front_end": FRONT_END}
    for k, (workload, budget) in enumerate((w, b) for w in workloads for b in budgets):
        policy = {**COMMON["policy"], "max_num_batched_tokens": budget}
        own = {"policy": {"max_num_batched_tokens": budget}, "workload": workload}
        tree = {"policy": policy, "engine": engine, "workload": workload}
        result = simulate(scenario_from(tree), profile=Profile("known", LinearCost(**COST))).result()
        figures = {name: float(result[name]) for name in ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")}
        runs.append({"name": f"run {k}", "scenario": own, "reported": figures})
    tree = {"scenario": COMMON, "cost": START, "free": free, "runs": runs}
    (folder / "runs.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return fit_logs(read_runs(folder / "runs.yaml"), leave_out=False)


def poisson(rate: float, prompt: int) -> dict[str, Any]:
    lengths = {"prompt": [prompt, prompt], "output": [16, 16]}
    return {"requests": 40, "arrivals": {"kind": "poisson", "rate": rate}, "lengths": lengths}


def check_inside(fit: LogFit, truth: dict[str, float]) -> None:
    for name, value in truth.items():
        low, high = fit.interval(fit.names.index(name))
        assert low <= value <= high, (name, low, value, high)


def test_a_known_front_end_is_found_within_its_interval(tmp_path: Path) -> None:
    workloads = [poisson(0.2, 500), poisson(0.5, 6000), poisson(2.0, 6000)]
    fit = fit_of(tmp_path, workloads, FREE, (512, 8192))
    truth = {f"front_end.{key}": value for key, value in FRONT_END.items()}
    check_inside(fit, {**truth, "base": COST["base"], "prefill_token": COST["prefill_token"]})
    assert fit.front_end["per_token"] == pytest.approx(FRONT_END["per_token"], rel=0.1)
    assert any("front_end.per_token: measured" in line for line in fit.front_end_findings)


def test_a_front_end_that_looks_like_gpu_time_is_said_to_do_so(tmp_path: Path) -> None:
    """Single prompts of one length on an idle server: only the sum of front end and prefill is known."""
    fit = fit_of(tmp_path, [poisson(0.1, 4000)], FREE, (8192,))
    check_inside(fit, {"front_end.per_token": FRONT_END["per_token"], "prefill_token": COST["prefill_token"]})
    [per_token, seconds] = sorted(fit.front_end_findings)
    assert per_token == "front_end.per_token: cannot be separated from prefill_token: it is the prior"
    assert "it is the prior" in seconds
    assert per_token in format_table(fit)


def test_the_profile_has_the_fitted_front_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_of(tmp_path, [poisson(0.2, 500), poisson(0.5, 6000)], FREE, (8192,))
    assert main(["calibrate", "logs", str(tmp_path / "runs.yaml"), "-o", str(tmp_path / "fitted"), "--quiet"]) == 0
    assert "front_end.seconds: " in capsys.readouterr().out
    profile = load_profile(str(tmp_path / "fitted"))
    seconds, per_request, per_token = profile.front_end
    assert (seconds, per_token) == tuple(
        profile.about["fit"]["parameters"][f"front_end.{key}"]["value"] for key in FRONT_END
    )
    assert per_request == 0.0
    assert len(profile.about["fit"]["front_end"]) == 2


def test_start_values_that_are_not_free_stay_and_bad_names_are_refused(tmp_path: Path) -> None:
    fit_of(tmp_path, [poisson(0.2, 500)], ["base"], (8192,))
    tree = yaml.safe_load((tmp_path / "runs.yaml").read_text(encoding="utf-8"))
    (tmp_path / "runs.yaml").write_text(yaml.safe_dump({**tree, "front_end": {"seconds": 0.02}}), encoding="utf-8")
    fit = fit_logs(read_runs(tmp_path / "runs.yaml"), leave_out=False)
    assert fit.front_end == {"seconds": 0.02}
    assert not fit.front_end_findings
    (tmp_path / "runs.yaml").write_text(yaml.safe_dump({**tree, "free": ["front_end.lag"]}), encoding="utf-8")
    with pytest.raises(BadInput, match=r"unknown parameter 'front_end.lag'; known: front_end.seconds"):
        read_runs(tmp_path / "runs.yaml")


def test_one_parameter_can_scale_several_terms() -> None:
    cost, name = LinearCost(base=0.01, prefill_cross=2e-9, prefill_square=1e-9), "prefill_cross + prefill_square"
    assert value_of(cost, name) == 2e-9
    changed = with_values(cost, ["base", name], [0.02, 3e-9])
    assert changed == LinearCost(base=0.02, prefill_cross=3e-9, prefill_square=1.5e-9)


def test_the_front_end_tokenises_prompts_one_by_one() -> None:
    inbox = Inbox(seconds=0.5, per_request=0.25, per_token=1e-3)
    for number in range(2):
        inbox.send(Request(number, 1.0, 1000, 1))
    assert inbox.next_arrival == 2.75
    assert not inbox.pop_visible(2.7, 0, idle=True)
    assert [request.id for request in inbox.pop_visible(2.75, 0, idle=True)] == [0]
    assert inbox.next_arrival == 4.0
