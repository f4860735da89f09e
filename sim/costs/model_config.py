"""The model of a profile as users name it: a name, or the config.json of a Hugging Face model with its sizes.

A fit uses the sizes for terms that the samples do not determine, and MFU and MBU need them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional, Union

from servesim.core import BadInput
from servesim.core.limits import MAX_NUMBER
from servesim.files.read import quote, read_json

CONFIG = "config.json"
KEYS = {  # key of a profile -> key of config.json
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
}
MORE_KEYS = {  # of some models; the first key of config.json that is there counts
    "head": ("head_dim",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok",),
}
METHODS = {"mxfp4": "mxfp4", "fp8": "float8"}  # quant_method of config.json -> precision of the weights
PATTERNS = {"gemma2": 2, "gemma3_text": 6}  # kind of model -> the layer with full attention among this many
DEFAULTS = {"num_key_value_heads": "num_attention_heads"}  # without grouped-query attention


def read_model(text: Optional[str]) -> Optional[Union[str, dict[str, Any]]]:
    """Return the key `model` of a profile: a name, or the name and the sizes in a config.json or its folder."""
    path = None if text is None else config_path(text)
    if path is None:
        return text
    tree = read_config(path)
    if isinstance(tree.get("text_config"), Mapping):  # of a model that also reads images
        tree = tree["text_config"]
    name = path.resolve().parent.name if path.name == CONFIG else path.stem
    found = {key: next((own for own in names if tree.get(own)), None) for key, names in MORE_KEYS.items()}
    more = {key: size(tree, own, path) for key, own in found.items() if own is not None}
    sizes = {key: size(tree, own, path) for key, own in KEYS.items()}
    if "experts" in more and tree.get("moe_intermediate_size"):  # else intermediate_size is that of an expert
        sizes["intermediate"] = size(tree, "moe_intermediate_size", path)
    return {"name": name, **sizes, **more, **window_sizes(tree, sizes["layers"])}


def config_path(text: str) -> Optional[Path]:
    """Return the config.json that a user names, itself or its folder; None: the text is the name of a model."""
    path = Path(text) / CONFIG if Path(text).is_dir() else Path(text)
    return path if path.suffix == ".json" else None


def read_config(path: Path) -> Mapping[str, Any]:
    """Return the keys of a config.json."""
    tree = read_json(path)
    if not isinstance(tree, Mapping):
        raise BadInput(f"{path}: expected the config.json of a model, got {quote(tree)}")
    return tree


def stored_precision(path: Path) -> Optional[str]:
    """Return the precision of the weights beside a config.json, None if they are not quantised."""
    tree = read_config(path)
    inner = tree.get("text_config")
    found = tree.get("quantization_config") or (isinstance(inner, Mapping) and inner.get("quantization_config"))
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, Mapping) else found
    if str(method) not in METHODS:
        expected = f"quant_method {' or '.join(METHODS)}, or a precision of your choice"
        raise BadInput(f"{path}: quantization_config: expected {expected}, got {quote(method)}")
    return METHODS[str(method)]


def window_sizes(tree: Mapping[str, Any], layers: int) -> dict[str, int]:
    """Return the sliding window of a model, and which of its layers have full attention; empty without a window."""
    window, kinds = tree.get("sliding_window"), tree.get("layer_types")
    if not isinstance(window, int) or window < 1 or tree.get("use_sliding_window") is False:
        return {}
    if isinstance(kinds, list):
        full = [kind != "sliding_attention" for kind in kinds]
    elif tree.get("use_sliding_window"):
        full = [layer < tree.get("max_window_layers", 0) for layer in range(layers)]
    else:
        every = tree.get("sliding_window_pattern") or PATTERNS.get(str(tree.get("model_type"))) or layers + 1
        full = [(layer + 1) % every == 0 for layer in range(layers)]
    if all(full):
        return {}
    return {"window": window, "full_layers": sum(full), "full_first": int(full[0])}


def model_name(model: Any) -> str:
    """Return the name in the key `model` of a profile."""
    return str(model.get("name") or "") if isinstance(model, Mapping) else str(model or "")


def size(tree: Mapping[str, Any], key: str, path: Path) -> int:
    """Return one size of the model."""
    value = tree.get(key) if key in tree else tree.get(DEFAULTS.get(key, key))
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_NUMBER:
        raise BadInput(f"{path}: {key}: expected a positive whole number, got {quote(value)}")
    return value
