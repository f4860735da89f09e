"""Warnings about silent differences from a real server, and the remarks of `sim run`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import servesim
from servesim.config.scenario import Scenario, scenario_from
from servesim.costs.device_profile import load_profile
from servesim.runs.notes import Note, sentence
from servesim.runs.run_warnings import run_warnings, scenario_warnings, warn_default_blocks, warn_unused_prefixes
from servesim.runs.simulate import load_trace, simulate
from servesim.runs.text import show_run

from ..commands.running import run_sim

WORKLOAD = {"requests": 3, "arrivals": {"kind": "burst"}, "lengths": {"prompt": 8, "output": 2}}
H200_NOTE = "profile h200-llama2-7b was measured on servesim's own torch backend"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working folder with a Mooncake trace: of 4 blocks, only the first of the second prompt is known."""
    rows = [(0, 1024, [1, 2]), (1000, 1200, [1, 3, 2])]
    lines = [{"timestamp": at, "input_length": size, "output_length": 2, "hash_ids": ids} for at, size, ids in rows]
    (tmp_path / "mooncake.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def scenario(profile: object, policy: str = "vllm-v1", **engine: object) -> Scenario:
    return scenario_from({"workload": WORKLOAD, "policy": policy, "profile": profile, "engine": engine})


def test_default_blocks_on_a_known_device_are_a_warning() -> None:
    profile = load_profile("h200-llama2-7b")
    warning = warn_default_blocks(scenario("h200-llama2-7b"), profile)
    text = warning.text
    assert text.startswith("engine.num_blocks keeps its default of 1,024 (8.59 GB of KV cache), but NVIDIA H200 has")
    assert text.endswith("set engine.num_blocks, or engine.device_memory: 143771MiB")
    for known in ({"num_blocks": 1024}, {"device_memory": "143771MiB"}):
        assert warn_default_blocks(scenario("h200-llama2-7b", **known), profile) is None


def test_engines_with_a_fixed_number_of_blocks_and_unknown_devices_get_no_warning() -> None:
    assert warn_default_blocks(scenario("h200-llama2-7b", "llm-serving"), load_profile("h200-llama2-7b")) is None
    assert warn_default_blocks(scenario({"base": 0.1}), load_profile({"base": 0.1})) is None


def test_unused_hash_ids_are_a_warning_with_the_share_of_blocks(folder: Path) -> None:
    trace = load_trace(scenario_from({"trace": "mooncake.jsonl"}))
    warning = warn_unused_prefixes(trace, 512)
    assert warning is not None and "an unlimited one would hit 25.0 % of the 4 prompt blocks" in warning.text
    assert warn_unused_prefixes(load_trace(scenario_from({"workload": WORKLOAD})), 512) is None


def test_run_prints_its_warnings_and_result_json_has_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--trace", "mooncake.jsonl", "--policy", "vllm", "--profile", "h200-llama2-7b", "-o", "out")
    said = run_sim(capsys, "run", *arguments)
    first, second = said.error.splitlines()
    assert said.code == 0
    assert first.startswith("sim: warning: engine.num_blocks keeps its default")
    assert second.startswith("sim: warning: prompts of the trace share prefixes, but the run has no prefix cache")
    assert f"note: {H200_NOTE}" in said.out
    warnings = json.loads((folder / "out" / "result.json").read_text())["warnings"]
    assert [text[:20] for text in warnings] == ["engine.num_blocks ke", "prompts of the trace", H200_NOTE[:20]]
    result = servesim.run(trace="mooncake.jsonl", policy="vllm", profile="h200-llama2-7b")
    assert result.metrics["warnings"] == warnings
    cached = servesim.run(trace="mooncake.jsonl", policy="vllm-v1", profile="h200-llama2-7b")
    assert [text[:20] for text in cached.metrics["warnings"]] == ["engine.num_blocks ke", H200_NOTE[:20]]


def test_a_run_without_warnings_has_no_key_for_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = scenario({"base": 0.1}, num_blocks=64)
    assert run_warnings(plain, load_profile(plain.profile), load_trace(plain)) == []
    said = run_sim(capsys, "run", "-X", "5", "-T", "2", "--json")
    assert said.error == "" and "warnings" not in json.loads(said.out)


def test_a_note_is_data_with_one_text_for_lines_and_pages() -> None:
    note = Note("bad profile", {"profile": "mine", "verdict": "do not use", "path": "p/mine"})
    assert note.text == "profile mine: do not use; see sim calibrate check p/mine"
    assert sentence(note.text) == "Profile mine: do not use; see sim calibrate check p/mine."
    stored = json.loads(json.dumps(note))
    assert Note(*stored) == note


@pytest.mark.parametrize(("policy", "warns"), [("mindie", True), ("sglang", True), ("vllm-v1", False), ("vllm", False)])
def test_several_answers_of_an_engine_that_may_run_them_in_another_way_are_a_warning(
    tmp_path: Path, policy: str, warns: bool
) -> None:
    (tmp_path / "answers.csv").write_text("arrival_s,prompt_tokens,output_tokens,n\n0,9,4,2\n")
    tree = {"trace": str(tmp_path / "answers.csv"), "policy": policy, "profile": {"base": 0.1}}
    config = scenario_from({**tree, "engine": {"block_size": 16}})
    texts = [note.text for note in run_warnings(config, load_profile({"base": 0.1}), load_trace(config))]
    assert warns == any("several answers to a request (n > 1) are not reproduced" in text for text in texts)


def test_lengths_without_contents_on_a_prefix_cache_are_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result of a benchmark has no prompts, so it loses the prefixes that they share."""
    monkeypatch.chdir(tmp_path)
    bench = {"input_lens": [40, 50], "output_lens": [2, 2], "ttfts": [0.1, 0.1], "itls": [[0.1], [0.1]],
             "start_times": [0.0, 0.5], "errors": ["", ""], "num_prompts": 2, "backend": "vllm"}  # fmt: skip
    Path("bench.json").write_text(json.dumps(bench))
    Path("lengths.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,40,2\n0.5,50,2\n")
    line = "sim: warning: the prefix cache is on, but the trace has only the lengths of its prompts"
    settings = ("--set", "profile={base: 0.01}", "--set", "engine.num_blocks=64")
    for trace in ("bench.json", "lengths.csv"):
        said = run_sim(capsys, "run", "--trace", trace, "--policy", "vllm-v1", *settings)
        assert said.code == 0 and [text[: len(line)] for text in said.error.splitlines()] == [line]
        off = run_sim(
            capsys, "run", "--trace", trace, "--policy", "vllm-v1", *settings,
            "--set", "policy.enable_prefix_caching=false",
        )  # fmt: skip
        assert off.code == 0 and off.error == ""


def test_a_run_of_pools_names_their_profiles_and_policies_and_warns_about_each() -> None:
    """The profile of the scenario is that of no pool."""
    pools = [
        {"name": "old", "profile": "h200-llama2-7b", "policy": "vllm"},
        {"name": "new", "profile": "h200-llama3.1-8b"},
    ]
    clustered = scenario_from(
        {"workload": WORKLOAD, "policy": "vllm-v1", "profile": {"base": 0.1}, "cluster": {"pools": pools}}
    )
    run = simulate(clustered)
    text = show_run(run)
    assert re.search(r"^Policy: +vllm, vllm-v1$", text, re.M)
    assert re.search(r"^Profile: +h200-llama2-7b, h200-llama3.1-8b$", text, re.M)
    assert re.search(r"^policy validated against: vllm: recordings.*; vllm-v1: recordings", text, re.M)
    blocks = [found.text for found in run_warnings(clustered, run.profile, None) if "num_blocks" in found.text]
    assert len(blocks) == 2 and len(set(blocks)) == 2


def test_a_stored_run_whose_files_are_gone_has_no_warnings() -> None:
    known = {"workload": WORKLOAD, "policy": "vllm-v1", "profile": "h200-llama2-7b"}
    assert scenario_warnings(known)
    assert scenario_warnings({**known, "profile": "gone"}) == []
    assert scenario_warnings({**known, "cluster": {"pools": [{"name": "a", "profile": "gone"}]}}) == []
