"""`sim export`: flags that the real parsers accept, everything else listed, policies of other engines refused."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.commands.options import SERVERS
from servesim.config.export import TARGETS, export_scenario
from servesim.config.exported import Exported
from servesim.config.layers import override
from servesim.config.registry import preset, presets
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput, field_values
from servesim.costs.device_profile import write_profile
from servesim.costs.linear import LinearCost
from servesim.policies import POLICIES
from servesim.policies.llm_serving.config_file import from_llm_serving
from servesim.policies.vllm_v1.export import v1_command

from ..commands.running import run_sim
from ..conftest import ROOT

WORKLOAD = {"requests": 3, "arrivals": {"kind": "burst"}, "lengths": {"prompt": 8, "output": 2}}
# The options of the real parsers, read from vllm 0.32.0 (AsyncEngineArgs), vllm 0.8.5 and sglang 0.5 (ServerArgs).
OPTIONS = {
    "vllm-v1": {
        "--max-num-seqs", "--max-num-batched-tokens", "--long-prefill-token-threshold", "--scheduler-reserve-full-isl",
        "--no-scheduler-reserve-full-isl", "--watermark", "--enable-chunked-prefill", "--no-enable-chunked-prefill",
        "--scheduling-policy", "--max-model-len", "--block-size", "--num-gpu-blocks-override",
        "--gpu-memory-utilization", "--enable-prefix-caching", "--no-enable-prefix-caching", "--async-scheduling",
        "--no-async-scheduling", "--kv-offloading-size", "--max-num-active-seqs",
        "--long-prefill-token-threshold-adaptive", "--speculative-config",
        "--prefix-cache-retention-interval",
    },
    "vllm": {
        "--max-num-seqs", "--max-num-batched-tokens", "--enable-chunked-prefill", "--no-enable-chunked-prefill",
        "--scheduler-delay-factor", "--preemption-mode", "--scheduling-policy", "--max-num-partial-prefills",
        "--max-long-partial-prefills", "--long-prefill-token-threshold", "--max-model-len", "--block-size",
        "--num-gpu-blocks-override", "--gpu-memory-utilization", "--swap-space", "--enable-prefix-caching",
        "--no-enable-prefix-caching",
    },
    "sglang": {
        "--model-path", "--schedule-policy", "--schedule-conservativeness", "--max-prefill-tokens",
        "--chunked-prefill-size", "--max-running-requests", "--enable-mixed-chunk", "--context-length", "--page-size",
        "--max-total-tokens", "--disable-radix-cache", "--disable-overlap-schedule", "--prefill-decode-interval",
    },
}  # fmt: skip
OPTIONS["vllm-chunked"] = OPTIONS["vllm"]
ASCEND = tuple(name for name in TARGETS["vllm"] if name.startswith(("vllm-ascend", "vllm-mindspore")))
OPTIONS.update(dict.fromkeys(ASCEND, OPTIONS["vllm-v1"] | {"--additional-config", "--data-parallel-size"}))
SETTINGS: dict[str, list[dict[str, Any]]] = {  # every field of these policies that has a flag
    "vllm-v1": [
        {},
        {"max_num_seqs": 7, "enable_chunked_prefill": False, "scheduler_reserve_full_isl": False, "policy": "priority",
         "max_num_batched_tokens": 8192, "watermark": 0.05, "long_prefill_token_threshold": 64,
         "enable_prefix_caching": False, "async_scheduling": False, "max_num_active_seqs": 5,
         "long_prefill_token_threshold_adaptive": True},
        *({"speculative": {"method": method, "tokens": 3, "acceptance": 0.5}}
          for method in ("ngram", "eagle", "eagle3", "draft_model")),
        {"prefix_cache_retention_interval": 48},
        {"prefix_cache_retention_interval": None},
    ],
    "vllm": [{}, {"max_num_batched_tokens": 4096, "delay_factor": 0.5, "preemption_mode": "swap"}],
    "vllm-chunked": [{}, {"max_num_partial_prefills": 2, "long_prefill_token_threshold": 99}],
    **{name: [{"max_num_batched_tokens": 8192}] for name in ASCEND},
    "sglang": [
        {},
        {"chunked_prefill_size": None, "max_running_requests": 9, "enable_mixed_chunk": True,
         "schedule_policy": "lof", "prefill_decode_interval": 3, "disable_overlap_schedule": True,
         "disable_radix_cache": True},
    ],
}  # fmt: skip


def scenario(policy: str, fields: dict[str, Any] | None = None, **engine: Any) -> Scenario:
    """Return a scenario with fields of its policy, and the section `speculative` among them."""
    own = dict(fields or {})
    sections = {"engine": engine, "speculative": own.pop("speculative", None)}
    tree = {"workload": WORKLOAD, "policy": {"name": policy, **own}, **sections}
    return scenario_from({**tree, "profile": "ascend910b4-llama2-7b"})


def words_of(exported: Exported) -> list[str]:
    """Return the words of a command as a shell reads them; its comments must be comments there too."""
    return shlex.split(exported.render("x\ny.yaml").replace("\\\n", " "), comments=True)


def target_of(policy: str) -> str:
    return next(name for name, target in TARGETS.items() if policy in target)


CASES = [(policy, fields) for policy, cases in SETTINGS.items() for fields in cases]


@pytest.mark.parametrize(("policy", "fields"), CASES)
def test_every_flag_exists_in_the_real_parser(policy: str, fields: dict[str, Any]) -> None:
    exported = export_scenario(scenario(policy, fields, num_blocks=900, max_model_len=4096), target_of(policy))
    flags = {word for word in words_of(exported) if word.startswith("--")}
    assert flags <= OPTIONS[policy]
    assert exported.not_expressed == []


SECTION = "scheduler_config"


@pytest.mark.parametrize(
    ("policy", "fields", "config"),
    [
        ("vllm-ascend", {}, {"ascend_scheduler_config": {"enabled": True}}),
        ("vllm-ascend", {"max_long_partial_prefills": 2, "long_prefill_token_threshold": 99},
         {"ascend_scheduler_config":
          {"enabled": True, "max_long_partial_prefills": 2, "long_prefill_token_threshold": 99}}),
        ("vllm-ascend", {"enable_pd_transfer": True, "decode_max_num_seqs": 400},
         {"ascend_scheduler_config": {"enabled": True, "enable_pd_transfer": True, "decode_max_num_seqs": 400}}),
        ("vllm-ascend-dynamic-batch", {"slo_limits_for_dynamic_batch": 50}, {"SLO_limits_for_dynamic_batch": 50}),
        ("vllm-ascend-short-first", {"threshold": 64, "long_max_wait_ms": 500},
         {SECTION: {"short_request_first_config": {"enabled": True, "threshold": 64, "long_max_wait_ms": 500}}}),
        ("vllm-ascend-batch-jobs", {"max_jobs": 5},
         {SECTION: {"batch_job_sched_config": {"enabled": True, "max_jobs": 5}}}),
        ("vllm-ascend-profiling-chunk", {"min_chunk": 256},
         {SECTION: {"profiling_chunk_config": {"enabled": True, "min_chunk": 256}}}),
        ("vllm-ascend-recompute", {}, {SECTION: {"recompute_scheduler_enable": True}}),
        ("vllm-ascend-balance", {}, {SECTION: {"enable_balance_scheduling": True}}),
    ],
)  # fmt: skip
def test_a_plugin_gets_its_settings_as_json(policy: str, fields: dict[str, Any], config: dict[str, Any]) -> None:
    exported = export_scenario(scenario(policy, fields, num_blocks=900), "vllm")
    words = words_of(exported)
    assert json.loads(words[words.index("--additional-config") + 1]) == config
    assert exported.not_expressed == []


def test_what_the_plugin_reads_elsewhere_is_listed() -> None:
    table = {"slo_limits_for_dynamic_batch": 9, "profile_table": [[32, 1, 16, 7.0]]}
    exported = export_scenario(scenario("vllm-ascend-dynamic-batch", table), "vllm")
    assert "profile_table.csv" in exported.not_expressed[0]
    ranks = scenario("vllm-ascend-balance", num_blocks=900, data_parallel_size=3)
    assert " ".join(words_of(export_scenario(ranks, "vllm"))).count("--data-parallel-size 3") == 1


def test_flags_have_the_values_of_the_scenario() -> None:
    words = words_of(export_scenario(scenario("vllm-v1", SETTINGS["vllm-v1"][1], num_blocks=900), "vllm", "org/model"))
    assert words == shlex.split(
        "vllm serve org/model --max-num-seqs 7 --max-num-batched-tokens 8192 --max-num-active-seqs 5 "
        "--long-prefill-token-threshold 64 --long-prefill-token-threshold-adaptive "
        "--no-scheduler-reserve-full-isl --watermark 0.05 --no-enable-chunked-prefill --scheduling-policy priority "
        "--block-size 16 --num-gpu-blocks-override 901 --no-enable-prefix-caching --no-async-scheduling"
    )  # one block more: V1 never uses the first one


# The first version of vLLM whose parser has an option, read from arg_utils.py of its releases; others are older.
FIRST_WITH = {
    "--scheduler-reserve-full-isl": 19, "--no-scheduler-reserve-full-isl": 19, "--watermark": 24,
    "--max-num-active-seqs": 31, "--long-prefill-token-threshold-adaptive": 31,
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in presets() if name.startswith("vllm-v1-")])
def test_a_version_gets_only_options_that_it_has(name: str) -> None:
    tree = {**preset(name), "workload": WORKLOAD, "profile": "ascend910b4-llama2-7b"}
    exported = export_scenario(scenario_from(tree), "vllm")
    minor = int(name.rpartition(".")[2])
    assert exported.server == f"vLLM 0.{minor}.0 (V1 engine)"
    flags = {word for word in words_of(exported) if word.startswith("--")}
    assert {flag for flag in flags if FIRST_WITH.get(flag, 0) > minor} == set()
    assert ("--scheduler-reserve-full-isl" in flags) == (minor >= 19)
    assert ("--async-scheduling" in flags) == (minor >= 14)  # there, vLLM decides without the flag
    assert exported.not_expressed == []


def test_older_versions_accept_few_block_sizes() -> None:
    fields = {"scheduler_reserve_full_isl": False}
    for version, size, accepted in (("0.11.0", 256, False), ("0.14.0", 256, True), ("0.14.0", 24, False)):
        source = scenario("vllm-v1", {**fields, "version": version}, num_blocks=900, block_size=size)
        exported = export_scenario(source, "vllm")
        assert ("--block-size" in words_of(exported)) == accepted
        assert [line.partition(": ")[0] for line in exported.not_expressed] == (
            [] if accepted else [f"engine.block_size={size}"]
        )


def test_asynchronous_scheduling_has_a_flag_where_vllm_would_decide() -> None:
    old = {"version": "0.11.2", "scheduler_reserve_full_isl": False}
    for fields, flag in (({}, "--async-scheduling"), ({"async_scheduling": False}, "--no-async-scheduling"),
                         (old, "--async-scheduling"), ({**old, "async_scheduling": False}, None)):  # fmt: skip
        exported = export_scenario(scenario("vllm-v1", fields, num_blocks=900), "vllm")
        assert [word for word in words_of(exported) if "async" in word] == ([] if flag is None else [flag])
        assert any("async" in note for note in exported.notes) == (flag == "--no-async-scheduling")


@pytest.mark.parametrize(
    ("section", "model"),
    [
        ({"method": "ngram"}, None),
        ({"method": "mtp"}, None),
        ({"method": "eagle"}, "DRAFT_MODEL"),
        ({"method": "draft_model", "model": "qwen3-4b"}, "Qwen/Qwen3-4B"),
    ],
)
def test_drafts_are_exported_as_json_and_the_user_names_the_draft_model(
    section: dict[str, Any], model: str | None
) -> None:
    fields = {"speculative": {**section, "tokens": 3, "acceptance": 0.5}}
    exported = export_scenario(scenario("vllm-v1", fields, num_blocks=900), "vllm")
    words = words_of(exported)
    own = {} if model is None else {"model": model}
    expected = {"method": section["method"], **own, "num_speculative_tokens": 3}
    assert json.loads(words[words.index("--speculative-config") + 1]) == expected
    assert any("DRAFT_MODEL" in note for note in exported.notes) == (model == "DRAFT_MODEL")
    assert exported.not_expressed == []


def test_modules_of_mtp_are_no_setting() -> None:
    fields = {"speculative": {"method": "mtp", "modules": 2, "tokens": 2, "acceptance": 0.5},
              "enable_prefix_caching": False}  # fmt: skip
    exported = export_scenario(scenario("vllm-v1", fields, num_blocks=900), "vllm")
    assert exported.not_expressed == ["policy.mtp_modules=2: a property of the model"]


def test_the_prefix_cache_is_exported_as_simulated() -> None:
    exported = export_scenario(scenario("vllm-v1", num_blocks=900), "vllm")
    assert "--enable-prefix-caching" in words_of(exported)
    assert not any("prefix" in note for note in exported.notes)


def test_a_host_cache_is_exported_in_gib() -> None:
    host = {"blocks": 512, "bandwidth": "25GB"}
    exported = export_scenario(scenario("vllm-v1", num_blocks=900, host_cache=host), "vllm")
    words = words_of(exported)
    assert words[words.index("--kv-offloading-size") + 1] == "4.0"  # 512 blocks of 16 tokens, 0.5 MiB each
    assert exported.not_expressed == []


def test_swap_space_is_in_gib_and_v0_is_selected() -> None:
    exported = export_scenario(scenario("vllm", {"preemption_mode": "swap"}, num_blocks=900, host_blocks=512), "vllm")
    words = words_of(exported)
    assert words[:4] == ["VLLM_USE_V1=0", "vllm", "serve", "MODEL"]
    assert words[words.index("--swap-space") + 1] == "4.0"  # 512 blocks of 16 tokens, 0.5 MiB each
    assert words[words.index("--num-gpu-blocks-override") + 1] == "900"


def test_a_fraction_of_the_memory_is_exported_as_such() -> None:
    exported = export_scenario(scenario("vllm-v1", {}, device_memory="32GiB", gpu_memory_utilization=0.85), "vllm")
    words = words_of(exported)
    assert words[words.index("--gpu-memory-utilization") + 1] == "0.85"
    assert "--num-gpu-blocks-override" not in words
    assert any(note.startswith("simulated with 1,6") for note in exported.notes)


def test_what_has_no_flag_is_listed() -> None:
    fields = {"order": "shortest-output", "sort_running": True, "watermark": 0.2}
    engine = {
        "num_blocks": 900,
        "prefill_buckets": [64],
        "block_size": 24,
        "front_end": {"lag": 7},
        "client_timeout": 9,
    }
    missing = export_scenario(scenario("vllm", fields, **engine), "vllm").not_expressed
    assert [line.partition(":")[0] for line in missing] == [
        "policy.order=shortest-output", "policy.watermark=0.2", "policy.sort_running=True", "engine.prefill_buckets",
        "engine.front_end", "engine.client_timeout", "engine.block_size=24",
    ]  # fmt: skip
    text = export_scenario(scenario("vllm", fields, **engine), "vllm").render("best.yaml")
    assert text.count("# not expressed: ") == 7 and "--block-size" not in text


def test_sglang_reads_some_fields_from_its_environment() -> None:
    fields = {"version": "0.4.6", "init_new_token_ratio": 0.5, "schedule_policy": "lof", "retract_decode_steps": 5}
    exported = export_scenario(scenario("sglang", fields, num_blocks=900, block_size=4), "sglang")
    words = words_of(exported)
    assert words[0] == "SGLANG_INIT_NEW_TOKEN_RATIO=0.5" and "--schedule-policy" not in words
    assert words[words.index("--max-total-tokens") + 1] == "3600"
    assert [line.partition(":")[0] for line in exported.not_expressed] == [
        "policy.retract_decode_steps=5", "policy.schedule_policy=lof"
    ]  # fmt: skip
    exported = export_scenario(scenario("sglang", {**fields, "version": "0.5.18", "ignore_eos": True}), "sglang")
    words = words_of(exported)
    assert exported.server == "SGLang 0.5.18" and words[1] == "SGLANG_RETRACT_DECODE_STEPS=5"
    assert words[words.index("--schedule-policy") + 1] == "lof"
    assert exported.not_expressed == ["policy.ignore_eos=True: a field of the requests, not of the server"]


def test_llm_serving_gets_its_configuration_and_the_rest_is_listed() -> None:
    fields = {"decode_batch": 64, "delay_factor": 0.5}
    source = scenario("llm-serving", fields, num_blocks=900, prefill_buckets=[64, 4096], host_blocks=3)
    exported = export_scenario(source, "llm-serving")
    again = scenario_from(from_llm_serving(yaml.safe_load(exported.render("best.yaml")), "file"))
    assert field_values(again.make_policy()) == {**field_values(source.make_policy()), "delay_factor": 0.0}
    assert again.engine.num_blocks == 900 and again.engine.prefill_buckets == [64, 4096]
    assert [line.partition(":")[0] for line in exported.not_expressed] == [
        "policy.delay_factor=0.5", "engine.host_blocks"
    ]  # fmt: skip


@pytest.mark.parametrize("policy", [name for name in POLICIES if all(name not in t for t in TARGETS.values())])
def test_policies_of_other_engines_are_refused(policy: str) -> None:
    for target in TARGETS:
        with pytest.raises(BadInput, match=f"policy {policy}: only .* policies have an? {target} configuration"):
            export_scenario(scenario(policy), target)


def test_the_command_prints_or_writes_and_executes_no_policy_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("best.yaml").write_text("policy: {name: vllm-v1, max_num_seqs: 7}\nengine: {num_blocks: 900}\n")
    said = run_sim(capsys, "export", "best.yaml", "--to", "vllm", "--set", "policy.max_num_seqs=8")
    assert said.code == 0 and said.out.startswith("# vLLM 0.32.0 (V1 engine), from best.yaml\n")
    assert "  --max-num-seqs 8 \\\n" in said.out
    assert run_sim(capsys, "export", "best.yaml", "--to", "vllm", "-o", "serve.sh").code == 0
    assert Path("serve.sh").read_text() == run_sim(capsys, "export", "best.yaml", "--to", "vllm").out
    wrong = run_sim(capsys, "export", "best.yaml", "--to", "sglang")
    assert wrong.code == 2
    assert wrong.error == (
        "sim: best.yaml: policy vllm-v1: only sglang policies have a sglang configuration; export it to vllm\n"
    )
    Path("own.py").write_text("raise SystemExit(7)\n")
    own = run_sim(capsys, "export", "best.yaml", "--to", "vllm", "--set", "policy={name: 'own.py:Mine'}")
    assert (own.code, own.error.count("\n")) == (2, 1) and "policy own.py:Mine: only vllm-v1" in own.error


def test_the_command_and_the_library_know_the_same_servers() -> None:
    assert set(SERVERS) == set(TARGETS)


# Settings with which a real engine does not start: the policy, its fields, keys of the engine, and the message.
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("vllm-v1", {"max_num_batched_tokens": 256, "max_num_seqs": 1024}, {},
     r"max_num_batched_tokens \(256\) is below max_num_seqs \(1024\)"),
    ("vllm-v1", {"enable_chunked_prefill": False}, {"max_model_len": 4096},
     r"max_num_batched_tokens \(2048\) is below max_model_len \(4096\)"),
    ("vllm-v1", {"long_prefill_token_threshold": 5000}, {"max_model_len": 4096}, "is above max_model_len"),
    ("vllm-v1", {"max_num_active_seqs": 500}, {}, r"max_num_active_seqs \(500\) is above max_num_seqs \(128\)"),
    ("vllm", {"max_num_batched_tokens": 1024}, {"max_model_len": 4096}, "needs chunked prefill"),
    ("vllm", {"max_num_seqs": 4096}, {"max_model_len": 1024}, r"\(2048\) is below max_num_seqs"),
    ("vllm-chunked", {"max_num_batched_tokens": 16}, {}, "below max_num_seqs"),
    ("vllm-chunked", {"max_num_partial_prefills": 2, "max_long_partial_prefills": 3}, {}, "max_long_partial_prefills"),
    ("sglang", {"chunked_prefill_size": 100}, {"block_size": 16}, "no multiple of engine.block_size"),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "fields", "engine", "message"), REFUSED)
def test_settings_with_which_the_server_does_not_start_are_refused(
    policy: str, fields: dict[str, Any], engine: dict[str, Any], message: str
) -> None:
    target = "sglang" if policy == "sglang" else "vllm"
    with pytest.raises(BadInput, match=f"does not start with these settings: .*{message}"):
        export_scenario(scenario(policy, fields, **engine), target)


def test_a_sweep_does_not_recommend_what_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """More running requests are better here, so the refused configuration has the best mean."""
    monkeypatch.chdir(tmp_path)
    base = {
        "workload": {"requests": 60, "arrivals": {"kind": "burst"}, "lengths": {"prompt": 8, "output": 30}},
        "profile": {"base": 0.01}, "policy": {"name": "vllm-v1", "max_num_batched_tokens": 32, "max_num_seqs": 8},
    }  # fmt: skip
    Path("base.yaml").write_text(yaml.safe_dump(base))
    Path("sweep.yaml").write_text("base: base.yaml\nparams: {policy.max_num_seqs: [8, 16, 64]}\n")
    said = run_sim(capsys, "sweep", "sweep.yaml", "-q", "-o", "out", "--no-report")
    assert said.code == 0, said.error
    assert "does not start" in said.out and "Winner: max_num_seqs=16" in said.out
    assert yaml.safe_load(Path("out/best.yaml").read_text())["policy"]["max_num_seqs"] == 16
    said = run_sim(capsys, "run", "base.yaml", "--set", "policy.max_num_seqs=64")
    assert said.code == 0
    assert "does not start: max_num_batched_tokens (32) is below max_num_seqs (64)" in said.out + said.error


def test_a_folder_of_a_run_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tree = {"workload": WORKLOAD, "policy": {"name": "vllm-v1", "max_num_seqs": 9}, "engine": {"num_blocks": 900}}
    Path("base.yaml").write_text(yaml.safe_dump(tree))
    assert run_sim(capsys, "run", "base.yaml", "-o", "out").code == 0
    said = run_sim(capsys, "export", "out", "--to", "vllm")
    assert said.code == 0 and "--max-num-seqs 9 " in said.out and "--num-gpu-blocks-override 901" in said.out
    Path("empty").mkdir()
    said = run_sim(capsys, "export", "empty", "--to", "vllm")
    assert (said.code, said.error.count("\n")) == (2, 1) and "folder of `sim run -o`" in said.error


def check_with_vllm(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the configuration check of the real vLLM, which builds its whole configuration, on a small model."""
    python = os.environ.get("SERVESIM_VLLM_PYTHON")
    if not python:
        pytest.skip("needs vLLM: set SERVESIM_VLLM_PYTHON to the interpreter of vLLM 0.32")
    return subprocess.run(
        [python, "-c", CHECK_CONFIG, *words], capture_output=True, text=True, cwd=ROOT.parent, check=False
    )


