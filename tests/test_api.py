"""The Python API: what run, sweep, replay and load return, and how they complain."""

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
    """A policy that no table lists: one request at a time."""

    def decide(self, view: View) -> Plan:
        if view.running:
            return Plan(decode=True)
        return Plan(chunks=[Chunk(view.waiting[0], view.waiting[0].pending)] if view.waiting else [])


@pytest.fixture(scope="module")
def found() -> Any:
    """A small sweep."""
    knobs = {"policy.decode_batch": [2, 4, 8], "policy.order": ["arrival", "shortest-output"]}
    return servesim.sweep(base={**BASE, "slo": {"ttft": 2000}}, params=knobs, replications=2)


def test_importing_the_package_takes_nothing_but_the_standard_library() -> None:
    code = "import sys, servesim; print(*(set(sys.modules) & {'numpy', 'pandas', 'simpy', 'yaml', 'pydantic'}))"
    done = subprocess.run([sys.executable, "-Ic", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_package_has_what_it_says_and_nothing_else() -> None:
    assert [callable(getattr(servesim, name)) for name in ("load", "replay", "run", "sweep")] == [True] * 4
    with pytest.raises(AttributeError, match="no attribute 'walk'"):
        servesim.walk  # type: ignore[attr-defined]  # noqa: B018


def test_a_run_says_the_same_in_its_frame_and_in_its_figures() -> None:
    done = servesim.run(BASE)
    frame = done.requests
    assert len(frame) == done.figures["completed"] == 60
    assert frame.ttft.mean() * 1e3 == pytest.approx(done.figures["mean_ttft_ms"])
    assert frame.e2el.quantile(0.99) * 1e3 == pytest.approx(done.figures["p99_e2el_ms"])
    assert frame.tpot.mean() * 1e3 == pytest.approx(done.figures["mean_tpot_ms"])
    assert done.summary["makespan"] == done.figures["makespan"]
    spent = frame[list(done.where.index)].sum(axis=1)
    assert np.allclose(spent, frame.e2el)
    assert repr(done) == f"Result(llm-serving: 60 of 60 requests in {done.figures['makespan']:.2f} s)"


def test_a_run_is_what_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--preset", "debias", "-X", "5", "-T", "10", "-o", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    ours = servesim.run(preset="debias", workload={"contest": {"X": 5, "T": 10}})
    theirs = servesim.load(tmp_path / "run")
    assert isinstance(theirs, type(ours))
    assert theirs.figures == ours.figures
    assert theirs.requests.reset_index(drop=True).equals(ours.requests.reset_index(drop=True))


def test_arguments_lie_over_the_scenario_and_settings_over_all(tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text("workload: {contest: {X: 5, T: 12}}\npolicy: {name: llm-serving, decode_batch: 2}\nseed: 3\n")
    done = servesim.run(file, policy={"decode_batch": 8}, seed=4, settings={"policy.prefill_batch": 3})
    assert done.scenario["policy"] == {"name": "llm-serving", "decode_batch": 8, "prefill_batch": 3}
    assert done.scenario["seed"] == 4


def test_turns_count_who_is_where() -> None:
    turns = servesim.run(BASE, turns=True).turns
    assert turns is not None
    assert turns.running.max() == 4
    assert set(turns.kind) == {"prefill", "decode"}
    assert turns.finished.sum() == 60
    assert (turns.t_end >= turns.t).all()
    assert servesim.run(BASE).turns is None


def test_a_policy_may_be_an_object_that_nobody_registered() -> None:
    done = servesim.run(BASE, policy=OneByOne())
    assert done.scenario["policy"]["name"] == "OneByOne"
    assert done.figures["completed"] == 60
    assert done.figures["makespan"] > servesim.run(BASE).figures["makespan"]


def test_a_frame_is_a_trace_and_keeps_its_ids() -> None:
    asked = pd.DataFrame({"arrival": [0.0, 0.5], "prompt": [10, 20], "output": [3, 5]}, index=["first", "second"])
    done = servesim.run({key: BASE[key] for key in ("policy", "engine", "profile")}, trace=asked)
    assert list(done.requests.index) == ["first", "second"]
    assert list(done.requests.output) == [3, 5]
    # 20 ms and 0.1 ms a token of the prompt, then two decodes of 21 ms
    assert done.requests.e2el["first"] == pytest.approx(0.021 + 2 * 0.021)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (pd.DataFrame({"arrival": [0.0], "prompt": [1]}), "trace: expected a column output, got arrival, prompt"),
        (pd.DataFrame({"arrival": [np.nan], "prompt": [1], "output": [1]}), "trace: column arrival: expected numbers"),
        (pd.DataFrame({"arrival": [0.0], "prompt": ["x"], "output": [1]}), "trace: column prompt: expected numbers"),
        (pd.DataFrame({"arrival": [0.0], "prompt": [-5], "output": [1]}), "trace: column prompt: expected numbers"),
    ],
)
def test_a_frame_that_is_no_trace_is_refused_in_one_line(frame: pd.DataFrame, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        servesim.run(trace=frame)


def test_what_is_given_wrongly_names_the_key() -> None:
    with pytest.raises(BadInput, match=r"scenario: policy\.decode_batch: expected int"):
        servesim.run(BASE, settings={"policy.decode_batch": "many"})
    with pytest.raises(BadInput, match="sweep: parms: unknown key"):
        servesim.sweep(base=BASE, parms={})
    with pytest.raises(BadInput, match="no such preset"):
        servesim.run(preset="nobody")


def test_a_sweep_is_a_table_with_the_best_first(found: Any) -> None:
    table = found.table
    assert list(table["rank"]) == list(range(1, len(table) + 1))
    assert table.makespan.is_monotonic_increasing
    assert set(found.knobs) == {"policy.decode_batch", "policy.order"}
    assert len(found.runs) == 2 * len(table)
    assert found.table.loc[0, "makespan_diff"] == 0
    assert found.pareto.on_front.all()
    assert found.runs.groupby("config").makespan.mean().to_numpy() == pytest.approx(table.makespan.sort_index())
    assert repr(found) == f"Sweep(sweep: {len(table)} configurations, {2 * len(table)} runs)"


def test_a_curve_gives_the_best_with_each_value_and_the_winner_with_that_alone_changed(found: Any) -> None:
    curve = found.curve("policy.decode_batch", "mean_ttft_ms")
    assert list(curve.index) == [2, 4, 8]
    for value in curve.index:
        rows = found.table[found.table["policy.decode_batch"] == value]
        assert curve.best[value] == rows.mean_ttft_ms.min()
    winner = found.table.iloc[0]
    alone = found.table[found.table["policy.order"] == winner["policy.order"]].set_index("policy.decode_batch")
    assert curve.alone.to_dict() == alone.mean_ttft_ms.to_dict()
    assert list(found.curve("policy.order").index) == ["arrival", "shortest-output"]
    with pytest.raises(BadInput, match=r"knob 'policy\.victim': takes one value only"):
        found.curve("policy.victim")


def test_a_curve_can_be_told_in_a_sentence(found: Any) -> None:
    best = found.curve("policy.decode_batch").best.round(2)
    assert found.sentence("policy.decode_batch") == (
        f"makespan is best with policy.decode_batch 8 ({best[8]:.2f} s) and worst with 2 ({best[2]:.2f} s, "
        f"{best[2] / best[8]:.1f} times as much)."
    )
    flat = servesim.sweep(base=BASE, params={"policy.victim": ["shortest", "newest"]})
    assert flat.sentence("policy.victim").endswith(" with any value of policy.victim.")


def test_a_run_of_a_sweep_can_be_made_again(found: Any) -> None:
    winner, baseline = found.run(), found.run(0)
    table = found.runs.set_index(["config", "replication"])
    assert winner.figures["makespan"] == table.makespan[found.winner, 0]
    assert found.run(0, replication=1).figures["makespan"] == table.makespan[0, 1]
    changed = winner.against(baseline)
    assert len(changed) == 60
    assert changed.ttft.mean() == pytest.approx(winner.requests.ttft.mean() - baseline.requests.ttft.mean())
    assert (baseline.against(baseline)[["ttft", "e2el"]] == 0).all(axis=None)
    assert servesim.run(found.scenario()).figures["makespan"] == winner.figures["makespan"]


def test_a_sweep_that_is_kept_can_be_loaded_and_run_twice(tmp_path: Path) -> None:
    kept = servesim.sweep(base=BASE, output=tmp_path / "kept", params={"policy.decode_batch": [2, 8]})
    again = servesim.load(tmp_path / "kept")
    assert isinstance(again, type(kept))
    assert again.table.equals(kept.table)
    assert (tmp_path / "kept" / "best.yaml").is_file()
    with pytest.raises(BadInput, match="never overwritten"):
        servesim.sweep(base=BASE, output=tmp_path / "kept", params={"policy.decode_batch": [2, 8]})
    kept.report(tmp_path / "report.html")
    assert "<html" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_sweep_file_may_be_given_with_other_keys() -> None:
    found = servesim.sweep(
        ROOT / "examples" / "contest_knobs.yaml",
        base=BASE, params={"policy.decode_batch": [2]}, replications=1, objectives=["mean_e2el_ms"],
    )  # fmt: skip
    assert len(found.table) == 2
    assert "mean_e2el_ms_diff" in found.table


def test_a_replay_on_a_fake_device_has_no_error_and_one_on_a_slower_one_says_where_it_is() -> None:
    base = {**BASE, "workload": {"contest": {"X": 50, "T": 0.4}}, "profile": FAST}
    exact = servesim.replay(base, backend="fake")
    assert exact.errors.error.abs().max() < 1e-9
    assert len(exact.steps) == exact.measured.figures["model_calls"]
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
    given = [str(tmp_path / "fast.yaml"), "-X", "50", "-T", "0.4", "--backend", "fake", "--quiet"]
    assert main(["replay", *given, "-o", str(tmp_path / "one")]) == 0
    capsys.readouterr()
    one = servesim.load(tmp_path / "one")
    assert one.errors.error.abs().max() < 1e-9  # type: ignore[union-attr]
    assert len(one.steps) == one.measured.figures["model_calls"]  # type: ignore[union-attr]
    assert one.steps.seconds.to_numpy() == pytest.approx(one.steps.predicted.to_numpy())  # type: ignore[union-attr]


def test_a_profile_is_loaded_with_its_samples_beside_what_its_costs_say(tmp_path: Path) -> None:
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
    assert repr(mine) == "Calibration(mine: tiny on slate)"
    assert mine.samples.expected.tolist() == pytest.approx([0.011, 0.011, 0.011, 0.012, 0.019])
    assert mine.points.seconds.tolist() == pytest.approx([0.0115, 0.010])
    assert mine.points.error.tolist() == pytest.approx([0.011 / 0.0115 - 1, 0.2])
    assert mine.points.taken.tolist() == [2, 1]
    assert mine.errors.loc["decode", "mean"] == 0.02
    assert mine.runs.empty
    assert mine.parameters.empty
    (tmp_path / "samples.csv").unlink()
    bare: Any = servesim.load(tmp_path)
    with pytest.raises(BadInput, match="profile mine: no samples of steps"):
        bare.samples  # noqa: B018


def test_a_bundled_profile_is_loaded_by_its_name() -> None:
    ascend: Any = servesim.load("ascend910b4-llama2-7b")
    assert (ascend.parameters.low <= ascend.parameters.value).all()
    assert set(ascend.runs.used) == {"fitted", "left_out", "predicted"}
    assert ascend.runs.set_index("run").measured_s["baseline"] == pytest.approx(3551.93)


def test_a_trace_file_is_loaded_as_a_frame(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,10,5\n1.5,20,6\n")
    frame = servesim.load(tmp_path / "trace.csv")
    assert isinstance(frame, pd.DataFrame)
    assert frame[["arrival", "prompt", "output"]].to_numpy().tolist() == [[0, 10, 5], [1.5, 20, 6]]


def test_what_is_not_there_is_said() -> None:
    with pytest.raises(BadInput, match="no such file"):
        servesim.load("nowhere/at/all")
