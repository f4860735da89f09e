"""The weights of a MindFormers Llama: random (equal on every machine), or read from a checkpoint."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import Any

from servesim.calibrate.device.worker import first_line
from servesim.core import BadInput

SUFFIXES = (".ckpt", ".safetensors")


def fill_random(ms: Any, net: Any) -> None:
    """Set random weights in a network."""
    for parameter in net.get_parameters():
        if not parameter.name.endswith("_cache"):
            parameter.set_data(ms.Tensor(random_weight(parameter.name, parameter.shape), parameter.dtype))


def random_weight(name: str, shape: Sequence[int]) -> Any:
    """Return a random weight that depends only on its name and shape, scaled so that logits are near 1."""
    import numpy as np

    if len(shape) == 1:
        return np.ones(shape, np.float32)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    scale = 1.0 if "embedding" in name else shape[-1] ** -0.5
    return rng.standard_normal(shape, np.float32) * np.float32(scale)


def read_checkpoint(ms: Any, mindformers: Any, net: Any, path: str) -> None:
    """Fill a network from a MindSpore checkpoint, or from safetensors with MindFormers' or Hugging Face's names."""
    files = [path]
    if os.path.isdir(path):
        files = [os.path.join(path, name) for name in sorted(os.listdir(path)) if name.endswith(SUFFIXES)]
    weights: dict[str, Any] = {}
    for file in files:
        kind = "safetensors" if file.endswith(".safetensors") else "ckpt"
        try:
            weights.update(ms.load_checkpoint(file, format=kind))
        except (ValueError, TypeError, OSError, RuntimeError) as error:
            raise BadInput(f"weights: cannot read {file}: {first_line(error)}") from error
    if any(".self_attn." in name for name in weights):
        weights = {mindformers.LlamaForCausalLM.convert_name(name): value for name, value in weights.items()}
    missing, _ = ms.load_param_into_net(net, weights)
    missing = [name for name in missing if not name.endswith("_cache")]
    if missing:
        raise BadInput(f"weights: {path} lacks {len(missing)} of the model's parameters, for example {missing[0]}")
