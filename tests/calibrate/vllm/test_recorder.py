"""The step recorder of vLLM: with stand-ins for vLLM's schedulers, and inside the real server."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from servesim.calibrate.adapter import vllm_recorder
from servesim.calibrate.adapter.vllm_recorder import recording_scheduler
from servesim.calibrate.imports.step_log import read_step_log
from servesim.calibrate.vllm.recording import open_recording
from servesim.cli import main
from servesim.core import Shape
from servesim.files.step_table import read_steps

from ...events import wait_until
from ..conftest import VirtualTime

VLLM_PYTHON = os.environ.get("SERVESIM_VLLM_PYTHON")
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 688,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 16000,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float32",
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class Scheduler:
    """What the recorder uses of vLLM's scheduler. It runs one prompt in two chunks, and decodes another request."""

    def __init__(self, vllm_config: Any, block_size: int) -> None:
        self.vllm_config, self.block_size = vllm_config, block_size
        self.kv_cache_manager = SimpleNamespace(block_pool=SimpleNamespace(num_gpu_blocks=33))
        self.waiting: list[str] = ["c"]
        requests = {"a": (100, 40), "b": (50, 10)}  # computed, prompt
        self.requests = {
            id: SimpleNamespace(num_computed_tokens=computed, num_prompt_tokens=prompt)
            for id, (computed, prompt) in requests.items()
        }
        self.requests["b"].num_computed_tokens = 0
        self.requests["b"].num_prompt_tokens = 80
        self.left = [{"a": 1, "b": 50}, {}, {"a": 1, "b": 30}]
        self.guessed: dict[str, list[int]] = {}
        self.updated: list[Any] = []

    def schedule(self, throttle: bool = False) -> Any:
        tokens = self.left.pop(0)
        for id, count in tokens.items():
            self.requests[id].num_computed_tokens += count
        return SimpleNamespace(
            num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values()), preempted_req_ids={"d"},
            scheduled_spec_decode_tokens=self.guessed,
        )  # fmt: skip

    def add_request(self, request: Any) -> None:
        pass

    def update_from_output(self, decision: Any, output: Any) -> str:
        self.updated.append(decision)
        for tokens in getattr(output, "sampled_token_ids", ()):
            del tokens[1:]  # those after the end of an answer
        return "outputs"


class AsyncScheduler(Scheduler):
    pass


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand-ins for the modules of vLLM, and its configuration."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.32.0+cpu"},
        "vllm.platforms": {"current_platform": SimpleNamespace(get_device_name=lambda: "H200")},
        "vllm.v1.core.sched.scheduler": {"Scheduler": Scheduler},
        "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": AsyncScheduler},
    }
    for name, members in contents.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    sizes = SimpleNamespace(to_dict=lambda: {"hidden_size": 256, "tie": False, "rope": {"theta": 1}})
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=8, async_scheduling=False, scheduler_cls=object),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, data_parallel_master_ip="10.0.0.1"),
        model_config=SimpleNamespace(model="m", max_model_len=512, hf_token="secret", hf_config=sizes),
        speculative_config=object(),
        lora_config=None,
    )


def wait_for_lines(path: Path, count: int) -> list[dict[str, Any]]:
    wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= count, f"{count} lines")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == count
    return lines


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """The clock of the recorder."""
    clock = VirtualTime()
    monkeypatch.setattr(vllm_recorder, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=time.sleep))
    return clock


