"""The operators of a paged Llama in plain torch: used on the CPU, and as reference for the fused operators."""

from __future__ import annotations

import math
from typing import Optional

import torch
import torch.nn.functional as functional
from servesim.calibrate.device.backend import Model

from .packing import HEADER, PIECE_INTEGERS, GraphShape

EPSILON = 1e-5  # of the norms, as in Llama 2
THETA = 10000.0  # base of the rotary wavelengths


class Batch:
    """The integers of a packed step on the device, as views."""

    def __init__(self, shape: GraphShape, ints: torch.Tensor) -> None:
        self.shape, self.ints = shape, ints
        self.tiles, self.singles = ints[:1], ints[1:2]  # counts
        self.tokens = ints[HEADER : HEADER + shape.tokens]
        self.positions = ints[shape.positions : shape.positions + shape.tokens]
        self.slots = ints[shape.slots : shape.slots + shape.tokens]
        self.last = ints[shape.last : shape.last + shape.rows]  # each row's last token
        self.tables = ints[shape.tables : shape.tables + shape.rows]  # offset of each row's block table
        self.pieces = ints[shape.end :]  # the tiles


class ReferenceOperators:
    """Unfused operators. The cache of a layer is [blocks, 2 for keys and values, block_size, kv_heads, head_dim]."""

    tile = 4096  # maximum queries of one row per piece

    def __init__(self, model: Model, block_size: int, device: torch.device) -> None:
        self.model, self.block_size = model, block_size
        self.head_dim = model.head_size
        half = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float64) / self.head_dim
        angles = torch.outer(torch.arange(model.context, device=device, dtype=torch.float64), THETA**-half)
        self.cos, self.sin = angles.cos().float(), angles.sin().float()  # [context, head_dim / 2]

    def begin(self, batch: Batch) -> None:
        """Prepare a step, before its first layer."""

    def norm(self, x: Optional[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Add x to the residual in place and return the residual's RMS norm."""
        if x is not None:
            residual += x
        wide = residual.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
        return (wide * scale).to(residual.dtype) * weight

    def rotate(self, qkv: torch.Tensor, cache: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Rotate queries and keys by position, write keys and values into their slots, return the queries."""
        model = self.model
        heads = qkv.view(len(qkv), -1, self.head_dim)
        queries, keys, values = heads.split_with_sizes([model.heads, model.kv_heads, model.kv_heads], dim=1)
        block, offset = batch.slots.long() // self.block_size, batch.slots.long() % self.block_size
        cache[block, 0, offset] = self._rotate(keys, batch.positions)
        cache[block, 1, offset] = values
        return self._rotate(queries, batch.positions)

    def attend(self, queries: torch.Tensor, cache: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the attention of each query over the cached keys up to its position, [tokens, hidden]."""
        out = torch.zeros_like(queries)
        for table, query, length, position in self._pieces(batch):
            end = position + length
            blocks = batch.ints[table : table - (-end // self.block_size)].long()
            keys, values = cache[blocks].transpose(0, 1).flatten(1, 2)[:, :end]
            out[query : query + length] = self._softmax(queries[query : query + length], keys, values, position)
        return out.flatten(1)

    def _pieces(self, batch: Batch) -> list[list[int]]:
        """Return table, first query, number of queries and first position of each piece of attention work."""
        tiles, singles = int(batch.tiles), int(batch.singles)
        longer: list[list[int]] = batch.pieces[: tiles * PIECE_INTEGERS].view(-1, PIECE_INTEGERS)[:, :4].tolist()
        rows = zip(batch.tables[:singles].tolist(), batch.positions[:singles].tolist())
        return longer + [[table, row, 1, position] for row, (table, position) in enumerate(rows)]

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        """Return silu of the left half times the right half."""
        left, right = x.chunk(2, dim=-1)
        return functional.silu(left) * right

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos[positions.long(), None], self.sin[positions.long(), None]
        left, right = x.float().chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)

    def _softmax(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int) -> torch.Tensor:
        group = self.model.heads // self.model.kv_heads
        keys, values = keys.repeat_interleave(group, 1).float(), values.repeat_interleave(group, 1).float()
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) / math.sqrt(self.head_dim)
        at = position + torch.arange(len(q), device=q.device)
        hidden = torch.arange(len(keys), device=q.device) > at[:, None]
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
