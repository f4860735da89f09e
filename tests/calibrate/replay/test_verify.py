"""Simulated against measured: errors with their sign, what they come from, pairs of requests, ranks, the verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.calibrate.device.backend import MODELS
from servesim.calibrate.device.fake import Fake
from servesim.calibrate.live.driver import replay
from servesim.calibrate.live.setup import arguments
from servesim.calibrate.probe.host_overhead import Host
from servesim.calibrate.replay.live_run import live_run, write_live
from servesim.calibrate.replay.replay import Replayed, as_run, compare_with, requests_of, winners, write_replay
from servesim.calibrate.replay.verify import Line, compare, decisions, kendall, paired, ranks, relative
from servesim.cli import main
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput
from servesim.costs.device_profile import Profile
from servesim.costs.linear import LinearCost
from servesim.engine.clocks import VirtualClock
from servesim.runs.run_folder import RunData, read_run, run_data

TREE: dict[str, Any] = {
    "workload": {
        "requests": 30,
        "arrivals": {"kind": "poisson", "rate": 8},
        "lengths": {
            "prompt": {"kind": "uniform", "low": 5, "high": 40},
            "output": {"kind": "uniform", "low": 2, "high": 30},
        },
    },
    "policy": {"name": "llm-serving", "decode_batch": 4},
    "engine": {"num_blocks": 40, "block_size": 8},
    "profile": {"base": 0.01, "prefill_token": 0.001, "decode_live": 0.001},
}
TRUE = LinearCost(base=0.01, prefill_token=0.001, decode_live=0.001)  # what the device takes


def measured(scenario: Scenario, cost: LinearCost = TRUE, limit: int | None = None) -> Replayed:
    """Replay a scenario on a device of that cost, in no time."""
    scenario = as_run(scenario)
    requests = requests_of(scenario, limit=limit)
    backend = Fake({})
    backend.load(MODELS["tiny"], 600, scenario.engine.block_size, scenario.engine.host_blocks)
    told = replay(backend, arguments(scenario, requests, MODELS["tiny"], 0), clock=VirtualClock(cost))
    run = live_run(scenario, Profile("true", cost), requests, json.loads(json.dumps(told)))
    return Replayed("here", run, run_data(run, run.decisions))


def test_the_error_is_signed_and_relative_to_the_measured() -> None:
    assert relative(110.0, 100.0) == pytest.approx(0.1)
    assert relative(90.0, 100.0) == pytest.approx(-0.1)
    assert relative(0.0, 0.0) == 0.0
    assert relative(1.0, 0.0) is None
    line = Line("makespan", 110.0, 100.0, 98.0)
    assert line.error == pytest.approx(0.10)
    assert line.decisions == pytest.approx(-0.02)
    assert line.steps == pytest.approx(0.12)


def test_an_error_of_the_step_times_is_told_as_one() -> None:
    live = measured(scenario_from(TREE))
    slow = Profile("slow", LinearCost(base=0.012, prefill_token=0.0012, decode_live=0.0012))
    compare_with(live, live.live.requests, slow, Host())
    assert live.comparison is not None
    makespan = live.comparison.line("makespan")
    assert makespan.error is not None
    assert makespan.error > 0.01
    assert makespan.steps == pytest.approx(makespan.error)
    assert live.comparison.followed == (len(live.measured.calls),) * 2


def test_a_perfect_profile_has_no_error_at_all() -> None:
    live = measured(scenario_from(TREE))
    compare_with(live, live.live.requests, Profile("true", TRUE), Host())
    assert live.comparison is not None
    assert live.comparison.decisions is not None
    assert live.comparison.decisions.identical
    assert all(line.error == 0.0 for line in live.comparison.lines)
    assert live.comparison.outside(0.0) == []


def test_an_error_of_the_decisions_is_told_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = measured(scenario_from(TREE))
    write_live(live.live, tmp_path / "live")
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump({**TREE, "policy": {"name": "llm-serving", "decode_batch": 1}}))
    assert main(["run", str(other), "-o", str(tmp_path / "sim")]) == 0
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "sim"), str(tmp_path / "live"), "--json", "--tolerance", "5%"]) == 3
    found = json.loads(capsys.readouterr().out)["settings"][0]
    makespan = found["metrics"]["makespan"]
    assert makespan["error"] > 0.05
    assert makespan["from_decisions"] == pytest.approx(makespan["error"], rel=0.2)
    assert abs(makespan["from_step_times"]) < 0.2 * makespan["error"]
    assert found["followed"][0] < found["followed"][1]


def test_requests_are_paired_by_id() -> None:
    def side(**finishes: float) -> RunData:
        rows = {
            id: {"arrival": 1.0, "first_token": 1.5, "finish": finish, "outcome": "finished"}
            for id, finish in finishes.items()
        }
        return RunData({}, rows)

    found = paired("e2el", side(a=3.0, b=5.0, c=9.0), side(b=4.0, a=3.0, d=7.0))
    assert found is not None
    assert (found.count, found.mean, found.median) == (2, 0.5, 0.5)
    assert found.within == 0.5
    assert found.worst[0] == ("b", 4.0, 3.0)
    assert paired("e2el", side(a=3.0), side(b=4.0)) is None


def test_decisions_are_compared_turn_by_turn() -> None:
    def turn(id: int, t: float) -> dict[str, Any]:
        return {"t": t, "kind": "decode", "chunks": [[id, 1]], "evicted": [], "swapped_in": [], "rejected": []}

    ours = RunData({}, {}, [turn(1, 0.0), turn(2, 1.0), turn(3, 2.0), turn(4, 3.0)])
    theirs = RunData({}, {}, [turn(1, 0.5), turn(2, 1.5), turn(9, 2.5), turn(4, 3.5), turn(5, 4.5)])
    found = decisions(ours, theirs)
    assert found is not None
    assert (found.simulated, found.measured, found.same, found.alike) == (4, 5, 2, 3)
    assert found.first is not None
    assert found.first["t"] == 2.5
    assert not found.identical
    same = decisions(ours, ours)
    assert same is not None
    assert same.identical


def test_kendalls_tau_is_that_of_the_textbook() -> None:
    assert kendall([1, 2, 3, 4], [10, 20, 30, 40]) == 1.0
    assert kendall([1, 2, 3, 4], [4, 3, 2, 1]) == -1.0
    assert kendall([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)
    assert kendall([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(5 / 30**0.5)  # tau-b: one pair tied
    assert kendall([1, 1], [1, 2]) is None


def test_the_order_of_settings_is_judged_over_all_of_them() -> None:
    found = []
    for batch in (1, 2, 4, 8):
        live = measured(scenario_from({**TREE, "policy": {"name": "llm-serving", "decode_batch": batch}}))
        compare_with(live, live.live.requests, Profile("near", LinearCost(0.011, prefill_token=0.001)), Host())
        assert live.comparison is not None
        found.append(live.comparison)
    tau = ranks(found)
    assert tau["makespan"] == 1.0
    assert tau["mean_ttft_ms"] == 1.0


def test_verify_reads_folders_and_says_whether_the_tolerance_is_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    near = Profile("near", LinearCost(0.0102, prefill_token=0.001, decode_live=0.001))
    for name, batch in (("one", 2), ("two", 6)):
        live = measured(scenario_from({**TREE, "policy": {"name": "llm-serving", "decode_batch": batch}}))
        compare_with(live, live.live.requests, near, Host())
        live.name = name
        write_replay(live, tmp_path, single=False)
    both = ["verify", str(tmp_path / "sim"), str(tmp_path / "live")]
    assert main([*both, "--tolerance", "0.10", "-o", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "simulated against measured: one" in out
    assert "tolerance 10 %: met" in out
    assert "Kendall's tau" in out
    assert (tmp_path / "out" / "verify.png").stat().st_size > 10_000
    report = json.loads((tmp_path / "out" / "verify.json").read_text())
    assert [one["name"] for one in report["settings"]] == ["one", "two"]
    assert report["kendall_tau"]["makespan"] == 1.0
    assert main([*both, "--tolerance", "0.0001"]) == 3
    assert main([*both]) == 0
    again = read_run(tmp_path / "live" / "one")
    assert again.sent is not None
    assert len(again.sent) == 30


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["nowhere", "nowhere"], "nowhere: no such folder"),
        ([".", "."], "expected runs in both"),
    ],
)
def test_what_is_no_run_is_said_to_be_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["verify", *args]) == 2
    assert complaint in capsys.readouterr().err


def test_a_share_is_given_as_a_part_or_in_percent() -> None:
    from servesim.commands.options import share

    assert share("5%") == share("0.05") == share(" 5 % ") == 0.05
    assert (share("0"), share("100%"), share("250%")) == (0.0, 1.0, 2.5)


@pytest.mark.parametrize("given", ["5", "-1%", "nan", "inf", "inf%", "%", "5%%", "much", ""])
@pytest.mark.parametrize(
    "command",
    [
        ["verify", "a", "b", "--tolerance"],
        ["replay", "a", "--tolerance"],
        ["compare", "a", "b", "--tolerance"],
        ["compare", "a", "b", "--confidence"],
        ["calibrate", "check", "a", "--tolerance"],
        ["calibrate", "probe", "--backend", "fake", "-o", "a", "--precision"],
        ["search", "a", "--precision"],
        ["sweep", "a", "--ci"],
    ],
    ids=lambda words: " ".join(words[:2]) + " " + words[-1],
)
def test_every_option_that_is_a_share_reads_it_alike(
    command: list[str], given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command[:-1], f"{command[-1]}={given}"])
    assert ended.value.code == 2
    assert f"argument {command[-1]}: expected a share such as 0.05 or 5%, got {given!r}" in capsys.readouterr().err


def test_an_unknown_metric_lists_the_known_ones() -> None:
    live = measured(scenario_from(TREE), limit=3)
    with pytest.raises(BadInput, match="known: makespan"):
        compare(live.measured, live.measured).line("speed")


def test_a_sweeps_winners_are_replayed_in_their_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = tmp_path / "sweep.yaml"
    tree = {**TREE, "workload": {**TREE["workload"], "arrivals": {"kind": "poisson", "rate": 60}}}
    sweep.write_text(yaml.safe_dump({"base": tree, "params": {"policy.decode_batch": [1, 2, 8]}}))
    folder = tmp_path / "swept"
    assert main(["sweep", str(sweep), "-o", str(folder)]) == 0
    assert [name for name, _ in winners(folder, 1, baseline=True)] == ["rank1", "rank2-baseline"]
    found = winners(folder, 3)
    assert [(name, one.policy["decode_batch"]) for name, one in found] == [
        ("rank1", 8), ("rank2-baseline", 4), ("rank3", 2),
    ]  # fmt: skip
    assert winners(folder / "best.yaml", 1)[0][1].policy["decode_batch"] == 8
    with pytest.raises(BadInput, match=r"no summary\.csv"):
        winners(tmp_path, 1)
    capsys.readouterr()
    command = ["replay", "--from", str(folder), "--top", "2", "--backend", "fake", "--limit", "8", "--tolerance", "1%"]
    assert main([*command, "-o", str(tmp_path / "out")]) == 0
    assert "rank agreement over 2 settings" in capsys.readouterr().out
    assert (tmp_path / "out" / "live" / "rank2-baseline" / "steps.csv").exists()