CHECK_CONFIG = """
import json, pathlib, sys, tempfile
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

folder = pathlib.Path(tempfile.mkdtemp())
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4)
config = dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=1000, max_position_embeddings=8192)
(folder / "config.json").write_text(json.dumps(config | sizes | dict(torch_dtype="float32")))
parsed = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(sys.argv[1:])
parsed.model, parsed.skip_tokenizer_init, parsed.load_format = str(folder), True, "dummy"
if "model" in (parsed.speculative_config or {}):
    parsed.speculative_config["model"] = str(folder)
made = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
scheduler = made.scheduler_config
cache = made.cache_config
assert cache.prefix_cache_retention_interval == (48 if "48" in sys.argv else None if "None" in sys.argv else 0)
print("accepted", scheduler.max_num_seqs, scheduler.max_num_batched_tokens, made.cache_config.num_gpu_blocks_override)
"""
V1_CASES = [(fields, {"num_blocks": 900}) for policy, fields in CASES if policy == "vllm-v1"]


@pytest.mark.parametrize(("fields", "engine"), V1_CASES)
def test_the_installed_vllm_accepts_the_configuration(fields: dict[str, Any], engine: dict[str, Any]) -> None:
    source = scenario("vllm-v1", fields, **engine)
    done = check_with_vllm(words_of(export_scenario(source, "vllm"))[3:])
    policy: Any = source.make_policy()
    expected = f"accepted {policy.max_num_seqs} {policy.max_num_batched_tokens} 901"
    assert done.stdout.splitlines()[-1:] == [expected], done.stderr[-800:]


