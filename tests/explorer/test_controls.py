"""Controls from the schema and the policies, and settings as options of `sim run`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from servesim.cli import main
from servesim.config.layers import read_scenario_file
from servesim.config.registry import SPECULATIVE, presets
from servesim.config.scenario import EngineConfig, scenario_from
from servesim.core import Policy
from servesim.core.fields import policy_fields
from servesim.explorer.controls import controls_of
from servesim.explorer.state import WORKLOADS, Choice, Origin, PageState
from servesim.policies import POLICIES
from servesim.routers import ROUTERS


def error_of(kind: type[Policy], field: str, value: Any) -> str:
    """Return why a policy refuses a value; empty if it accepts it."""
    try:
        kind(**{field: value})
    except ValueError as refused:
        return str(refused)
    return ""


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_field_of_a_policy_has_a_control(name: str) -> None:
    origin = Origin()
    state = origin.choose(origin.first_state(), "policy", name)
    controls = {control.key: control for control in controls_of(origin, state)}
    kind = POLICIES[name]
    of_policy = [field for field in policy_fields(kind).values() if field.name not in SPECULATIVE]
    assert {f"policy.{field.name}" for field in of_policy} <= set(controls)
    for field in of_policy:
        control = controls[f"policy.{field.name}"]
        assert control.help
        if bool in field.types:
            assert control.kind == "switch"
        elif {int, float} & set(field.types):
            assert control.kind == "number"
            assert bool(control.ticks) == (control.default != "null" or control.text != "")
            assert not [tick for tick in control.ticks if field.expected(tick)]
        for text in control.choices if control.kind == "choice" else ():
            error = error_of(kind, field.name, None if text == "null" else text)
            # it may not go with the other settings: then the page shows the error at this control
            assert not error or error.startswith(f"{field.name}: ")
        if control.kind == "text":
            assert field.name in ("version", "flags", "profile_table")
    assert controls["policy.order"].choices[0] == "arrival" and controls["policy.order"].kind == "choice"


def test_every_key_of_the_engine_has_a_control_or_sections_of_controls() -> None:
    origin = Origin()
    keys = {control.key for control in controls_of(origin, origin.first_state("contest-baseline"))}
    missing = {
        name for name in EngineConfig.model_fields
        if not any(key == f"engine.{name}" or key.startswith(f"engine.{name}.") for key in keys)
    }  # fmt: skip
    assert missing == set()


def test_a_section_that_is_no_section_has_a_control_to_correct_it() -> None:
    origin = Origin()
    state = origin.first_state("contest-baseline", {"engine": "3"})
    assert [control.text for control in controls_of(origin, state) if control.key == "engine"] == ["3"]


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_starts_with_requests(name: str) -> None:
    origin = Origin()
    state = origin.first_state(name)
    _, scenario = origin.scenario(state)
    assert scenario.workload is not None
    for kind in WORKLOADS:
        origin.scenario(origin.choose(state, "workload", kind))


def test_a_preset_keeps_requests_profile_and_memory_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "policy: {name: vllm-v1, max_num_seqs: 7}\nworkload: {contest: {X: 5, T: 9}}\nseed: 4\n"
        "profile: h200-llama2-7b\nengine: {device_memory: 80GB, block_size: 32}\nslo: {ttft: 70}\n"
    )
    origin = Origin(str(file))
    tree, _ = origin.scenario(origin.choose(origin.first_state(), "start", "sarathi"))
    assert tree["policy"]["name"] == "sarathi" and tree["policy"].get("max_num_seqs") != 7
    assert (tree["workload"], tree["seed"], tree["slo"]) == ({"contest": {"X": 5, "T": 9}}, 4, {"ttft": 70})
    assert (tree["profile"], tree["engine"]["device_memory"]) == ("h200-llama2-7b", "80GB")
    assert tree["engine"].get("block_size") != 32


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "orca", "policy.max_num_seqs": "3", "workload.contest.X": "3"},
        {"workload": "{requests: 30, arrivals: {kind: poisson, rate: 9}, lengths: {kind: contest}}", "seed": "5"},
        {
            "workload": "{duration: 5, arrivals: {kind: poisson, rate: 9}, lengths: {kind: contest}}",
            "workload.arrivals.rate": "18",
        },
        {"engine.prefill_buckets": "[256, 520]", "policy.order": "shortest-output", "slo.ttft": "1e3"},
    ],
)
def test_the_command_has_the_scenario_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], settings: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a b.yaml").write_text("preset: contest-baseline\nworkload: {contest: {X: 8, T: 5}}\n")
    origin = Origin("a b.yaml")
    choice = Choice(settings=settings)
    words = shlex.split(origin.command(choice))
    assert words[:3] == ["sim", "run", "a b.yaml"]
    assert main([*words[1:], "-o", "out", "-q"]) == 0
    written = json.loads(Path("out/manifest.json").read_text())["scenario"]
    assert scenario_from(written) == origin.scenario(choice)[1]
    Path("copy.yaml").write_text(origin.copies(choice)["YAML"])
    assert scenario_from(read_scenario_file("copy.yaml")) == origin.scenario(choice)[1]
    capsys.readouterr()


def test_a_copied_configuration_without_comments_has_its_remarks_beside_it() -> None:
    origin = Origin()
    copies = origin.copies(origin.first_state("mindie-3.0", {"policy.order": "shortest-output"}))
    assert json.loads(copies["mindie"])["BackendConfig"]["ScheduleConfig"]["maxBatchSize"] == 200
    assert "not expressed: policy.order=shortest-output" in copies["mindie remarks"]
    assert not [name for name in copies if name.endswith("remarks") and not name.startswith("mindie")]


def test_a_rate_of_a_duration_keeps_the_number_of_requests(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(
        "workload: {duration: 60, arrivals: {kind: poisson, rate: 2}, lengths: {kind: fixed, prompt: 8, output: 8}}\n"
    )
    origin = Origin(str(tmp_path / "f.yaml"))
    assert origin.applied(Choice(settings={"workload.arrivals.rate": "8"}))["workload.duration"] == "15.0"
    own = {"workload.arrivals.rate": "8", "workload.duration": "60"}
    assert origin.applied(Choice(settings=own)) == dict(sorted(own.items(), reverse=True))


def test_the_first_state_pins_itself_as_the_baseline() -> None:
    state = Origin().first_state("orca", {"policy.max_num_seqs": "9"})
    assert isinstance(state, PageState)
    assert [(pin.start, pin.settings) for pin in state.pins] == [("orca", state.settings)]
    assert state.settings["policy.max_num_seqs"] == "9"


def test_another_policy_has_the_block_size_of_its_engine() -> None:
    origin = Origin()
    first = origin.first_state()
    assert origin.scenario(first)[1].engine.block_size == 16
    sglang = origin.choose(first, "policy", "sglang")
    assert origin.scenario(sglang)[1].engine.block_size == 1
    assert origin.choose(sglang, "policy", "vllm-v1").settings == first.settings
    preset = origin.choose(first, "start", "sglang-0.5.18")
    assert origin.scenario(preset)[1].engine.block_size == 1
    assert origin.scenario(origin.choose(preset, "policy", "vllm-v1"))[1].engine.block_size == 16


def test_replicas_and_router_are_controls_and_another_router_drops_the_fields_of_the_old_one() -> None:
    origin = Origin()
    first = origin.first_state()
    controls = {control.key: control for control in controls_of(origin, first)}
    assert (controls["cluster.replicas"].default, controls["cluster.replicas"].rare) == ("1", False)
    assert controls["cluster.router"].text == "round-robin" and not controls["cluster.router"].rare
    assert list(controls["cluster.router"].choices) == list(ROUTERS)
    state = origin.choose(first, "cluster.router", "sglang-cache-aware")
    state.settings.update({"cluster.router.cache_threshold": "0.5", "cluster.replicas": "4"})
    controls = {control.key: control for control in controls_of(origin, state)}
    assert (controls["cluster.replicas"].text, controls["cluster.router.cache_threshold"].text) == ("4", "0.5")
    assert controls["cluster.router.cache_threshold"].kind == "number"
    assert "--set cluster.router=sglang-cache-aware --set cluster.replicas=4" in origin.command(state)
    cluster = origin.scenario(state)[1].cluster
    assert cluster is not None and cluster.size == 4
    assert cluster.router == {"name": "sglang-cache-aware", "cache_threshold": 0.5}
    other = origin.choose(state, "cluster.router", "random")
    assert origin.tree(other)["cluster"] == {"router": "random", "replicas": 4}
    sglang = origin.scenario(origin.choose(state, "server", "sglang"))[1]
    assert sglang.cluster == cluster and sglang.policy["name"] == "sglang"


def test_pools_have_no_number_of_replicas_beside_them(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("workload: {contest: {X: 20, T: 1}}\ncluster: {pools: [{name: a, replicas: 2}]}\n")
    origin = Origin(str(tmp_path / "f.yaml"))
    keys = {control.key for control in controls_of(origin, origin.first_state())}
    assert "cluster.pools" in keys and "cluster.replicas" not in keys


def test_drafts_and_their_acceptance_are_sliders_if_the_scenario_has_them(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("workload: {contest: {X: 20, T: 1}}\npolicy: vllm-v1\nspeculative: {tokens: 3, acceptance: 0.7}\n")
    origin = Origin(str(file))
    controls = {control.key: control for control in controls_of(origin, origin.first_state())}
    drafts, acceptance = controls["speculative.tokens"], controls["speculative.acceptance"]
    assert (drafts.text, drafts.kind, drafts.rare) == ("3", "number", False) and 0 in drafts.ticks
    assert (acceptance.text, acceptance.kind, acceptance.rare) == ("0.7", "number", False)
    assert acceptance.ticks[0] == 0 and acceptance.ticks[-1] == 1
    assert controls["speculative.method"].choices[1] == "eagle"
    file.write_text(file.read_text().replace("0.7", "[0.7, 0.5, 0.3]"))
    origin = Origin(str(file))
    controls = {control.key: control for control in controls_of(origin, origin.first_state())}
    assert (controls["speculative.acceptance"].text, controls["speculative.acceptance"].kind) == (
        "[0.7, 0.5, 0.3]", "text",
    )  # fmt: skip
    others = [control for control in controls_of(Origin(), Origin().first_state()) if "speculative" in control.key]
    assert others and all(control.rare for control in others)
