"""`sim config init`: a first scenario in the words of the user's engine, which runs as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from servesim.config.layers import read_scenario_file
from servesim.config.registry import preset, presets
from servesim.config.scenario import scenario_from
from servesim.policies import POLICIES

from .running import run_sim

CONTEST_WORDS = ("contest", "decode_batch", "front_end", "prefill_buckets", "llm-serving", "ascend")


def test_the_first_scenario_has_the_words_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    said = run_sim(capsys, "config", "init")
    assert (said.code, said.error) == (0, "")
    assert [word for word in CONTEST_WORDS if word in said.out] == []
    scenario = scenario_from(yaml.safe_load(said.out))
    assert isinstance(scenario.make_policy(), POLICIES["vllm-v1"])
    words = ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "gpu_memory_utilization")
    for word in (*words, "max_model_len", "block_size"):
        [line] = [line for line in said.out.splitlines() if line.lstrip().startswith(f"{word}:")]
        assert len(line.partition("# ")[2].split()) > 1, f"{word} is explained"
    assert "trace: FILE" in said.out and "calibrate endpoint" in said.out  # how to use one's own requests and server


@pytest.mark.parametrize("name", presets())
def test_the_file_of_a_preset_has_its_settings_and_runs(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "my.yaml")
    said = run_sim(capsys, "config", "init", file, "--preset", name)
    assert (said.code, said.out, said.error) == (0, f"wrote {file}; next: sim run {file}\n", "")
    written, expected = scenario_from(read_scenario_file(file)), scenario_from(preset(name))
    assert written.make_policy() == expected.make_policy()
    for key in expected.engine.model_fields_set:
        assert getattr(written.engine, key) == getattr(expected.engine, key), key
    assert max(map(len, Path(file).read_text(encoding="utf-8").splitlines())) <= 160
    small = "workload.contest.T=10" if "contest" in (written.workload or {}) else "workload.requests=30"
    said = run_sim(capsys, "run", file, "--set", small)
    assert said.code == 0
    assert "warning" not in said.error
    assert "Failed requests:                                         0" in said.out
