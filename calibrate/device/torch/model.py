"""A Llama over a paged KV cache: one forward pass for prompts, decodes or both, packed into one sequence of tokens.

Its weights are random from a seed, or read from safetensors files in Hugging Face's layout.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from servesim.calibrate.device.backend import Model
from servesim.core import BadInput
from torch.nn.functional import embedding, linear

from .operators import Batch, ReferenceOperators

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
WEIGHT_STD = 0.02  # standard deviation of random weights, as in Llama's initialisation

Source = Callable[[str, int, int], torch.Tensor]  # name in the Hugging Face layout, rows, columns (0: a vector)


@dataclass
class Layer:
    """One decoder layer. Projections with the same input are fused."""

    before_attention: torch.Tensor  # norm, [hidden]
    qkv: torch.Tensor  # [(heads + 2 kv_heads) head_dim, hidden]
    output: torch.Tensor  # [hidden, heads head_dim]
    before_mlp: torch.Tensor  # norm, [hidden]
    gate_up: torch.Tensor  # [2 intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]


@dataclass
class Weights:
    """All weights of a Llama."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: list[Layer]
    norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [vocab, hidden]


class Llama:
    """Weights, operators, result buffers, and the cache [blocks, layers, 2, block_size, kv_heads, head_dim].

    The keys and values of a block are contiguous over all layers, so a swap copies each block once.
    """

    def __init__(self, weights: Weights, operators: ReferenceOperators, cache: torch.Tensor, rows: int) -> None:
        self.weights, self.operators, self.cache = weights, operators, cache
        head = weights.head
        self.logits = head.new_zeros(rows, len(head))
        self.next_tokens = torch.zeros(rows, dtype=torch.int64, device=head.device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values into the cache; return the logits and the most likely token of each row.

        Steps of at most `rows` rows always use the same result buffers, because recorded graphs need fixed memory.
        """
        weights, operators = self.weights, self.operators
        operators.begin(batch)
        residual = embedding(batch.tokens, weights.embedding)
        x = None
        for index, layer in enumerate(weights.layers):
            cache = self.cache[:, index]
            x = operators.norm(x, residual, layer.before_attention)
            queries = operators.rotate(linear(x, layer.qkv), cache, batch)
            x = linear(operators.attend(queries, cache, batch), layer.output)
            x = operators.norm(x, residual, layer.before_mlp)
            x = linear(operators.gate(linear(x, layer.gate_up)), layer.down)
        x = operators.norm(x, residual, weights.norm).index_select(0, batch.last)
        rows = batch.shape.rows
        fits = rows <= len(self.logits)
        logits = self.logits[:rows] if fits else self.logits.new_empty(rows, self.logits.shape[1])
        next_tokens = self.next_tokens[:rows] if fits else self.next_tokens.new_empty(rows)
        torch.mm(x, weights.head.t(), out=logits)
        torch.argmax(logits, dim=1, out=next_tokens)
        return logits, next_tokens


def random_weights(model: Model, device: torch.device, dtype: torch.dtype, seed: int) -> Weights:
    """Return random weights. Equal seed, device type and dtype give equal weights."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(name: str, rows: int, columns: int) -> torch.Tensor:
        if not columns:
            return torch.ones(rows, device=device, dtype=dtype)
        return torch.empty(rows, columns, device=device, dtype=dtype).normal_(0.0, WEIGHT_STD, generator=generator)

    return _assemble(model, draw)


def stored_weights(model: Model, device: torch.device, dtype: torch.dtype, path: str) -> Weights:
    """Read the weights from a safetensors file, or from all safetensors files of a folder."""
    source = Path(path)
    files = [source] if source.is_file() else sorted(source.glob("*.safetensors"))
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors.update(_read(file))
    if not tensors:
        raise BadInput(f"{path}: expected a safetensors file or a folder of them")
    if "lm_head.weight" not in tensors and "model.embed_tokens.weight" in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # tied

    def fetch(name: str, rows: int, columns: int) -> torch.Tensor:
        expected = [rows, columns] if columns else [rows]
        if name not in tensors:
            raise BadInput(f"{path}: {name}: missing, expected shape {expected}")
        if list(tensors[name].shape) != expected:
            raise BadInput(f"{path}: {name}: shape {list(tensors[name].shape)}, model {model.name} expects {expected}")
        return tensors[name].to(device=device, dtype=dtype)

    return _assemble(model, fetch)


def _assemble(model: Model, source: Source) -> Weights:
    queries, kv = model.heads * model.head_size, model.kv_heads * model.head_size
    wide = model.intermediate
    embedding = source("model.embed_tokens.weight", model.vocab, model.hidden)
    layers = []
    for index in range(model.layers):

        def weight(name: str, rows: int, columns: int = 0, prefix: str = f"model.layers.{index}.") -> torch.Tensor:
            return source(prefix + name + ".weight", rows, columns)

        attention = [("q", queries), ("k", kv), ("v", kv)]
        layers.append(
            Layer(
                weight("input_layernorm", model.hidden),
                torch.cat([weight(f"self_attn.{name}_proj", rows, model.hidden) for name, rows in attention]),
                weight("self_attn.o_proj", model.hidden, queries),
                weight("post_attention_layernorm", model.hidden),
                torch.cat([weight(f"mlp.{name}_proj", wide, model.hidden) for name in ("gate", "up")]),
                weight("mlp.down_proj", model.hidden, wide),
            )
        )
    norm = source("model.norm.weight", model.hidden, 0)
    return Weights(embedding, layers, norm, source("lm_head.weight", model.vocab, model.hidden))


def _read(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, memory-mapped: 8 bytes of header length, JSON, then the data."""
    try:
        data: Any = np.memmap(path, np.uint8, mode="c")
        size = int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8 : 8 + size].tobytes())
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: not a safetensors file: {error}") from None
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise BadInput(f"{path}: {name}: type {entry['dtype']}, expected one of {', '.join(DTYPES)}")
        begin, end = entry["data_offsets"]
        piece = torch.from_numpy(data[8 + size + begin : 8 + size + end])
        tensors[name] = piece.view(DTYPES[entry["dtype"]]).view(entry["shape"])
    return tensors
