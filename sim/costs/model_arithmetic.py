"""FLOPs and bytes of model calls, from the dimensions of a model like Llama, and the peak of known devices.

Counted are the matrix products and the attention: 2 FLOPs per weight and token, and 4 per pair of query and key, layer
and hidden unit. Masked pairs and padding are not counted. The vocabulary is computed for one token of each row. A call
reads all weights and the KV cache of its rows once, and writes the KV cache of its tokens. Activations, norms and the
embedding are left out: they are small.

The peaks are from the vendors' data sheets (public_devices.py). A profile has them under `peak`, with their source;
`sim calibrate fit` writes those of known devices. Standard library only, Python 3.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from .public_devices import device_of

BYTES_PER_VALUE: dict[str, float] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8": 1, "int8": 1,
    "mxfp4": 17 / 32,  # 4 bits, and 8 bits for each 32 values
}  # fmt: skip
HALF_PRECISION = ("float16", "bfloat16")


@dataclass(frozen=True)
class Model:
    """The dimensions of a model like Llama, dense or with experts."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    context: int  # maximum sequence length, in tokens
    dtype: str = "float32"
    head: int = 0  # size of a head; 0: hidden / heads
    experts: int = 0  # per layer; 0: one dense MLP
    experts_per_token: int = 0
    shared: int = 0  # intermediate size of the expert that every token uses
    window: int = 0  # tokens that layers with a sliding window read; 0: all layers have full attention
    full_layers: int = 0  # with `window`: layers with full attention
    full_first: int = 0  # 1: the first layer is one of them

    @property
    def head_size(self) -> int:
        return self.head or self.hidden // self.heads

    def weights_of_layers(self, experts: float) -> float:
        """Return the weights of all layers if each of them uses this many experts."""
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        router = self.hidden * self.experts
        return self.layers * (attention + router + 3 * self.hidden * (self.intermediate * experts + self.shared))

    @property
    def layer_weights(self) -> int:
        """Weights of the matrices of all layers."""
        return int(self.weights_of_layers(self.experts or 1))

    @property
    def active_weights(self) -> int:
        """Weights of the layers that one token uses."""
        return int(self.weights_of_layers(self.experts_per_token or 1))

    def weights_read(self, tokens: float) -> float:
        """Return the weights that a call with these tokens reads; each token takes its experts at random."""
        if not self.experts:
            return self.weights
        unused = (1 - self.experts_per_token / self.experts) ** tokens
        return self.weights_of_layers(self.experts * (1 - unused)) + self.vocab * self.hidden

    @property
    def weights(self) -> int:
        """Weights that a call reads: those of the layers and of the vocabulary."""
        return self.layer_weights + self.vocab * self.hidden

    @property
    def kv_values(self) -> int:
        """Values in the KV cache of one token."""
        return 2 * self.layers * self.head_size * self.kv_heads

    @property
    def kinds(self) -> list[tuple[Optional[int], int]]:
        """Kinds of layers in the order of their first ones: the window, None for full attention, and their number."""
        kinds = [(self.window or None, self.layers - self.full_layers), (None, self.full_layers)]
        return [kind for kind in (reversed(kinds) if self.full_first else kinds) if kind[1]]

    @property
    def reading_layers(self) -> int:
        """Layers that read all cached tokens. A model with windows only has few tokens outside of them."""
        return self.full_layers or self.layers

    @property
    def window_tokens(self) -> float:
        """The windows of a row, as a number of cached tokens that the other layers read; 0 without such layers."""
        return self.window * (self.layers / self.full_layers - 1) if self.full_layers else 0.0

    @property
    def flops_per_pair(self) -> int:
        """FLOPs of one pair of query and key in all layers that read all tokens."""
        return 4 * self.reading_layers * self.heads * self.head_size

    def flops(self, tokens: int, rows: int, pairs: int) -> int:
        """Return the FLOPs of calls with these tokens, rows and pairs of query and key."""
        return 2 * (self.active_weights * tokens + self.vocab * self.hidden * rows) + self.flops_per_pair * pairs

    def values_moved(self, calls: int, tokens: int, cached: int) -> int:
        """Return the values that calls read and write: weights, cached tokens of their rows, new tokens."""
        return (
            self.weights * calls
            + self.kv_values * cached * self.reading_layers // self.layers
            + self.kv_values * tokens
        )


SIZES = ("layers", "hidden", "heads", "kv_heads", "intermediate", "vocab")
MORE_SIZES = ("head", "experts", "experts_per_token", "shared", "window", "full_layers", "full_first")  # of some models
MODELS = {
    "llama2-7b": Model("llama2-7b", 32, 4096, 32, 32, 11008, 32000, 4096, "bfloat16"),
    "tiny": Model("tiny", 4, 256, 8, 8, 688, 1000, 2048),
    "micro": Model("micro", 2, 64, 4, 4, 176, 256, 512),
}


def model_of(about: Mapping[str, Any]) -> Optional[Model]:
    """Return the model that a profile names or describes, None if its dimensions are not known."""
    model = about.get("model")
    if not isinstance(model, Mapping):
        return MODELS.get(str(model))
    needed = [model.get(name) for name in ("layers", "hidden", "intermediate", "vocab")]
    if not all(isinstance(size, int) and size > 0 for size in needed):
        return None
    sizes = {name: int(model.get(name) or 0) for name in (*SIZES, "context", *MORE_SIZES)}
    sizes["heads"] = sizes["heads"] or 1
    sizes["kv_heads"] = sizes["kv_heads"] or sizes["heads"]
    return Model(name=str(model.get("name", "the model")), dtype=str(model.get("dtype", "float32")), **sizes)


def stored_model(model: Any) -> Any:
    """Return the key `model` of a profile: the name of a known model, else the name and all sizes, if given."""
    if not isinstance(model, Mapping):
        return model
    known, sizes = MODELS.get(str(model.get("name"))), {key: model.get(key) for key in SIZES}
    if None in sizes.values() or (known is not None and sizes == {key: getattr(known, key) for key in SIZES}):
        return model.get("name")
    return {"name": model.get("name"), **sizes, **{key: model[key] for key in MORE_SIZES if model.get(key)}}


def bytes_per_value(about: Mapping[str, Any], model: Model) -> Optional[float]:
    """Return the bytes of a weight: of the type in a profile, else of the model."""
    return BYTES_PER_VALUE.get(str(about.get("dtype") or model.dtype))


class Peak(NamedTuple):
    """What a device can do at best."""

    flops: float  # per second, of dense matrix products
    bandwidth: float  # of its memory, bytes per second
    source: str


def known_peak(about: Mapping[str, Any]) -> Optional[Peak]:
    """Return the peak of the device and data type in a description, None if it is not known."""
    if str(about.get("dtype")) not in HALF_PRECISION:
        return None
    device = device_of(about)
    return None if device is None else Peak(device.flops, device.bandwidth, device.source)


def stored_peak(peak: Optional[Peak]) -> Optional[dict[str, Any]]:
    """Return a peak as the key of a profile."""
    return None if peak is None else peak._asdict()


def peak_of(about: Mapping[str, Any]) -> Optional[Peak]:
    """Return the peak that a profile states."""
    peak = about.get("peak")
    return None if not peak else Peak(float(peak["flops"]), float(peak["bandwidth"]), str(peak.get("source", "")))
