"""KV cache groups of a scenario: from its key or from the model, in the memory of a device, refused where not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Optional

import pytest
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput
from servesim.costs.kv_memory import MemoryBudget, cache_groups, memory_of
from servesim.costs.model_arithmetic import model_of
from servesim.costs.model_config import read_model
from servesim.costs.public_models import PUBLIC_MODELS
from servesim.runs.simulate import simulate

GIB = 2**30
WORKLOAD = {"requests": 5, "arrivals": {"kind": "burst"}, "lengths": {"prompt": 300, "output": 20}}
GPT_OSS = {"model": "gpt-oss-120b", "device": "H200", "precision": "mxfp4"}


def scenario(policy: str = "vllm-v1", profile: Any = "h200-llama2-7b", **keys: Any) -> Scenario:
    return scenario_from({"workload": WORKLOAD, "policy": policy, "profile": profile, **keys})


@pytest.mark.parametrize(
    ("full", "sliding", "groups", "layers"),
    [(12, 12, (1, 1), 12), (18, 18, (1, 1), 18), (13, 12, (1, 1), 13), (10, 52, (1, 6), 10), (5, 25, (1, 5), 5),
     (20, 30, (1, 2), 20), (20, 29, (1, 1), 29)],
)  # fmt: skip
def test_groups_have_as_many_layers_as_the_smallest_kind(
    full: int, sliding: int, groups: tuple[int, int], layers: int
) -> None:
    expected = (None,) * groups[0] + (128,) * groups[1]
    assert cache_groups([(None, full), (128, sliding)]) == (expected, layers)
    assert cache_groups([(128, sliding), (None, full)]) == (expected[::-1], layers)


def test_one_kind_of_layers_is_one_group() -> None:
    assert cache_groups([(None, 32)]) == ((None,), 32)
    assert cache_groups([(4096, 32)]) == ((4096,), 32)


def test_the_tokens_that_vllm_logs_follow_from_the_blocks_of_one_group() -> None:
    """gpt-oss-120b on an H200, vLLM 0.22: 57.22 GiB were 886,521 tokens; 103,690 blocks in another server."""
    model = memory_of(PUBLIC_MODELS["gpt-oss-120b"])
    assert model is not None and model.groups == (128, None)
    budget = MemoryBudget(int(57.2223 * GIB), 1.0, model._replace(weights=0), 0, 16, model.groups)
    assert budget.block_bytes == 2 * 18 * 8 * 64 * 2 * 16
    assert budget.blocks == 104_170
    longest = -(-9472 // 16) + -(-(128 - 1 + 8192) // 16) + 1  # full attention, and the most of the window at once
    assert budget.blocks * 9472 // longest == 886_521
    assert 103_690 * budget.block_bytes / GIB == pytest.approx(56.96, abs=0.01)


def test_a_model_with_windows_gives_the_groups_and_the_blocks_of_one_group() -> None:
    engine = scenario(profile=GPT_OSS).engine
    assert engine.kv_cache_groups == [128, None]
    full = scenario(profile=GPT_OSS, engine={"kv_cache_groups": [None]}).engine
    assert engine.num_blocks // 2 == full.num_blocks
    assert scenario("sglang", GPT_OSS).engine.kv_cache_groups is None
    assert scenario().engine.kv_cache_groups is None


def test_groups_of_the_model_are_still_a_default() -> None:
    tree = scenario(profile=GPT_OSS).model_dump(exclude_unset=True)
    assert "kv_cache_groups" not in tree["engine"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"policy": "sglang"}, "kv_cache_groups: expected vllm-v1 without host_cache, policy sglang has one group"),
        ({"policy": "vllm-ascend-recompute"}, "policy vllm-ascend-recompute has one group"),
        ({"engine": {"kv_cache_groups": [0, None]}}, "windows from 1 to"),
        ({"engine": {"kv_cache_groups": []}}, "kv_cache_groups"),
        ({"engine": {"kv_cache_groups": [64], "host_cache": {"blocks": 9, "bandwidth": "1GB"}}}, "host_cache too"),
        ({"speculative": {"method": "mtp", "tokens": 2, "acceptance": 0.5}}, "expected another method than mtp"),
        ({"cluster": {"pools": [{"name": "a", "role": "prefill"}, {"name": "b", "role": "decode"}]}},
         "expected \\[null\\], one group, with pools of role prefill and decode"),
    ],
)  # fmt: skip
def test_groups_that_are_not_modelled_are_refused_in_one_line(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message) as error:
        scenario(**{"engine": {"kv_cache_groups": [128, None]}, **keys})
    assert "\n" not in str(error.value)


def test_the_retention_interval_is_a_multiple_of_the_block_size() -> None:
    policy = scenario().make_policy().replace(prefix_cache_retention_interval=40)
    assert policy.engine_refusals(16, None) == [
        "prefix_cache_retention_interval (40) is no multiple of block_size (16)"
    ]
    assert not policy.engine_refusals(8, None)


def test_a_group_with_a_window_holds_fewer_blocks_than_full_attention() -> None:
    few, many = (simulate(scenario(engine={"kv_cache_groups": groups})).result() for groups in ([None], [64, None]))
    assert few["peak_kv_blocks"] < many["peak_kv_blocks"] <= 2 * few["peak_kv_blocks"]
    assert few["mean_e2el_ms"] == many["mean_e2el_ms"]
    assert 0 < many["kv_fragmentation"] < 0.2


# -- config.json of Hugging Face --------------------------------------------------------------------------------------

SIZES = {
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 99,
}
MIXED = ["sliding_attention", "full_attention"] * 3


@pytest.mark.parametrize(
    ("keys", "groups"),
    [
        ({}, (None,)),
        ({"sliding_window": None}, (None,)),  # Mistral 7B v0.3
        ({"sliding_window": 4096}, (4096,)),  # Mistral 7B v0.1
        ({"sliding_window": 128, "layer_types": MIXED}, (128, None)),  # gpt-oss
        ({"sliding_window": 128, "layer_types": MIXED[::-1]}, (None, 128)),
        ({"sliding_window": 128, "layer_types": ["full_attention"] * 6}, (None,)),
        ({"sliding_window": 512, "model_type": "gemma2"}, (512, None)),
        ({"sliding_window": 512, "sliding_window_pattern": 6}, (512,) * 5 + (None,)),  # Gemma 3
        ({"sliding_window": 512, "use_sliding_window": False, "max_window_layers": 4}, (None,)),  # Qwen 2.5
        ({"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 4}, (None, None, 512)),
    ],
)  # fmt: skip
def test_a_config_json_says_which_layers_have_a_window(
    keys: dict[str, Any], groups: tuple[Optional[int], ...], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SIZES | keys))
    model = model_of({"model": read_model(str(path))})
    assert model is not None
    memory = memory_of(model)
    assert memory is not None and memory.groups == groups
    assert (
        memory.per_group * (6 if len(groups) == 6 else 3 if groups == (None, None, 512) else len(groups))
        == memory.per_token
    )


def test_a_derived_step_reads_windows_of_a_row_and_all_tokens_of_the_other_layers() -> None:
    model = PUBLIC_MODELS["gpt-oss-120b"]
    assert (model.reading_layers, model.window_tokens) == (18, 128.0)
    assert model.values_moved(0, 0, 10) * 2 == model.kv_values * 10


def test_requests_with_groups_can_be_aborted_and_a_replica_with_them_can_fail() -> None:
    cluster = {
        "replicas": 2,
        "router": "conductor",
        "faults": [{"replica": 0, "at": 0.3, "kind": "crash", "recover": 0.6}],
    }
    workload = {"requests": 40, "arrivals": {"kind": "poisson", "rate": 40}, "lengths": {"prompt": 300, "output": 200}}
    profile = {"base": 0.01}
    engine = {"kv_cache_groups": [64, None], "client_timeout": 3.0, "num_blocks": 200}
    run = simulate(scenario(profile=profile, engine=engine, cluster=cluster, workload=workload))
    assert {request.outcome for request in run.requests} == {"finished", "lost"}
