"""`engine.num_blocks` from the memory of the device, times of host copies; both from the model of the profile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Any, Literal, Optional, Union

from pydantic import BeforeValidator, Field, ValidatorFunctionWrapHandler, WrapValidator
from servesim.core import BadInput
from servesim.core.limits import MAX_INT
from servesim.costs.device_profile import load_profile
from servesim.costs.kv_memory import (
    RESERVE,
    UTILISATION,
    MemoryBudget,
    ModelMemory,
    device_memory,
    memory_of_profile,
)
from servesim.costs.model_arithmetic import MODELS, model_of
from servesim.costs.public_models import find_device
from servesim.files.checked import ByteSize, Keys, PositiveInt, expected_error, format_bytes
from servesim.files.read import quote

Dtype = Literal["float64", "float32", "float16", "bfloat16", "float8", "int8"]


class ModelSizes(Keys):
    """The dimensions of a model, as in its config.json of Hugging Face."""

    layers: PositiveInt = Field(description="num_hidden_layers")
    hidden: PositiveInt = Field(description="hidden_size")
    heads: PositiveInt = Field(description="num_attention_heads")
    kv_heads: Optional[PositiveInt] = Field(None, description="num_key_value_heads (default: heads)")
    head_size: Optional[PositiveInt] = Field(None, description="head_dim (default: hidden / heads)")
    intermediate: PositiveInt = Field(description="intermediate_size")
    vocab: PositiveInt = Field(description="vocab_size")
    dtype: Dtype = Field("bfloat16", description="data type of the weights and of the KV cache")
    kv_dtype: Optional[Dtype] = Field(None, description="data type of the KV cache, if it is another one")
    weights: Optional[ByteSize] = Field(None, description="bytes of the weights (default: from the dimensions)")

    def memory(self) -> ModelMemory:
        """Return the bytes of the weights, and of the KV cache of one token."""
        sizes = {**self.model_dump(), "name": "the model", "head": self.head_size}
        memory = memory_of_profile({"model": sizes, "dtype": self.dtype, "kv_dtype": self.kv_dtype})
        assert memory is not None, "the data types are those of a Literal"
        return memory._replace(weights=self.weights or memory.weights, per_token=max(1, memory.per_token))


def parse_model(model: Any, inner: ValidatorFunctionWrapHandler) -> Any:
    """Return the sizes of a model, or its name. Without this, an error in the sizes says that a name was expected."""
    return ModelSizes.model_validate(model) if isinstance(model, Mapping) else inner(model)


ModelKey = Annotated[Union[str, ModelSizes], WrapValidator(parse_model)]


def about_profile(profile: Any) -> Mapping[str, Any]:
    """Return the description in a profile; it is empty for costs in a scenario."""
    return load_about(json.dumps(profile, sort_keys=True))


@lru_cache(maxsize=64)  # a sweep checks thousands of scenarios with the same profile
def load_about(profile: str) -> Mapping[str, Any]:
    return load_profile(json.loads(profile)).about


def size_of_device(value: Any) -> Any:
    """Return the memory of a device that is named, such as H200; other values unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1].isdigit():
        return value
    try:
        return find_device(value).memory
    except BadInput:
        raise expected_error("a size such as 80GB, or the name of a device (`sim models`)") from None


DeviceMemory = Annotated[ByteSize, BeforeValidator(size_of_device, json_schema_input_type=Union[int, str])]


def memory_budget(engine: Any, profile: Any) -> MemoryBudget:
    """Return how an engine with `device_memory` divides it; `profile` is that of the scenario."""
    utilisation = UTILISATION if engine.gpu_memory_utilization is None else engine.gpu_memory_utilization
    reserve = RESERVE if engine.reserve is None else engine.reserve
    return MemoryBudget(
        engine.device_memory, utilisation, model_memory(engine.model, profile), reserve, engine.block_size,
        engine.kv_cache_groups,
    )  # fmt: skip


def known_memory(model: Union[str, ModelSizes, None], profile: Any) -> Optional[ModelMemory]:
    """Return the memory of a model, by default of the one that the profile was measured with; None: not known."""
    if isinstance(model, ModelSizes):
        return model.memory()
    return memory_of_profile(about_profile(profile) if model is None else {"model": model})


