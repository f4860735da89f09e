"""MFU, MBU and energy of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.config.scenario import scenario_from
from servesim.core import Request
from servesim.costs.device_profile import Profile
from servesim.costs.linear import LinearCost
from servesim.costs.model_arithmetic import MODELS
from servesim.runs.simulate import Run, simulate
from servesim.runs.text import show_run
from servesim.runs.utilisation import integral, summarise
from servesim.traces.trace import Trace

from ..study import sweeps

TINY = MODELS["tiny"]
PEAK = {"flops": 1e9, "bandwidth": 1e10, "source": "test"}
ABOUT: dict[str, Any] = {"model": "tiny", "dtype": "float32", "peak": PEAK}


def run_with(cost: LinearCost, about: dict[str, Any], policy: str = "sarathi") -> Run:
    scenario = scenario_from({"policy": {"name": policy}, "engine": {"num_blocks": 64, "block_size": 16}})
    requests = [Request(number, 0.3 * number, 20 + 7 * number, 5 + number) for number in range(8)]
    return simulate(scenario, Trace(requests, "test", "synth"), profile=Profile("test", cost, about))


def test_a_device_whose_steps_take_exactly_their_flops_has_an_mfu_of_1() -> None:
    token, row = 2 * TINY.layer_weights / 1e9, 2 * TINY.vocab * TINY.hidden / 1e9
    pair = TINY.flops_per_pair / 1e9
    cost = LinearCost(
        prefill_token=token + pair / 2, prefill_row=row, prefill_square=pair / 2, prefill_cross=pair,
        decode_live=token + row + pair, context=pair,
    )  # fmt: skip
    result = run_with(cost, ABOUT).result()
    assert result["mfu"] == pytest.approx(1.0)
    assert {"prefill", "decode", "mixed"} == set(result["utilisation"])
    assert [row["mfu"] for row in result["utilisation"].values()] == pytest.approx([1.0, 1.0, 1.0])


def test_a_device_whose_decodes_take_exactly_their_bytes_has_an_mbu_of_1() -> None:
    weights, token = 4 * TINY.weights / 1e10, 4 * TINY.kv_values / 1e10
    result = run_with(LinearCost(base=weights, decode_live=token, context=token), ABOUT, "llm-serving").result()
    assert result["utilisation"]["decode"]["mbu"] == pytest.approx(1.0)


def test_padding_does_not_count() -> None:
    scenario = {"policy": {"name": "llm-serving", "decode_batch": 8}, "workload": sweeps.workload(20)}
    plain, padded = (
        simulate(
            scenario_from({**scenario, "engine": {"prefill_buckets": buckets}}),
            profile=Profile("test", LinearCost(base=0.01), ABOUT),
        ).result()
        for buckets in ([], [512])
    )
    assert padded["padded_prompt_tokens"] > 0 and padded["mfu"] == plain["mfu"]


def test_without_peak_or_model_there_are_tokens_but_no_fractions() -> None:
    cost = LinearCost(base=0.01)
    no_peak, nothing = run_with(cost, {"model": "tiny"}).result(), run_with(cost, {}).result()
    assert no_peak["mfu"] is None and no_peak["utilisation"]["decode"]["flops"] > 0
    assert nothing["mbu"] is None and nothing["utilisation"]["decode"]["flops"] is None
    assert nothing["utilisation"]["decode"]["tokens"] > 0 and nothing["energy"] is None
    assert "MFU" not in show_run(run_with(cost, {})) and "MFU / MBU" in show_run(run_with(cost, ABOUT))


def test_energy_is_the_power_of_each_kind_times_its_seconds_and_idle_power_between() -> None:
    power = {"idle": 50.0, "prefill": 400.0, "decode": 300.0}
    run = run_with(LinearCost(base=0.01), {"power": power}, "vllm-v1")
    watts = {**power, "mixed": 400.0}
    busy = sum(sums.seconds for sums in run.work.values())
    joules = sum(watts[kind] * sums.seconds for kind, sums in run.work.items()) + 50.0 * (run.end - busy)
    assert 0 < busy < run.end
    assert run.result()["energy"] == pytest.approx(1000 * joules / run.measures.outputs)
    assert "Energy per 1,000 output tokens" in show_run(run)


def write_profile(folder: Path, **keys: Any) -> str:
    folder.mkdir()
    (folder / "profile.yaml").write_text(yaml.safe_dump({"cost": sweeps.COSTS, "dtype": "float32", **keys}))
    return str(folder)


@pytest.mark.parametrize("metric", ["mfu", "energy"])
def test_utilisation_is_an_objective_and_a_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], metric: str
) -> None:
    power = {"idle": 50, "prefill": 400, "decode": 300}
    profile = write_profile(tmp_path / "p", model="tiny", peak=PEAK, power=power)
    file = sweeps.sweep_file(tmp_path, base=sweeps.base(profile=profile), objectives=[metric, "makespan"])
    assert sweeps.sim("sweep", file, "-o", tmp_path / "out", "-j", 1, "-q") == 0
    head = capsys.readouterr().out.splitlines()[0].split()
    assert {"mfu", "mbu"} <= set(head) and head[1] == metric
    assert ("energy" in head) is (metric == "energy")  # a table has few columns; summary.csv has all
    rows = [line.split(",") for line in (tmp_path / "out" / "summary.csv").read_text().splitlines()]
    values = [float(row[rows[0].index(metric)]) for row in rows[1:]]
    assert values == sorted(values, reverse=metric != "energy") and values[0] != values[-1]
    assert 'title="mbu"' in (tmp_path / "out" / "report.html").read_text()


def test_energy_of_samples_is_their_integral_over_the_run() -> None:
    rows = [[-1.0, 0.0, None, 10.0, 100.0], [1.0, 50.0, None, 30.0, 200.0], [3.0, 100.0, None, 20.0, 400.0]]
    assert integral(rows, 4, 3.0) == pytest.approx(175.0 + 600.0)  # 150 to 200 W in 1 s, 200 to 400 W in 2 s
    summary = summarise({"tool": "nvidia-smi", "samples": rows}, 3.0)
    assert summary["samples"] == 2 and summary["max_memory_mb"] == 30.0 and summary["memory_busy_percent"] is None
    assert summary["power_w"] == pytest.approx(775 / 3)
    assert integral(rows, 4, 20.0) is None  # the samples end too early
    assert integral([], 4, 3.0) is None