@pytest.mark.parametrize(("fields", "engine"), [case[1:3] for case in REFUSED if case[0] == "vllm-v1"])
def test_the_installed_vllm_refuses_what_we_refuse(fields: dict[str, Any], engine: dict[str, Any]) -> None:
    done = check_with_vllm(words_of(v1_command(scenario("vllm-v1", fields, **engine), "MODEL"))[3:])
    assert "accepted" not in done.stdout
    assert any(
        name in done.stderr for name in ("max_num_batched_tokens", "long_prefill_token_threshold", "max_num_active")
    )


RECORDED = {"name": "vllm-v1", "max_num_seqs": 64, "async_scheduling": False}
COMMAND = ["meta/llama", "--dtype=float32", "--max_num_seqs", "64", "-tp", "2", "--watermark", "0.1", "--enforce-eager"]


def recorded_scenario(folder: Path, settings: list[str], **sections: Any) -> Exported:
    """Export a scenario with the profile of a server that `sim calibrate vllm` has recorded."""
    server = {"command": COMMAND, "policy": {**RECORDED, "watermark": 0.1}, "engine": {"num_blocks": 900}}
    server |= sections
    write_profile(folder / "profile", {"name": "x", "server": server}, LinearCost(0.01))
    tree = {**server, "workload": WORKLOAD, "profile": str(folder / "profile")}
    del tree["command"]
    return export_scenario(scenario_from(override(tree, settings)), "vllm")