def test_every_step_is_written_with_its_shape_and_times(
    config: Any, clock: VirtualTime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "steps.jsonl"
    monkeypatch.setenv("SERVESIM_STEPS", str(path))
    scheduler = recording_scheduler(vllm_config=config, block_size=16)
    assert isinstance(scheduler, Scheduler) and not isinstance(scheduler, AsyncScheduler)
    scheduler.add_request(SimpleNamespace(request_id="b", arrival_time=17.5))
    for _ in range(3):
        decision = scheduler.schedule(False)
        clock.sleep(0.01)
        assert scheduler.update_from_output(decision, None) == "outputs"
    header, *_ = wait_for_lines(path, 3)  # a step without tokens runs no model
    assert "secret" not in json.dumps(header) and "10.0.0.1" not in json.dumps(header)
    recording = open_recording(path)
    assert recording.version == "0.32.0" and recording.unsimulated == ["speculative_config"]
    assert recording.header["num_blocks"] == 33 and recording.header["model_sizes"] == {"hidden_size": 256}
    first, second = read_steps(path)
    assert first.shape == Shape(1, 50, 50, 2500, 0, 1, 1, 100)
    assert second.shape == Shape(1, 30, 30, 900, 30 * 50, 1, 1, 101)
    assert first.waiting == 1 and first.requests == {"b"}
    (arrived,) = json.loads(first.cells["arrived"])
    assert arrived[0] == "b" and arrived[1] <= (first.start or 0.0) and arrived[2] == 17.5
    assert second.cells["arrived"] == "[]" and second.cells["preempted"] == '["d"]'
    assert min(read_step_log(path).seconds) >= 0.01


def test_with_asynchronous_scheduling_a_step_is_decided_before_the_result_of_the_last_one(
    config: Any, clock: VirtualTime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "steps.jsonl"
    monkeypatch.setenv("SERVESIM_STEPS", str(path))
    config.scheduler_config.async_scheduling = True
    scheduler = recording_scheduler(config, 16)
    assert isinstance(scheduler, AsyncScheduler)
    scheduler.left = [{"a": 1}, {"b": 80}]
    first, second = scheduler.schedule(), scheduler.schedule()
    clock.sleep(0.02)
    scheduler.update_from_output(first, None)
    clock.sleep(0.04)
    scheduler.update_from_output(second, None)
    wait_for_lines(path, 3)
    steps = read_step_log(path)
    assert steps.kinds.tolist() == ["decode", "prefill"]
    assert steps.seconds.tolist() == pytest.approx([0.02, 0.04], abs=1e-4)


def test_drafted_tokens_are_written_with_those_that_were_accepted(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "steps.jsonl"
    monkeypatch.setenv("SERVESIM_STEPS", str(path))
    config.speculative_config = SimpleNamespace(method="ngram", num_speculative_tokens=3, draft_model_config=object())
    scheduler = recording_scheduler(config, 16)
    scheduler.left, scheduler.guessed = [{"a": 4, "b": 50}], {"a": [7, 7, 7]}
    scheduler.requests["a"].num_output_tokens = 61
    decision = scheduler.schedule()
    output = SimpleNamespace(sampled_token_ids=[[], [7, 7, 9]], req_id_to_index={"b": 0, "a": 1})
    scheduler.update_from_output(decision, output)
    assert output.sampled_token_ids[1] == [7]
    wait_for_lines(path, 2)
    recording, (step,) = open_recording(path), read_steps(path)
    assert recording.header["speculative"] == {"method": "ngram", "num_speculative_tokens": 3}
    assert recording.unsimulated == []
    assert step.shape == Shape(1, 50, 50, 2500, 0, 1, 1, 100, drafts=3)
    assert step.cells["verified"] == '[["a", 61, 3, 2]]'


def test_without_a_file_the_server_does_not_start(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERVESIM_STEPS", raising=False)
    with pytest.raises(ValueError, match="SERVESIM_STEPS: expected the file to write the steps to"):
        recording_scheduler(config, 16)


@pytest.mark.slow
@pytest.mark.live
@pytest.mark.skipif(VLLM_PYTHON is None, reason="needs vLLM: make vllm, and SERVESIM_VLLM_PYTHON=.venv-vllm/bin/python")
def test_the_real_server_is_calibrated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The errors are not checked here: client and server share the processors with other programs."""
    model = tmp_path / "llama"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    flags = ["--load-format", "dummy", "--enforce-eager", "--dtype", "float32", "--block-size", "32"]
    flags += ["--skip-tokenizer-init"]
    options = ["--seconds", "5", "--prompt-tokens", "60", "--output-tokens", "16", "-q"]
    out = tmp_path / "out"
    assert main(["calibrate", "vllm", *options, "-o", str(out), "--", str(model), *flags]) == 0
    printed = capsys.readouterr().out
    assert "*mean_ttft_ms" in printed and "scenario: " in printed
    recording = open_recording(out / "steps.jsonl")
    assert recording.version.startswith("0.") and recording.unsimulated == []
    assert recording.model == {
        "name": "llama", "layers": 4, "hidden": 256, "heads": 4, "kv_heads": 4, "intermediate": 688, "vocab": 16000,
    }  # fmt: skip