def model_memory(model: Union[str, ModelSizes, None], profile: Any) -> ModelMemory:
    """Return the memory of a model that must be known."""
    memory, sizes = known_memory(model, profile), "its sizes: {layers, hidden, heads, kv_heads, intermediate, vocab}"
    if memory is not None:
        return memory
    if model is not None:
        raise BadInput(f"engine.model: expected one of {', '.join(MODELS)}, or {sizes}, got {quote(model)}")
    raise BadInput(
        f"engine.model: expected a model for device_memory or host_cache, the profile names none; or {sizes}"
    )


def kv_bytes(model: Union[str, ModelSizes, None], profile: Any) -> int:
    """Return the bytes of the KV of one token, on all devices of a replica."""
    if model is not None:
        return model_memory(model, profile).per_token
    about = about_profile(profile)
    memory = memory_of_profile({**about, "pipeline_parallel": 1})
    if memory is None:
        raise BadInput("cluster.transfer.token_bytes: expected bytes, the profile names no model")
    return int(about.get("tensor_parallel") or 1) * memory.per_token


def model_layers(model: Union[str, ModelSizes, None], profile: Any) -> int:
    """Return the layers of a model, by default of that of the profile."""
    if isinstance(model, ModelSizes):
        return model.layers
    known = model_of(about_profile(profile)) if model is None else MODELS.get(model)
    if known is None:
        raise BadInput("cluster.transfer.layerwise: expected a model with known layers, the profile names none")
    return known.layers


def host_copy_times(engine: Any, profile: Any) -> tuple[float, float]:
    """Return the seconds of a step that copies blocks from the host cache, and those of each block."""
    block_bytes = engine.block_size * model_memory(engine.model, profile).in_block(engine.kv_cache_groups)
    return engine.host_cache.latency, block_bytes / engine.host_cache.bandwidth


def blocks_of(engine: Any, profile: Any) -> int:
    """Return the KV blocks of an engine with `device_memory`. The result may also be given as `num_blocks`."""
    budget = memory_budget(engine, profile)
    if budget.blocks < 1:
        raise BadInput(f"engine.device_memory: no KV block fits: {describe_budget(budget)}")
    if budget.blocks > MAX_INT:
        raise BadInput(f"engine.device_memory: expected at most {MAX_INT} KV blocks, got {describe_budget(budget)}")
    if "num_blocks" in engine.model_fields_set and engine.num_blocks != budget.blocks:
        raise BadInput(
            f"engine.num_blocks: expected one of num_blocks and device_memory, got both; device_memory gives "
            f"{budget.blocks} blocks, num_blocks is {engine.num_blocks}"
        )
    return budget.blocks


def describe_budget(budget: MemoryBudget) -> str:
    """Return how the number of KV blocks was computed, as one line."""
    groups = f" in {len(budget.groups)} groups" if budget.groups and len(budget.groups) > 1 else ""
    return (
        f"{budget.blocks:,} KV blocks of {format_bytes(budget.block_bytes)}{groups}: {budget.utilisation:g} * "
        f"{format_bytes(budget.device)} - {format_bytes(budget.model.weights)} weights of {budget.model.name} - "
        f"{format_bytes(budget.reserve)} reserve"
    )


def blocks_of_device(
    about: Mapping[str, Any], block_size: int, groups: Optional[list[Optional[int]]] = None
) -> Optional[MemoryBudget]:
    """Return the budget of a profile's device and model, None if one of them is not known; `groups`: not its own."""
    memory, model = device_memory(about), memory_of_profile(about)
    if memory is None or model is None:
        return None
    return MemoryBudget(memory, UTILISATION, model, RESERVE, block_size, model.groups if groups is None else groups)


def groups_of_model(engine: Any, profile: Any) -> Optional[list[Optional[int]]]:
    """Return the KV cache groups of the model, None if all its layers have full attention or it is not known."""
    memory = None
    with suppress(BadInput):  # an unknown profile is reported where it is needed
        memory = known_memory(engine.model, profile)
    return None if memory is None or memory.groups == (None,) else list(memory.groups)
