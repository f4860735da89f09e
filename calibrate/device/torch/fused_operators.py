"""The operators of a paged Llama for CUDA. The graph shape alone fixes their few launches, so graphs can hold them."""

from __future__ import annotations

import math
from math import gcd
from typing import Any, NamedTuple, Optional

import torch
import triton
from servesim.calibrate.device.backend import Model

from . import triton_kernels as gpu_kernels
from .operators import EPSILON, Batch, ReferenceOperators
from .packing import PIECE_INTEGERS, align

kernels: Any = gpu_kernels  # Triton launches a kernel by subscript, which has no type


class Launch(NamedTuple):
    """Launch parameters of the attention kernel."""

    lanes: int  # queries x heads per tile
    keys: int  # keys per loop iteration
    warps: int
    stages: int  # depth of the pipeline that loads keys and values
    resident: int  # programs per multiprocessor


class FusedOperators(ReferenceOperators):
    """The same operators with one or two launches each. The host decides nothing during a step."""

    tiles = Launch(lanes=64, keys=64, warps=4, stages=3, resident=2)
    splits = Launch(lanes=16, keys=64, warps=2, stages=3, resident=4)  # 16: the minimum rows of a matrix product

    def __init__(self, model: Model, block_size: int, device: torch.device, split: int = 256) -> None:
        super().__init__(model, block_size, device)
        group = model.heads // model.kv_heads
        self.tile, self.max_units = self.tiles.lanes // group, split // self.splits.keys
        self.max_splits = -(-model.context // split)  # per row
        self.splits = self.splits._replace(lanes=max(self.splits.lanes, triton.next_power_of_2(group)))
        self.scale = math.log2(math.e) / math.sqrt(self.head_dim)
        self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count

    def begin(self, batch: Batch) -> None:
        """Cut the contexts of one-token rows into splits. All layers use the same splits."""
        shape = batch.shape
        if not shape.singles:
            return
        offsets = align(shape.rows + 1)
        plan = batch.ints.new_empty(4 + offsets + shape.rows * self.max_splits * PIECE_INTEGERS)
        self.plan = plan[:1], plan[4 : 4 + offsets], plan[4 + offsets :]
        kernels.plan_kernel[(1,)](
            batch.singles, batch.tables, batch.positions, *self.plan, shape.rows,
            ROWS=max(512, triton.next_power_of_2(shape.rows + 1)), UNIT=self.splits.keys, MOST=self.max_units,
            PIECE=PIECE_INTEGERS,
        )  # fmt: skip

    def norm(self, x: Optional[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        tokens, width = residual.shape
        out = torch.empty_like(residual)
        span = triton.next_power_of_2(width)
        kernels.norm_kernel[(tokens,)](
            x, residual, weight, out, width, EPSILON, ADD=x is not None, WIDTH=span, num_warps=8 if span > 1024 else 2
        )
        return out

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        tokens, width = len(x), x.shape[1] // 2
        out = x.new_empty(tokens, width)
        kernels.gate_kernel[(tokens, triton.cdiv(width, 1024))](x, out, width, WIDTH=1024)
        return out

    def rotate(self, qkv: torch.Tensor, cache: torch.Tensor, batch: Batch) -> torch.Tensor:
        model = self.model
        group = gcd(8, gcd(model.heads, model.kv_heads))
        grid = (len(qkv), (model.heads + 2 * model.kv_heads) // group)
        kernels.rotate_kernel[grid](
            qkv, cache, self.cos, self.sin, batch.positions, batch.slots, cache.stride(0), cache.stride(1),
            HEADS=model.heads, KV_HEADS=model.kv_heads, DIM=self.head_dim, PAGE=self.block_size, GROUP=group,
        )  # fmt: skip
        return qkv

    def attend(self, queries: torch.Tensor, cache: torch.Tensor, batch: Batch) -> torch.Tensor:
        heads, shape = self.model.heads, batch.shape
        out = queries.new_empty(shape.tokens, heads * self.head_dim)
        if shape.tiles:
            self._launch(self.tiles, False, queries, cache, out, out, out, out, batch.ints, batch.pieces, batch.tiles)
        if shape.singles:
            capacity = shape.rows * self.max_splits
            part = queries.new_empty(capacity, heads, self.head_dim, dtype=torch.float32)
            top, total = queries.new_empty(2, capacity, heads, dtype=torch.float32)
            count, first, pieces = self.plan
            self._launch(self.splits, True, queries, cache, out, part, top, total, batch.ints, pieces, count)
            kernels.merge_kernel[(shape.rows, heads)](
                part, top, total, out, first, HEADS=heads, DIM=self.head_dim, num_warps=1
            )
        return out

    def _launch(
        self, launch: Launch, split: bool, queries: torch.Tensor, cache: torch.Tensor, *rest: torch.Tensor
    ) -> None:
        model = self.model
        kernels.attend_kernel[(launch.resident * self.multiprocessors,)](
            queries, cache, *rest, self.scale, queries.stride(0), cache.stride(0), cache.stride(1),
            HEADS=model.heads, KV_HEADS=model.kv_heads, DIM=self.head_dim, PAGE=self.block_size, PIECE=PIECE_INTEGERS,
            BLOCK_M=launch.lanes, BLOCK_N=launch.keys, SPLIT=split, num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
