"""Settings over a scenario file: sections in their short form (`trace: FILE`, `policy: NAME`) are sections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from servesim.config.layers import apply_assignment, merge, override
from servesim.config.scenario import scenario_from
from servesim.core import BadInput

from ..commands.running import run_sim

TRACE = "arrival,prompt,output\n" + "".join(f"{k},20,{3 + k % 5}\n" for k in range(20))
SHORT: dict[str, Any] = {"trace": "trace.csv", "policy": "vllm-v1"}
LONG: dict[str, Any] = {"trace": {"path": "trace.csv"}, "policy": {"name": "vllm-v1"}}


@pytest.mark.parametrize("setting", ["trace.rate=30", "trace.limit=5", "policy.max_num_seqs=4", "seed=3"])
def test_a_setting_means_the_same_for_the_short_and_the_long_form(setting: str) -> None:
    assert scenario_from(override(SHORT, [setting])) == scenario_from(override(LONG, [setting]))
    key, _, value = setting.partition("=")
    assert scenario_from(apply_assignment(SHORT, {key: int(value)})) == scenario_from(override(LONG, [setting]))


@pytest.mark.parametrize("settings", [["policy.name=vllm-v1", "policy.max_num_seqs=4"],
                                      ["policy.max_num_seqs=4", "policy.name=vllm-v1"]])  # fmt: skip
def test_another_policy_name_drops_the_fields_of_the_old_policy(settings: list[str]) -> None:
    """As `--policy` and a parameter of a sweep do; the order of the settings has no effect."""
    base = {"trace": "trace.csv", "policy": {"name": "llm-serving", "decode_batch": 4}}
    assert scenario_from(override(base, settings)).policy == {"name": "vllm-v1", "max_num_seqs": 4}
    same = scenario_from(override(base, ["policy.name=llm-serving"]))
    assert same.policy == {"name": "llm-serving", "decode_batch": 4}


def test_keys_are_merged_into_the_short_form() -> None:
    over = {"trace": {"rate": 30}, "policy": {"max_num_seqs": 4}}
    assert merge(SHORT, over) == merge(LONG, over)
    assert merge(LONG, {"trace": "other.csv"})["trace"] == "other.csv"


def test_the_rate_of_a_trace_is_set_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.csv").write_text(TRACE)
    Path("short.yaml").write_text("trace: trace.csv\npolicy: vllm-v1\n")
    Path("long.yaml").write_text("trace: {path: trace.csv, rate: 30}\npolicy: {name: vllm-v1}\n")
    said = run_sim(capsys, "run", "short.yaml", "--set", "trace.rate=30", "--json")
    assert said.code == 0, said.error
    assert said.out.replace("short", "long") == run_sim(capsys, "run", "long.yaml", "--json").out


def test_a_text_without_keys_is_no_section() -> None:
    with pytest.raises(BadInput, match="expected a section that holds base, got 'h200-llama2-7b'"):
        override({"profile": "h200-llama2-7b"}, ["profile.base=1"])


def test_a_key_of_a_profile_by_name_is_set_over_a_stored_profile() -> None:
    tree = {"profile": "h200-llama2-7b", "engine": {"device_memory": "H200", "block_size": 16}}
    tree = override(tree, ["profile.device=H100", "profile.model=llama-3.1-8b"])
    assert tree["profile"] == {"measured": "h200-llama2-7b", "device": "H100", "model": "llama-3.1-8b"}
    assert tree["engine"] == {"block_size": 16}  # the memory is that of the new device
