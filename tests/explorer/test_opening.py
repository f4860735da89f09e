"""What the page opens with, and what its choices and tiles contain: knee, pickers, system prompt, labels, refusals."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Iterator
from typing import Any, Optional

import pytest
from servesim.config.families import tunings
from servesim.config.layers import apply_assignment
from servesim.config.memory import about_profile
from servesim.config.scenario import Scenario, scenario_from
from servesim.explorer.controls import alternatives, controls_of, resolve
from servesim.explorer.knee import find_knee
from servesim.explorer.notebook import Explorer
from servesim.explorer.results import Shown, verdict_json
from servesim.explorer.server import ExploreServer
from servesim.explorer.state import Choice, Origin
from servesim.runs.simulate import load_trace, simulate
from servesim.traces.edit import set_rate

from .test_server import messages, one, values


def state_of(server: ExploreServer, **settings: str) -> dict[str, Any]:
    """Return the first state at a fixed rate, with settings: `policy__max_num_seqs` is policy.max_num_seqs."""
    first = server.first.model_dump()
    given = {key.replace("__", "."): text for key, text in settings.items()}
    return {**first, "at_knee": False, "settings": {**first["settings"], "workload.arrivals.rate": "20", **given}}


@pytest.mark.parametrize("doubles_at", [0.02, 0.9, 24.0, 3000.0])
@pytest.mark.parametrize("own", [0.1, 4.0])
def test_the_knee_is_where_the_p99_of_ttft_doubles(doubles_at: float, own: float) -> None:
    async def run(rate: float) -> dict[str, Any]:
        return {"saturated": False, "metrics": {"p99_ttft_ms": 40 * (1 + rate / doubles_at), "mean_e2el_ms": 900.0}}

    lone = 1 + 1e-3 * own / doubles_at  # the lone run has a rate too
    knee = asyncio.run(find_knee(run, own))
    assert knee is not None and 0.88 * (2 * lone - 1) * doubles_at <= knee <= 1.03 * (2 * lone - 1) * doubles_at


@pytest.mark.parametrize("metrics", [{}, {"p99_ttft_ms": 0.0, "mean_e2el_ms": 4.0}])
def test_a_load_without_a_ttft_has_no_knee(metrics: dict[str, float]) -> None:
    async def run(rate: float) -> dict[str, Any]:
        return {"saturated": False, "metrics": metrics}

    assert asyncio.run(find_knee(run, 4.0)) is None


def test_a_page_without_requests_of_the_user_opens_at_the_knee(vllm: Explorer) -> None:
    found = messages(vllm._server, vllm._server.first.model_dump())
    knee = one(found, "knee")
    assert knee["key"] == "workload.arrivals.rate"
    _, scenario = vllm._server.origin.scenario(vllm._server.first)
    trace, rate = load_trace(scenario), float(knee["text"])
    lone, at, above = (simulate(scenario, set_rate(trace, r)).result()["p99_ttft_ms"] for r in (0.01, rate, 1.3 * rate))
    assert at < 2.1 * lone < above
    applied = one(found, "applied")["settings"]
    assert applied["workload.arrivals.rate"] == knee["text"]
    assert values(one(found, "picture"))["p99_ttft_ms"] == pytest.approx(at, rel=0.05)  # `at` has this mean rate


@pytest.mark.parametrize(
    ("preset", "settings", "at_knee"),
    [
        (None, {}, True),
        (None, {"profile": "{model: llama-3.1-8b, device: H100}"}, True),
        (None, {"policy.max_num_seqs": "64"}, True),
        ("sglang-0.5.18", {}, True),
        (None, {"workload.arrivals.rate": "9"}, False),
        ("contest-baseline", {}, False),  # the contest is a fixed amount of work
    ],
)
def test_only_a_load_that_the_user_did_not_give_moves_to_the_knee(
    preset: Optional[str], settings: dict[str, str], at_knee: bool
) -> None:
    assert Origin().first_state(preset, settings).at_knee is at_knee


def test_the_requests_of_a_file_stay(server: ExploreServer) -> None:
    assert not server.first.at_knee
    knee = one(messages(server, {"at_knee": True}), "knee")  # the button finds the knee of any load
    assert knee["key"] == "workload.contest.X"


def test_the_tiles_have_the_numbers_of_the_run(vllm: Explorer) -> None:
    state = state_of(vllm._server, slo="{ttft: 60, tpot: 50}", policy__max_num_seqs="16")
    found = messages(vllm._server, state)
    _, scenario = vllm._server.origin.scenario(Choice(start=state["start"], settings=state["settings"]))
    run = simulate(scenario).result()
    tiles = one(found, "picture")["tiles"]
    assert (tiles["ttft"]["title"], tiles["ttft"]["key"]) == ("P99 TTFT", "p99_ttft_ms")
    assert tiles["ttft"]["texts"][0].endswith(" s") == (run["p99_ttft_ms"] >= 1000)
    assert tiles["goodput"]["title"] == "Goodput"
    assert float(tiles["goodput"]["texts"][0].split()[0]) == pytest.approx(run["request_goodput"], rel=0.01)
    assert (tiles["limit"]["texts"][0], tiles["limit"]["detail"]) == ("slots", run["limit_text"])
    rate = float(one(found, "rates")["loads"][0]["text"].split()[0])
    trace = load_trace(scenario)
    inside, outside = (simulate(scenario, set_rate(trace, factor * rate)).result() for factor in (0.99, 1.07))
    assert inside["p99_ttft_ms"] <= 60 < outside["p99_ttft_ms"]


def test_without_an_slo_the_tiles_say_what_is_missing(vllm: Explorer) -> None:
    found = messages(vllm._server, state_of(vllm._server, slo="{}"))
    assert one(found, "rates")["loads"][0] == {"text": "–", "detail": "set an SLO or a constraint"}
    assert one(found, "picture")["tiles"]["goodput"]["title"] == "Request throughput"


def test_a_refused_configuration_is_the_headline_without_constraints(vllm: Explorer) -> None:
    state = state_of(vllm._server, policy__max_num_batched_tokens="64", policy__max_num_seqs="128")
    found = messages(vllm._server, state)
    verdict = one(found, "verdict")
    assert verdict["better"] == "refused" and "max_num_batched_tokens" in verdict["text"]
    assert verdict["limits"] == ""
    assert one(found, "rates")["loads"][0]["text"] == "none"
    pinned = {**state_of(vllm._server), "pins": [{"start": state["start"], "settings": state["settings"]}]}
    limits = one(messages(vllm._server, pinned), "verdict")["limits"]
    assert "baseline does not start" in limits and "met" not in limits


@pytest.mark.parametrize("server", sorted(tunings()))
@pytest.mark.parametrize(("model", "device"), [("llama-3.1-8b", "H100"), ("qwen2.5-3b", "L4")])
def test_engine_model_and_device_are_those_of_a_scenario_with_their_names(server: str, model: str, device: str) -> None:
    origin = Origin()
    state = origin.first_state()
    for key, value in (("server", server), ("profile.model", model), ("profile.device", device)):
        state = origin.choose(state, key, value)
    _, scenario = origin.scenario(state)
    named = {"profile": {"model": model, "device": device}}
    preset, tuning = origin.base(Choice(start=tunings()[server].preset)), tunings()[server]
    expected = {**preset, **named, "workload": scenario.workload}
    for key, value in tuning.defaults(about_profile(named["profile"]), ()).items():
        expected = apply_assignment(expected, {key: value})
    expected = scenario_from(expected)
    assert scenario.profile == named["profile"]
    assert scenario.engine.num_blocks == expected.engine.num_blocks
    if server == "vllm":  # its defaults on devices from 70 GB on, and on smaller ones
        large = device == "H100"
        assert scenario.policy["max_num_seqs"] == (1024 if large else 256)
        assert scenario.policy["max_num_batched_tokens"] == (8192 if large else 2048)
    controls = {control.key: control for control in controls_of(origin, state)}
    assert (controls["server"].text, controls["profile.model"].text, controls["profile.device"].text) == (
        server, model, device,
    )  # fmt: skip
    words = shlex.split(origin.command(state))
    assert f"profile.device={device}" in words


@pytest.mark.parametrize(("makespan", "better"), [(100.0, "same"), (100.4, "none"), (99.6, "none"), (99.4, "current")])
def test_a_difference_below_half_a_percent_is_none(server: ExploreServer, makespan: float, better: str) -> None:
    tree, scenario = server.origin.scenario(server.first)
    runs = [{"config": 0, "replication": 0, "notes": [], "metrics": {"makespan": value}} for value in (makespan, 100.0)]
    shown = [Shown(number, tree, scenario, [run]) for number, run in enumerate(runs)]
    verdict = verdict_json(shown, "", [])
    assert verdict["better"] == better
    assert ("no difference: " in verdict["text"]) == (better == "none")


def test_the_profile_of_the_start_gives_back_its_memory() -> None:
    origin = Origin()
    first = origin.first_state()
    chosen = origin.choose(origin.choose(first, "profile.device", "L4"), "profile.model", "qwen3-4b")
    back = origin.choose(origin.choose(chosen, "profile.model", ""), "profile.device", "")
    assert back.settings == first.settings
    kept = origin.choose(first.model_copy(update={"settings": {**first.settings, "policy.max_num_seqs": "77"}}),
                         "profile.device", "L4")  # fmt: skip
    assert kept.settings["policy.max_num_seqs"] == "77"  # the user's


def test_a_system_prompt_is_in_every_prompt_and_the_cache_computes_it_once(vllm: Explorer) -> None:
    key = {"workload__prefixes__tokens": "2000"}
    without, cached, computed = (
        values(one(messages(vllm._server, state_of(vllm._server, **settings)), "picture"))
        for settings in ({}, key, {**key, "policy__enable_prefix_caching": "false"})
    )
    assert without.get("prefix_hit_rate") in (None, 0.0)
    assert cached["prefix_hit_rate"] > 0.7
    assert computed["prefix_hit_rate"] is None
    assert without["mean_ttft_ms"] < cached["mean_ttft_ms"] < computed["mean_ttft_ms"]


def test_the_length_of_a_system_prompt_keeps_other_keys_of_the_prefixes() -> None:
    origin = Origin()
    workload = "{requests: 9, arrivals: {kind: poisson, rate: 4}, lengths: {prompt: 8, output: 8}, prefixes: PREFIXES}"
    many = {"workload": workload.replace("PREFIXES", "{count: 20, tokens: 500, zipf: 1.1}")}
    first = origin.first_state(None, many)
    for tokens, expected in (("700", {"count": 20, "tokens": 700, "zipf": 1.1}), ("0", None)):
        settings = {**first.settings, "workload.prefixes.tokens": tokens}
        assert origin.tree(Choice(start=first.start, settings=settings))["workload"]["prefixes"] == expected


def test_a_label_names_only_what_the_user_changed() -> None:
    origin = Origin()
    first = origin.first_state()

    def label(state: Choice) -> str:
        return origin.label(state, first)

    assert label(first) == "vllm-v1-0.32"
    moved = {"workload.arrivals.rate": "30", "slo.ttft": "500", "seed": "3"}  # of all scenarios
    assert label(Choice(start=first.start, settings={**first.settings, **moved})) == "vllm-v1-0.32"
    slots = Choice(start=first.start, settings={**first.settings, "policy.max_num_seqs": "64"})
    assert label(slots) == "max_num_seqs=64"
    assert label(origin.choose(first, "profile.device", "L4")) == "device=L4"  # not its memory and defaults
    assert label(origin.choose(first, "server", "sglang")) == "sglang-0.5.18"


def schema_keys(rule: Any, types: Any, prefix: str, depth: int = 0) -> Iterator[str]:
    """Yield the keys of sections that have one form; a section of several forms is one key."""
    options = [resolve(option, types) for option in alternatives(rule)]
    sections = [option for option in options if "properties" in option]
    if len(sections) == 1 and len([o for o in options if o.get("type") != "null"]) == 1 and depth < 5:
        for name, inner in sections[0]["properties"].items():
            yield from schema_keys(inner, types, f"{prefix}.{name}", depth + 1)
    else:
        yield prefix


@pytest.mark.parametrize("preset", [None, "contest-baseline", "mindie-3.0"])
def test_every_key_of_a_scenario_has_a_control(preset: Optional[str]) -> None:
    origin = Origin()
    controls = {control.key for control in controls_of(origin, origin.first_state(preset))}
    schema = Scenario.model_json_schema()
    for name, rule in schema["properties"].items():
        if name not in ("workload", "trace", "policy", "profile"):  # kinds of requests, and fields of each policy
            for key in schema_keys(rule, schema["$defs"], name):
                assert any(re.match(rf"{control}(\.|$)", key) for control in controls), key
    assert {"profile.model", "profile.device", "profile.tensor_parallel", "profile.precision"} <= controls


def test_names_of_the_command_line_are_those_of_the_pickers() -> None:
    origin = Origin()
    state = origin.first_state(None, {"profile": "{model: llama-3.1-8b, device: L4}"})
    texts = {control.key: control.text for control in controls_of(origin, state)}
    assert (texts["profile.model"], texts["profile.device"]) == ("llama-3.1-8b", "L4")
    assert texts["profile"] == "h200-llama2-7b"
    other = origin.choose(state, "profile.device", "H100")
    assert origin.scenario(other)[1].profile["device"] == "H100"
    assert origin.label(other, state) == "device=H100"