def test_a_recorded_server_keeps_its_command(tmp_path: Path) -> None:
    exported = recorded_scenario(tmp_path, [])
    assert words_of(exported) == ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", *COMMAND]
    assert exported.changes == [] and exported.notes == []
    assert "# the recorded command, unchanged" in exported.render("x")


def test_changed_settings_of_a_recorded_server_replace_its_flags(tmp_path: Path) -> None:
    changed = ["policy.max_num_seqs=8", "policy.watermark=0", "policy.async_scheduling=true", "engine.num_blocks=700"]
    exported = recorded_scenario(tmp_path, changed)
    added = ["--num-gpu-blocks-override", "701", "--async-scheduling"]
    expected = ["meta/llama", "--dtype=float32", "--max-num-seqs", "8", "-tp", "2", "--enforce-eager", *added]
    assert words_of(exported)[4:] == expected
    assert exported.changes == [
        "- --max_num_seqs 64", "+ --max-num-seqs 8", "- --watermark 0.1", "+ --num-gpu-blocks-override 701",
        "+ --async-scheduling",
    ]  # fmt: skip
    assert "# the recorded command with these changes:\n# - --max_num_seqs 64\n" in exported.render("x")


def test_drafts_of_a_recorded_server_stay_until_they_change(tmp_path: Path) -> None:
    drafts = {"method": "ngram", "tokens": 2, "acceptance": 0.4}
    changed = ["speculative={method: ngram, tokens: 2, acceptance: 0.4}"]
    flag = '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 2}\''
    assert recorded_scenario(tmp_path, changed).changes == [f"+ {flag}"]
    assert recorded_scenario(tmp_path, changed, speculative=drafts).changes == []


def test_sglang_without_a_block_size_has_pages_of_one_token() -> None:
    exported = export_scenario(scenario_from({"workload": WORKLOAD, "policy": {"name": "sglang"}}), "sglang")
    assert "--page-size 1 " in exported.text and "--max-total-tokens 16384" in exported.text


def test_the_server_loads_the_model_that_the_profile_names() -> None:
    named = scenario_from({"policy": "vllm-v1", "profile": {"model": "llama-3.1-8b", "device": "H100"}})
    assert export_scenario(named, "vllm").text.split()[2] == "meta-llama/Llama-3.1-8B-Instruct"
    assert export_scenario(named, "vllm", "org/model").text.split()[2] == "org/model"
    assert export_scenario(scenario("vllm-v1", num_blocks=900), "vllm").text.split()[2] == "MODEL"
