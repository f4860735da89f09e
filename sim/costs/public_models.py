"""Dimensions of public models, from their config.json on Hugging Face, and how users name models and devices."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

from servesim.core import BadInput
from servesim.files.read import quote

from .model_arithmetic import MODELS, MORE_SIZES, SIZES, Model
from .public_devices import DEVICES, Device, device_of

HALF = "bfloat16"
ALIASES = {"A100": "A100-80GB", "A100-SXM": "A100-80GB", "H100-SXM": "H100", "RTX-A6000": "A6000"}
# Name on Hugging Face, for commands of servers; of a chat model if there is one. Then layers, hidden, heads, kv_heads,
# intermediate, vocab, context; head size (if not hidden / heads), experts, experts per token, intermediate size of a
# shared expert, tokens of the sliding window, layers with full attention beside those with the window
TABLE: dict[str, tuple[str, tuple[int, ...]]] = {
    "llama-2-13b": ("meta-llama/Llama-2-13b-chat-hf", (40, 5120, 40, 40, 13824, 32000, 4096)),
    "llama-2-70b": ("meta-llama/Llama-2-70b-chat-hf", (80, 8192, 64, 8, 28672, 32000, 4096)),
    "codellama-34b": ("codellama/CodeLlama-34b-Instruct-hf", (48, 8192, 64, 8, 22016, 32000, 16384)),
    "llama-3-8b": ("meta-llama/Meta-Llama-3-8B-Instruct", (32, 4096, 32, 8, 14336, 128256, 8192)),
    "llama-3-70b": ("meta-llama/Meta-Llama-3-70B-Instruct", (80, 8192, 64, 8, 28672, 128256, 8192)),
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B-Instruct", (32, 4096, 32, 8, 14336, 128256, 131072)),
    "llama-3.1-70b": ("meta-llama/Llama-3.1-70B-Instruct", (80, 8192, 64, 8, 28672, 128256, 131072)),
    "llama-3.3-70b": ("meta-llama/Llama-3.3-70B-Instruct", (80, 8192, 64, 8, 28672, 128256, 131072)),
    "llama-4-scout": (
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        (48, 5120, 40, 8, 8192, 202048, 10485760, 128, 16, 1, 8192),
    ),
    "qwen2.5-3b": ("Qwen/Qwen2.5-3B-Instruct", (36, 2048, 16, 2, 11008, 151936, 32768)),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B-Instruct", (28, 3584, 28, 4, 18944, 152064, 32768)),
    "qwen2.5-14b": ("Qwen/Qwen2.5-14B-Instruct", (48, 5120, 40, 8, 13824, 152064, 32768)),
    "qwen2.5-32b": ("Qwen/Qwen2.5-32B-Instruct", (64, 5120, 40, 8, 27648, 152064, 32768)),
    "qwen2.5-72b": ("Qwen/Qwen2.5-72B-Instruct", (80, 8192, 64, 8, 29568, 152064, 32768)),
    "qwen3-4b": ("Qwen/Qwen3-4B", (36, 2560, 32, 8, 9728, 151936, 40960, 128)),
    "qwen3-8b": ("Qwen/Qwen3-8B", (36, 4096, 32, 8, 12288, 151936, 40960, 128)),
    "qwen3-14b": ("Qwen/Qwen3-14B", (40, 5120, 40, 8, 17408, 151936, 40960, 128)),
    "qwen3-32b": ("Qwen/Qwen3-32B", (64, 5120, 64, 8, 25600, 151936, 40960, 128)),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B", (48, 2048, 32, 4, 768, 151936, 40960, 128, 128, 8)),
    "mistral-7b": ("mistralai/Mistral-7B-Instruct-v0.3", (32, 4096, 32, 8, 14336, 32000, 32768)),
    "mistral-nemo": ("mistralai/Mistral-Nemo-Instruct-2407", (40, 5120, 32, 8, 14336, 131072, 131072, 128)),
    "mixtral-8x7b": ("mistralai/Mixtral-8x7B-Instruct-v0.1", (32, 4096, 32, 8, 14336, 32000, 32768, 0, 8, 2)),
    "mixtral-8x22b": ("mistralai/Mixtral-8x22B-Instruct-v0.1", (56, 6144, 48, 8, 16384, 32768, 65536, 0, 8, 2)),
    "gpt-oss-20b": ("openai/gpt-oss-20b", (24, 2880, 64, 8, 2880, 201088, 131072, 64, 32, 4, 0, 128, 12)),
    "gpt-oss-120b": ("openai/gpt-oss-120b", (36, 2880, 64, 8, 2880, 201088, 131072, 64, 128, 4, 0, 128, 18)),
}
QUANTISED = {"gpt-oss-20b": "mxfp4", "gpt-oss-120b": "mxfp4"}  # published with weights of less than 16 bits
COLUMNS = (*SIZES, "context", *MORE_SIZES)
PUBLIC_MODELS = {
    **MODELS,
    **{name: Model(name=name, dtype=HALF, **dict(zip(COLUMNS, sizes))) for name, (_, sizes) in TABLE.items()},
}
HUB = {"llama2-7b": "meta-llama/Llama-2-7b-chat-hf", **{name: full for name, (full, _) in TABLE.items()}}


def plain_name(name: str) -> str:
    """Return the letters and digits of a name, without the organisation and `Meta`."""
    plain = re.sub("[^a-z0-9]", "", name.lower().rsplit("/", 1)[-1])
    return plain[4:] if plain.startswith("meta") else plain


def hub_name(name: str) -> str:
    """Return the name of a model as on Hugging Face; one that is not known, or has an organisation, as it is."""
    known = {plain_name(short): full for short, full in HUB.items()}
    return name if "/" in name else known.get(plain_name(name), name)


def find_model(name: str, where: str = "model") -> Model:
    """Return the public model with this name; organisation, capitals and what follows the size do not matter."""
    plain = plain_name(name)
    found = [known for known in PUBLIC_MODELS if plain.startswith(plain_name(known))]
    if not found:
        nearest = nearest_names(name.rsplit("/", 1)[-1], PUBLIC_MODELS)
        raise BadInput(f"{where}: expected a known model or its config.json, got {quote(name)}; {nearest}")
    return PUBLIC_MODELS[max(found, key=len)]


def find_device(name: str, where: str = "device") -> Device:
    """Return the device with this name; capitals, spaces and dashes do not matter. A100 is the one with 80 GB."""
    known = {plain_name(key): DEVICES[device] for key, device in {**{key: key for key in DEVICES}, **ALIASES}.items()}
    found = known.get(plain_name(name)) or device_of({"device": name})
    if found is None:
        raise BadInput(f"{where}: expected a known device, got {quote(name)}; {nearest_names(name, DEVICES)}")
    return found


def alias_note(name: str) -> str:
    """Return which device an alias stands for, an empty text for a device's own name."""
    found = next((device for alias, device in ALIASES.items() if plain_name(alias) == plain_name(name)), None)
    return f"device {name}: {found}; `sim models` lists others" if found else ""


def nearest_names(name: str, known: Iterable[str]) -> str:
    """Return the three nearest names, and where all are."""
    nearest = sorted(known, key=lambda other: -SequenceMatcher(None, plain_name(name), plain_name(other)).ratio())[:3]
    return f"nearest: {', '.join(nearest)}; `sim models` lists all"
