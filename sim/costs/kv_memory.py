"""KV blocks that fit into the memory of a device, by vLLM's rule.

vLLM uses `gpu_memory_utilization` of the device memory. It subtracts the weights and what it measures in a first run:
the peak of the activations, and memory outside of PyTorch. The rest holds KV blocks. Here a reserve stands for the two
measured parts. vLLM printed 7,351 blocks for llama2-7b on an A100 with 80 GB (vllm-project/vllm, pull request 2031), so
its reserve was 1.3 GiB; 1.4 to 3.1 GiB for Llama 3 8B on an H100 (pull request 10511). Large vocabularies, images and
large batches need more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from .model_arithmetic import BYTES_PER_VALUE, Model, model_of
from .public_devices import device_of

UTILISATION = 0.9  # vLLM's default of gpu_memory_utilization; 0.92 in its newest versions
RESERVE = 3 * 2**29  # bytes: 1.5 GiB


class ModelMemory(NamedTuple):
    """What a model needs on a device, in bytes."""

    name: str
    weights: int
    per_token: int  # of the KV cache, all layers
    groups: tuple[Optional[int], ...] = (None,)  # KV cache groups: the window of each, None for full attention
    per_group: int = 0  # of the KV cache of one token in the layers of one group

    def in_block(self, groups: Optional[Sequence[Optional[int]]]) -> int:
        """Return the bytes of a token in a block, which has the layers of one group; None: one group has all layers."""
        if not groups or len(groups) == 1:
            return self.per_token
        return self.per_group if tuple(groups) == self.groups else -(-self.per_token // len(groups))


def cache_groups(kinds: Sequence[tuple[Optional[int], int]]) -> tuple[tuple[Optional[int], ...], int]:
    """Return the window of each KV cache group and the layers of a group, by vLLM's rule.

    `kinds`: windows and layers, in the order of their first layers. All groups have as many layers as the smallest
    kind; if no kind has 1.5 times as many, as the largest one.
    """
    numbers = [layers for _, layers in kinds]
    size = max(numbers) if max(numbers) < 1.5 * min(numbers) else min(numbers)
    return tuple(window for window, layers in kinds for _ in range(-(-layers // size))), size


@dataclass(frozen=True)
class MemoryBudget:
    """How the memory of a device is divided, in bytes."""

    device: int
    utilisation: float
    model: ModelMemory
    reserve: int
    block_size: int  # tokens
    groups: Optional[Sequence[Optional[int]]] = None  # KV cache groups that share the blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block."""
        return self.model.in_block(self.groups) * self.block_size

    @property
    def cache(self) -> int:
        """Bytes that are left for KV blocks; negative if the model does not fit."""
        return int(self.device * self.utilisation) - self.model.weights - self.reserve

    @property
    def blocks(self) -> int:
        """KV blocks that fit."""
        return max(0, self.cache // self.block_bytes)


def memory_of(
    model: Model, dtype: Optional[str] = None, kv_dtype: Optional[str] = None, degree: int = 1, stages: int = 1
) -> Optional[ModelMemory]:
    """Return the memory of a model on each device: its matrices, and embeddings at both ends. None: unknown data type.

    Tensor parallelism divides the heads of the KV cache, as long as each device has one. Pipeline parallelism divides
    the layers; the device with most of them counts, and one end of the model has the embeddings.
    """
    size = BYTES_PER_VALUE.get(dtype or model.dtype)
    kv_size = BYTES_PER_VALUE.get(kv_dtype or dtype or model.dtype)
    if size is None or kv_size is None:
        return None
    share, embeddings = -(-model.layers // stages) / model.layers, model.vocab * model.hidden
    values = model.weights + embeddings if stages == 1 else (model.weights - embeddings) * share + embeddings
    weights = int(size * values) // degree
    per_token = int(kv_size * model.kv_values * share) // min(degree, model.kv_heads)
    groups, layers = cache_groups(model.kinds)
    return ModelMemory(model.name, weights, per_token, groups, per_token * layers // model.layers)


def memory_of_profile(about: Mapping[str, Any]) -> Optional[ModelMemory]:
    """Return the memory of a profile's model, None if it is not known."""
    model, kv_dtype = model_of(about), about.get("kv_dtype")
    if model is None:
        return None
    degree, stages = (int(about.get(key) or 1) for key in ("tensor_parallel", "pipeline_parallel"))
    return memory_of(model, str(about.get("dtype") or model.dtype), kv_dtype, degree, stages)


def device_memory(about: Mapping[str, Any]) -> Optional[int]:
    """Return the memory of a profile's device: its key `device_memory`, or that of a known device."""
    if about.get("device_memory"):
        return int(about["device_memory"])
    device = device_of(about)
    return None if device is None else device.memory
