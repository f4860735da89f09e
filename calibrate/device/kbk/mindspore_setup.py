"""What the kbk backend needs of MindSpore and MindFormers: imports, device name, weights, and the selection of tokens.

Functions get the modules as arguments, so that this file can be imported without them. Weights are random (equal on
every machine), or read from a checkpoint. Tokens are selected on the host, or on the device with `ops` or `mint`.
"""

from __future__ import annotations

import os
import platform
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Optional

import numpy as np
from servesim.calibrate.device.worker import first_line
from servesim.core import BadInput

INSTALL = "pip install mindspore==2.9.0 mindformers==1.9.0 'numpy<2'"
SUFFIXES = (".ckpt", ".safetensors")
VARIANTS = ("host", "ops", "mint")  # of token selection; the first one is the default


def frameworks() -> tuple[Any, Any]:
    """Import mindspore and mindformers without log output; if that fails, raise BadInput with the fix."""
    os.environ.setdefault("GLOG_v", "3")
    try:
        import mindformers
        import mindspore
    except ImportError as error:
        raise BadInput(
            f"kbk: {sys.executable} cannot import mindspore and mindformers ({first_line(error)}); "
            f"install them there ({INSTALL}), or name another interpreter with --worker-python"
        ) from error
    return mindspore, mindformers


@contextmanager
def environment(**variables: Optional[str]) -> Iterator[None]:
    """Set or remove environment variables temporarily. MindFormers reads its mode from them when it builds a model."""
    previous = {name: os.environ.get(name) for name in variables}
    set_variables(variables)
    try:
        yield
    finally:
        set_variables(previous)


def set_variables(variables: dict[str, Optional[str]]) -> None:
    """Set environment variables, or remove those that are None."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def device_name(ms: Any, device: str) -> str:
    """Return a readable device name."""
    if device == "Ascend":
        return str(ms.hal.get_device_name(0))
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return f"CPU {names[0] if names else platform.machine()} x {os.cpu_count()}"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect step times."""
    packages = {name: version(name) for name in ("mindspore", "mindformers", "numpy")}
    return {"python": platform.python_version(), **packages}


def fill_random(ms: Any, net: Any) -> None:
    """Set random weights in a network."""
    for parameter in net.get_parameters():
        if not parameter.name.endswith("_cache"):
            parameter.set_data(ms.Tensor(random_weight(parameter.name, parameter.shape), parameter.dtype))


def random_weight(name: str, shape: Sequence[int]) -> Any:
    """Return a random weight that depends only on its name and shape, scaled so that logits are near 1."""
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


def supported_variants(device: str) -> tuple[str, ...]:
    """Return the variants that a device has operators for. MindSpore has no CPU kernel for mint.argmax."""
    return tuple(variant for variant in VARIANTS if variant != "mint" or device != "CPU")


def check_variant(variant: str, device: str) -> None:
    """Raise BadInput if a device has no operator for a variant."""
    if variant not in supported_variants(device):
        raise BadInput(
            f"sampling: mint has no operator on a {device} (MindSpore has mint.argmax for Ascend only), "
            f"expected one of {', '.join(supported_variants(device))}"
        )


def select_tokens(ms: Any, variant: str, logits: Any) -> Any:
    """Return the most likely token of each row of a logits tensor as a numpy array; only tokens leave the device."""
    if variant == "host":
        return logits.asnumpy().argmax(-1)
    operators = ms.mint if variant == "mint" else ms.ops
    return operators.argmax(logits, dim=-1).asnumpy()
