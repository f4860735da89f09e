"""KV blocks that fit into the memory of a device, by vLLM's rule.

vLLM uses `gpu_memory_utilization` of the device memory. It subtracts the weights and what it measures in a first run:
the peak of the activations, and memory outside of PyTorch. The rest holds KV blocks. Here a reserve stands for the two
measured parts. vLLM printed 7,351 blocks for llama2-7b on an A100 with 80 GB (vllm-project/vllm, pull request 2031), so
its reserve was 1.3 GiB; 1.4 to 3.1 GiB for Llama 3 8B on an H100 (pull request 10511). Large vocabularies, images and
large batches need more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from .model_arithmetic import BYTES_PER_VALUE, MODELS, Model, bytes_per_value, model_of

UTILISATION = 0.9  # vLLM's default of gpu_memory_utilization; 0.92 in its newest versions
RESERVE = 3 * 2**29  # bytes: 1.5 GiB
MIB = 2**20
DEVICE_MEMORY = {  # part of the name of the device -> bytes, as nvidia-smi and npu-smi show them
    "H200": 143_771 * MIB,
    "H100 80GB HBM3": 81_559 * MIB,
    "A100-SXM4-80GB": 81_920 * MIB,
    "910B4": 32_768 * MIB,
}


class ModelMemory(NamedTuple):
    """What a model needs on a device, in bytes."""

    name: str
    weights: int
    per_token: int  # of the KV cache


@dataclass(frozen=True)
class MemoryBudget:
    """How the memory of a device is divided, in bytes."""

    device: int
    utilisation: float
    model: ModelMemory
    reserve: int
    block_size: int  # tokens

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block."""
        return self.model.per_token * self.block_size

    @property
    def cache(self) -> int:
        """Bytes that are left for KV blocks; negative if the model does not fit."""
        return int(self.device * self.utilisation) - self.model.weights - self.reserve

    @property
    def blocks(self) -> int:
        """KV blocks that fit."""
        return max(0, self.cache // self.block_bytes)


def memory_of(model: Model, dtype: Optional[str] = None) -> Optional[ModelMemory]:
    """Return the memory of a Llama model: its matrices, and embeddings at both ends. None: unknown data type."""
    size = BYTES_PER_VALUE.get(dtype or model.dtype)
    if size is None:
        return None
    return ModelMemory(model.name, size * (model.weights + model.vocab * model.hidden), size * model.kv_values)


def memory_of_profile(about: Mapping[str, Any]) -> Optional[ModelMemory]:
    """Return the memory of the model that a profile was measured with, None if it is not known."""
    model = model_of(about)
    if model is None or bytes_per_value(about, model) is None:
        return None
    return memory_of(model, str(about.get("dtype") or model.dtype))


def memory_of_name(name: str) -> Optional[ModelMemory]:
    """Return the memory of a model with a known name."""
    return memory_of(MODELS[name]) if name in MODELS else None


def device_memory(about: Mapping[str, Any]) -> Optional[int]:
    """Return the memory of a profile's device: its key `device_memory`, or that of a known device."""
    if about.get("device_memory"):
        return int(about["device_memory"])
    device = str(about.get("device"))
    return next((size for name, size in DEVICE_MEMORY.items() if name in device), None)
