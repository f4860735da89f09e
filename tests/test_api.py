"""The Python API: results and errors of run, sweep, replay and load; test_api_studies.py tests the other functions."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import servesim
import yaml
from servesim.cli import main
from servesim.core import BadInput, Chunk, Plan, Policy, View
from servesim.core.content import content_of_pieces
from servesim.frames.inputs import requests_in

from .conftest import ROOT

FEW = {"contest": {"X": 5, "T": 12}}  # 60 requests
COST = {"kind": "linear", "prefill": 0.02, "prefill_token": 1e-4, "decode_step": 0.02, "decode_live": 0.001}
FAST = {key: value if key == "kind" else value / 10 for key, value in COST.items()}  # a fake device takes real time
BASE = {
    "workload": FEW,
    "policy": {"name": "llm-serving", "decode_batch": 4},
    "engine": {"num_blocks": 256, "max_model_len": 4096},
    "profile": COST,
}


@dataclass(frozen=True)
class OneByOne(Policy):
    """A policy that is not registered: one request at a time."""

    def decide(self, view: View) -> Plan:
        if view.running:
            return Plan(decode=True)
        return Plan(chunks=[Chunk(view.waiting[0], view.waiting[0].pending)] if view.waiting else [])


@pytest.fixture(scope="module")
def swept() -> Any:
    """A small sweep."""
    knobs = {"policy.decode_batch": [2, 4, 8], "policy.order": ["arrival", "shortest-output"]}
    return servesim.sweep(base={**BASE, "slo": {"ttft": 2000}}, params=knobs, replications=2)


def test_importing_the_package_needs_only_the_standard_library() -> None:
    code = "import sys, servesim; print(*(set(sys.modules) & {'numpy', 'pandas', 'simpy', 'yaml', 'pydantic'}))"
    done = subprocess.run([sys.executable, "-Ic", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_package_has_exactly_its_documented_names() -> None:
    assert [callable(getattr(servesim, name)) for name in servesim.__all__[1:]] == [True] * 9
    with pytest.raises(AttributeError, match="no attribute 'walk'"):
        servesim.walk  # type: ignore[attr-defined]  # noqa: B018


def test_frame_and_metrics_of_a_run_agree() -> None:
    done = servesim.run(BASE)
    frame = done.requests
    assert len(frame) == done.metrics["completed"] == 60
    assert frame.ttft.mean() * 1e3 == pytest.approx(done.metrics["mean_ttft_ms"])
    assert frame.e2el.quantile(0.99) * 1e3 == pytest.approx(done.metrics["p99_e2el_ms"])
    assert frame.tpot.mean() * 1e3 == pytest.approx(done.metrics["mean_tpot_ms"])
    assert done.summary["makespan"] == done.metrics["makespan"]
    spent = frame[list(done.time_breakdown.index)].sum(axis=1)
    assert np.allclose(spent, frame.e2el)
    assert repr(done) == f"Result(llm-serving: 60 of 60 requests in {done.metrics['makespan']:.2f} s)"


def test_run_gives_the_same_result_as_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--preset", "debias", "-X", "5", "-T", "10", "-o", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    ours = servesim.run(preset="debias", workload={"contest": {"X": 5, "T": 10}})
    theirs = servesim.load(tmp_path / "run")
    assert isinstance(theirs, type(ours))
    assert theirs.metrics == ours.metrics
    assert theirs.requests.reset_index(drop=True).equals(ours.requests.reset_index(drop=True))


def test_arguments_override_the_scenario_and_settings_override_both(tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text("workload: {contest: {X: 5, T: 12}}\npolicy: {name: llm-serving, decode_batch: 2}\nseed: 3\n")
    done = servesim.run(file, policy={"decode_batch": 8}, seed=4, settings={"policy.prefill_batch": 3})
    assert done.scenario["policy"] == {"name": "llm-serving", "decode_batch": 8, "prefill_batch": 3}
    assert done.scenario["seed"] == 4


def test_every_section_that_changes_a_run_is_an_argument() -> None:
    sections: dict[str, Any] = {
        "policy": {"name": "vllm-v1"},
        "profile": "h200-llama2-7b",
        "workload": {"contest": {"X": 5, "T": 12}},
        "speculative": {"method": "eagle", "tokens": 3, "acceptance": 0.7},
    }
    done = servesim.run(**sections)
    assert done.metrics == servesim.run(sections).metrics
    assert done.metrics["accepted_tokens_per_step"] > 2


def test_decisions_count_the_requests_of_each_queue() -> None:
    decisions = servesim.run(BASE, decisions=True).decisions
    assert decisions.running.max() == 4
    assert set(decisions.kind) == {"prefill", "decode"}
    assert decisions.finished.sum() == 60
    assert (decisions.t_end >= decisions.t).all()
    assert servesim.run(BASE).decisions is None


def test_policy_may_be_an_unregistered_object() -> None:
    done = servesim.run(BASE, policy=OneByOne())
    assert done.scenario["policy"]["name"] == "OneByOne"
    assert done.metrics["completed"] == 60
    assert done.metrics["makespan"] > servesim.run(BASE).metrics["makespan"]


def test_a_frame_is_a_trace_and_keeps_its_ids() -> None:
    asked = pd.DataFrame({"arrival": [0.0, 0.5], "prompt": [10, 20], "output": [3, 5]}, index=["first", "second"])
    done = servesim.run({key: BASE[key] for key in ("policy", "engine", "profile")}, trace=asked)
    assert list(done.requests.index) == ["first", "second"]
    assert list(done.requests.output) == [3, 5]
    # 20 ms and 0.1 ms per prompt token, then two decodes of 21 ms
    assert done.requests.e2el["first"] == pytest.approx(0.021 + 2 * 0.021)


def test_a_sweep_is_a_table_with_the_best_first(swept: Any) -> None:
    table = swept.table
    assert list(table["rank"]) == list(range(1, len(table) + 1))
    assert table.makespan.is_monotonic_increasing
    assert set(swept.knobs) == {"policy.decode_batch", "policy.order"}
    assert len(swept.runs) == 2 * len(table)
    assert swept.table.loc[0, "makespan_difference"] == 0
    assert swept.pareto.on_pareto_front.all()
    assert swept.runs.groupby("config").makespan.mean().to_numpy() == pytest.approx(table.makespan.sort_index())
    assert repr(swept) == f"SweepResult(sweep: {len(table)} configurations, {2 * len(table)} runs)"


def test_curve_has_the_best_and_the_single_change_for_each_value(swept: Any) -> None:
    curve = swept.curve("policy.decode_batch", "mean_ttft_ms")
    assert list(curve.index) == [2, 4, 8]
    for value in curve.index:
        rows = swept.table[swept.table["policy.decode_batch"] == value]
        assert curve.best[value] == rows.mean_ttft_ms.min()
    winner = swept.table.iloc[0]
    alone = swept.table[swept.table["policy.order"] == winner["policy.order"]].set_index("policy.decode_batch")
    assert curve.single_change.to_dict() == alone.mean_ttft_ms.to_dict()
    assert list(swept.curve("policy.order").index) == ["arrival", "shortest-output"]
    with pytest.raises(BadInput, match=r"parameter 'policy\.victim': not varied in this sweep"):
        swept.curve("policy.victim")


def test_run_of_a_sweep_can_be_repeated(swept: Any) -> None:
    winner, baseline = swept.run(), swept.run(0)
    table = swept.runs.set_index(["config", "replication"])
    assert winner.metrics["makespan"] == table.makespan[swept.winner, 0]
    assert swept.run(0, replication=1).metrics["makespan"] == table.makespan[0, 1]
    changed = winner.diff(baseline)
    assert len(changed) == 60
    assert changed.ttft.mean() == pytest.approx(winner.requests.ttft.mean() - baseline.requests.ttft.mean())
    assert (baseline.diff(baseline)[["ttft", "e2el"]] == 0).all(axis=None)
    assert servesim.run(swept.scenario()).metrics["makespan"] == winner.metrics["makespan"]


def test_stored_sweep_can_be_loaded_and_resumed(tmp_path: Path) -> None:
    kept = servesim.sweep(base=BASE, output=tmp_path / "kept", params={"policy.decode_batch": [2, 8]})
    again = servesim.load(tmp_path / "kept")
    assert isinstance(again, type(kept))
    assert again.table.equals(kept.table)
    assert (tmp_path / "kept" / "best.yaml").is_file()
    with pytest.raises(BadInput, match="already holds a sweep; continue with --resume"):
        servesim.sweep(base=BASE, output=tmp_path / "kept", params={"policy.decode_batch": [2, 8]})
    kept.report(tmp_path / "report.html")
    assert "<html" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_keys_override_a_sweep_file() -> None:
    swept = servesim.sweep(
        ROOT / "examples" / "contest_knobs.yaml",
        base=BASE, params={"policy.decode_batch": [2]}, replications=1, objectives=["mean_e2el_ms"],
    )  # fmt: skip
    assert len(swept.table) == 2
    assert "mean_e2el_ms_difference" in swept.table


def test_replay_on_an_exact_fake_device_has_no_error_and_on_a_slower_one_shows_its_source() -> None:
    base = {**BASE, "workload": {"contest": {"X": 50, "T": 0.4}}, "profile": FAST}
    exact = servesim.replay(base, backend="fake")
    assert exact.errors.error.abs().max() < 1e-9
    assert len(exact.steps) == exact.measured.metrics["model_calls"]
    assert (exact.steps.seconds - exact.steps.predicted).abs().max() < 1e-9
    assert set(exact.steps.kind) == {"prefill", "decode"}

    slow = servesim.replay(base, backend="fake", device={**FAST, "decode_step": 0.0025})
    assert slow.errors.error["makespan"] < -0.02
    assert slow.errors.error["makespan"] == pytest.approx(slow.errors.from_step_times["makespan"])
    decodes = slow.steps[slow.steps.kind == "decode"]
    assert (decodes.seconds - decodes.predicted).to_numpy() == pytest.approx(0.0005)
    assert len(slow.requests) == 20
    assert (slow.requests.e2el_measured >= slow.requests.e2el_simulated).all()


def test_replays_are_loaded_from_their_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fast.yaml").write_text(yaml.safe_dump({**BASE, "profile": FAST}))
    options = [str(tmp_path / "fast.yaml"), "-X", "50", "-T", "0.4", "--backend", "fake", "--quiet"]
    assert main(["replay", *options, "-o", str(tmp_path / "one")]) == 0
    capsys.readouterr()
    one = servesim.load(tmp_path / "one")
    assert one.errors.error.abs().max() < 1e-9  # type: ignore[union-attr]
    assert len(one.steps) == one.measured.metrics["model_calls"]  # type: ignore[union-attr]
    assert one.steps.seconds.to_numpy() == pytest.approx(one.steps.predicted.to_numpy())  # type: ignore[union-attr]


def test_profile_is_loaded_with_samples_and_predicted_times(tmp_path: Path) -> None:
    (tmp_path / "profile.yaml").write_text(yaml.safe_dump({
        "name": "mine", "device": "slate", "model": "tiny", "how": "by hand",
        "cost": {"kind": "linear", "decode_step": 0.01, "decode_live": 0.001},
        "error": {"decode": {"mean": 0.02, "points": 2}},
    }))  # fmt: skip
    columns = "kind,prefill_rows,prefill_tokens,prefill_live,squares,cross,decode_rows,decode_live,context,swapped"
    (tmp_path / "samples.csv").write_text(
        f"{columns},seconds,point,round,order,flagged,failed\n"
        "decode,0,0,0,0,0,1,1,16,0,0.011,0,0,0,,\n"
        "decode,0,0,0,0,0,1,1,16,0,0.012,0,1,1,,\n"
        "decode,0,0,0,0,0,1,1,16,0,0.900,0,1,2,slow,\n"
        "decode,0,0,0,0,0,2,2,32,0,0.010,1,0,1,,\n"
        "decode,0,0,0,0,0,9,9,99,0,,2,0,2,,out of memory\n"
    )
    mine: Any = servesim.load(tmp_path)
    assert repr(mine) == "ProfileFrames(mine: tiny on slate)"
    assert mine.verdict == "usable" and "<td>verdict</td><td>usable</td>" in mine._repr_html_()
    assert mine.samples.expected.tolist() == pytest.approx([0.011, 0.011, 0.011, 0.012, 0.019])
    assert mine.points.seconds.tolist() == pytest.approx([0.0115, 0.010])
    assert mine.points.error.tolist() == pytest.approx([0.011 / 0.0115 - 1, 0.2])
    assert mine.points.taken.tolist() == [2, 1]
    assert mine.errors.loc["decode", "mean"] == 0.02
    assert mine.runs.empty
    assert mine.parameters.empty
    (tmp_path / "samples.csv").unlink()
    bare: Any = servesim.load(tmp_path)
    with pytest.raises(BadInput, match="profile mine: has no samples of steps"):
        bare.samples  # noqa: B018


def test_the_content_of_prompts_stays_in_a_frame(tmp_path: Path) -> None:
    text = "arrival_s,prompt_tokens,output_tokens,content\n0,100,5,system:60\n1,90,5,system:60\n2,20,5,\n"
    (tmp_path / "trace.csv").write_text(text)
    frame = servesim.load(tmp_path / "trace.csv")
    again = requests_in(frame)
    assert [request.content for request in again.requests] == [
        content_of_pieces([("system", 60), ("prompt:0", 40)]),
        content_of_pieces([("system", 60), ("prompt:1", 30)]),
        None,
    ]
    with pytest.raises(BadInput, match="column content: expected Content objects with as many tokens as their prompts"):
        requests_in(frame.assign(prompt=7))


def test_a_sweep_over_rates_has_curves_and_capacities(tmp_path: Path) -> None:
    swept = servesim.sweep(
        base=BASE, params={"policy.decode_batch": [2, 8]}, rates=[1, 4, 16], subject_to=["p99_ttft_ms <= 4000"],
        output=tmp_path / "rates",
    )  # fmt: skip
    assert swept.rates == [1.0, 4.0, 16.0] and swept.at(4.0).table.shape[0] == len(swept.capacity)
    assert len(swept.curves) == 3 * len(swept.capacity) and set(swept.curves.rate) == {1.0, 4.0, 16.0}
    assert list(swept.capacity["rank"]) == sorted(swept.capacity["rank"]) and swept.winner in swept.capacity.index
    loaded = servesim.load(tmp_path / "rates")
    assert loaded.verdict == swept.verdict and loaded.curves.equals(swept.curves)
    with pytest.raises(BadInput, match="rate 5: expected one of 1, 4, 16"):
        swept.at(5)


def test_a_cluster_has_a_frame_with_a_row_per_replica(tmp_path: Path) -> None:
    cluster = {"replicas": 2, "router": "least-requests"}
    result = servesim.run(BASE, cluster=cluster, policy=OneByOne(), decisions=True)
    assert list(result.replicas.index) == ["replica/0", "replica/1"]
    assert result.replicas.requests.to_dict() == result.requests.replica.value_counts().to_dict()
    assert result.replicas.completed.sum() == 60
    assert result.decisions is not None and set(result.decisions.replica) == {"replica/0", "replica/1"}
    assert servesim.run(BASE).replicas.empty and "replica" not in servesim.run(BASE).requests
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump({**BASE, "cluster": cluster}))
    assert main(["run", str(tmp_path / "fleet.yaml"), "-o", str(tmp_path / "out"), "-q"]) == 0
    loaded = servesim.load(tmp_path / "out")
    assert isinstance(loaded, servesim.frames.run.Result) and loaded.replicas.shape == result.replicas.shape
    assert loaded.requests.replica.notna().all()


def test_paths_may_be_path_objects_at_every_level(tmp_path: Path) -> None:
    folder = tmp_path / "costs"
    folder.mkdir()
    (folder / "profile.yaml").write_text("cost: {base: 0.1}\n")
    pools = [{"name": "a", "profile": folder}, {"name": "b", "profile": str(folder)}]
    workload = {"requests": 4, "arrivals": {"kind": "burst"}, "lengths": {"prompt": 8, "output": 2}}
    run = servesim.run({"workload": workload, "profile": folder}, policy="vllm-v1", cluster={"pools": pools})
    assert run.metrics["completed"] == 4
