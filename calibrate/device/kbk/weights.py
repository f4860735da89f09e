"""The weights of a MindFormers Llama: random ones that are the same everywhere, or those of a checkpoint."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import Any

from servesim.calibrate.device.worker import first_line
from servesim.core import BadInput

KINDS = (".ckpt", ".safetensors")


def fill(ms: Any, net: Any) -> None:
    """Give a network its random weights."""
    for parameter in net.get_parameters():
        if not parameter.name.endswith("_cache"):
            parameter.set_data(ms.Tensor(random_weight(parameter.name, parameter.shape), parameter.dtype))


def random_weight(name: str, shape: Sequence[int]) -> Any:
    """Return a weight that depends on its name and shape alone: scores come out near 1, and the same everywhere."""
    import numpy as np

    if len(shape) == 1:
        return np.ones(shape, np.float32)
    chance = np.random.default_rng(zlib.crc32(name.encode()))
    scale = 1.0 if "embedding" in name else shape[-1] ** -0.5
    return chance.standard_normal(shape, np.float32) * np.float32(scale)


def read(ms: Any, mindformers: Any, net: Any, path: str) -> None:
    """Fill a network from a MindSpore checkpoint, or from safetensors with MindFormers' or Hugging Face's names."""
    files = [path]
    if os.path.isdir(path):
        files = [os.path.join(path, name) for name in sorted(os.listdir(path)) if name.endswith(KINDS)]
    found: dict[str, Any] = {}
    for file in files:
        kind = "safetensors" if file.endswith(".safetensors") else "ckpt"
        try:
            found.update(ms.load_checkpoint(file, format=kind))
        except (ValueError, TypeError, OSError, RuntimeError) as error:
            raise BadInput(f"weights: cannot read {file}: {first_line(error)}") from error
    if any(".self_attn." in name for name in found):
        found = {mindformers.LlamaForCausalLM.convert_name(name): value for name, value in found.items()}
    missing, _ = ms.load_param_into_net(net, found)
    missing = [name for name in missing if not name.endswith("_cache")]
    if missing:
        raise BadInput(f"weights: {path} lacks {len(missing)} of the model's parameters, {missing[0]} for one")
