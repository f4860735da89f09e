"""The operators of a paged Llama as Triton kernels: few launches, no host decisions, so that a graph can hold them.

Attention reads keys and values through the block tables. Work comes in pieces (see gpu_pack): programs take pieces in
turn until none is left, so one launch shape serves every batch and the time follows the tokens read.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls, allow-incomplete-defs
# (the bodies of kernels are Triton, not Python: their arguments are pointers and scalars of the device)

from __future__ import annotations

import math
from math import gcd
from typing import NamedTuple, Optional

import torch
import triton
import triton.language as tl

from .backend import Model
from .gpu_pack import PIECE, UNIT
from .gpu_plain import EPSILON, Batch, Plain


@triton.jit
def _norm_kernel(x, residual, weight, out, width, epsilon, ADD: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, WIDTH)
    inside = at < width
    value = tl.load(residual + row + at, mask=inside, other=0.0)
    if ADD:
        value += tl.load(x + row + at, mask=inside, other=0.0)
        tl.store(residual + row + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + epsilon)
    normal = (wide * scale).to(value.dtype) * tl.load(weight + at, mask=inside, other=0.0)
    tl.store(out + row + at, normal, mask=inside)


@triton.jit
def _gate_kernel(x, out, width, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = at < width
    left = tl.load(x + row * 2 * width + at, mask=inside, other=0.0)
    right = tl.load(x + row * 2 * width + width + at, mask=inside, other=0.0)
    wide = left.to(tl.float32)
    tl.store(out + row * width + at, (wide * tl.sigmoid(wide)).to(left.dtype) * right, mask=inside)


@triton.jit
def _rotate_kernel(
    qkv, cache, cos, sin, positions, slots, block_stride, value_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One token, GROUP heads, all of them queries, all keys or all values. Queries are rotated where they stand."""
    token = tl.program_id(0)
    first = tl.program_id(1) * GROUP
    head = first + tl.arange(0, GROUP)[:, None]
    half = tl.arange(0, DIM // 2)[None, :]
    source = qkv + token.to(tl.int64) * (HEADS + 2 * KV_HEADS) * DIM + head * DIM + half
    left, right = tl.load(source), tl.load(source + DIM // 2)
    position = tl.load(positions + token)
    c = tl.load(cos + position * (DIM // 2) + half)
    s = tl.load(sin + position * (DIM // 2) + half)
    wide_left, wide_right = left.to(tl.float32), right.to(tl.float32)
    turned_left = (wide_left * c - wide_right * s).to(left.dtype)
    turned_right = (wide_right * c + wide_left * s).to(left.dtype)
    slot = tl.load(slots + token).to(tl.int64)
    home = cache + slot // PAGE * block_stride + slot % PAGE * (KV_HEADS * DIM) + half
    if first < HEADS:
        tl.store(source, turned_left)
        tl.store(source + DIM // 2, turned_right)
    elif first < HEADS + KV_HEADS:
        target = home + (head - HEADS) * DIM
        tl.store(target, turned_left)
        tl.store(target + DIM // 2, turned_right)
    else:
        target = home + value_stride + (head - HEADS - KV_HEADS) * DIM
        tl.store(target, left)
        tl.store(target + DIM // 2, right)


@triton.jit
def _attend_kernel(
    queries, cache, out, part, part_max, part_sum, ints, header, scale, query_stride, block_stride, value_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, PIECE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Flash attention over pieces x key heads. A row of the tile is a query of one of the heads that share the keys.

    With SPLIT the pieces are parts of a context: unnormalised sums, maxima (base 2) and weights go to part*.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    pieces = tl.load(ints + header)
    pieces_at = tl.load(ints + header + 1)
    lane = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM)
    for work in range(tl.program_id(0), pieces * KV_HEADS, tl.num_programs(0)):
        item = work // KV_HEADS
        kv_head = work % KV_HEADS
        piece = ints + pieces_at + item * PIECE
        table = ints + tl.load(piece)
        first = tl.load(piece + 1)
        length = tl.load(piece + 2)
        position = tl.load(piece + 3)
        begin = tl.load(piece + 4)
        end = tl.load(piece + 5)

        head = kv_head * GROUP + lane % GROUP
        query = lane // GROUP
        live = query < length
        source = queries + (first + query).to(tl.int64)[:, None] * query_stride + head[:, None] * DIM + dim[None, :]
        q = tl.load(source, mask=live[:, None], other=0.0)
        top = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, DIM], tl.float32)
        for start in range(begin, end, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            inside = key < end
            block = tl.load(table + key // PAGE, mask=inside, other=0).to(tl.int64)
            home = block * block_stride + key % PAGE * (KV_HEADS * DIM) + kv_head * DIM
            k = tl.load(cache + home[None, :] + dim[:, None], mask=inside[None, :], other=0.0)
            scores = tl.dot(q, k, input_precision="ieee") * scale
            seen = inside[None, :] & (key[None, :] <= position + query[:, None])
            scores = tl.where(seen, scores, -float("inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(weights, 1)
            v = tl.load(cache + value_stride + home[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
            acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            top = new_top
        if SPLIT:
            place = tl.load(piece + 6) * HEADS + head
            tl.store(part + place[:, None] * DIM + dim[None, :], acc, mask=live[:, None])
            tl.store(part_max + place, top, mask=live)
            tl.store(part_sum + place, total, mask=live)
        else:
            target = out + ((first + query).to(tl.int64)[:, None] * HEADS + head[:, None]) * DIM + dim[None, :]
            tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def _merge_kernel(part, part_max, part_sum, out, first_split, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Put the splits of one row and head together; rows without any are left alone."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.load(first_split + row)
    end = tl.load(first_split + row + 1)
    dim = tl.arange(0, DIM)
    if split < end:
        place = split * HEADS + head
        top = tl.load(part_max + place)
        total = tl.load(part_sum + place)
        acc = tl.load(part + place * DIM + dim)
        for other in range(split + 1, end):
            place = other * HEADS + head
            own = tl.load(part_max + place)
            new_top = tl.maximum(top, own)
            shrink = tl.exp2(top - new_top)
            grow = tl.exp2(own - new_top)
            acc = acc * shrink + tl.load(part + place * DIM + dim) * grow
            total = total * shrink + tl.load(part_sum + place) * grow
            top = new_top
        target = out + (row.to(tl.int64) * HEADS + head) * DIM + dim
        tl.store(target, (acc / total).to(out.dtype.element_ty))


class Launch(NamedTuple):
    """How the attention kernel is launched."""

    lanes: int  # queries x heads of a tile
    keys: int  # keys taken at a time
    warps: int
    stages: int  # depth of the pipeline that fetches keys and values
    resident: int  # programs a multiprocessor holds at a time


class Fused(Plain):
    """The same operators, one or two launches each."""

    name = "fused"
    tiles = Launch(lanes=64, keys=64, warps=4, stages=3, resident=2)
    splits = Launch(lanes=16, keys=UNIT, warps=2, stages=3, resident=4)  # 16: a matrix product has no fewer rows

    def __init__(self, model: Model, block_size: int, device: torch.device, split: int = 256) -> None:
        super().__init__(model, block_size, device)
        group = model.heads // model.kv_heads
        self.tile, self.split = self.tiles.lanes // group, split
        self.splits = self.splits._replace(lanes=max(self.splits.lanes, triton.next_power_of_2(group)))
        self.scale = math.log2(math.e) / math.sqrt(self.head_dim)
        self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count

    def norm(self, x: Optional[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        tokens, width = residual.shape
        out = torch.empty_like(residual)
        span = triton.next_power_of_2(width)
        _norm_kernel[(tokens,)](
            x, residual, weight, out, width, EPSILON, ADD=x is not None, WIDTH=span, num_warps=8 if span > 1024 else 2
        )
        return out

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        tokens, width = len(x), x.shape[1] // 2
        out = x.new_empty(tokens, width)
        _gate_kernel[(tokens, triton.cdiv(width, 1024))](x, out, width, WIDTH=1024)
        return out

    def rotate(self, qkv: torch.Tensor, cache: torch.Tensor, batch: Batch) -> torch.Tensor:
        model = self.model
        together = gcd(8, gcd(model.heads, model.kv_heads))
        grid = (len(qkv), (model.heads + 2 * model.kv_heads) // together)
        _rotate_kernel[grid](
            qkv, cache, self.cos, self.sin, batch.positions, batch.slots, cache.stride(0), cache.stride(1),
            HEADS=model.heads, KV_HEADS=model.kv_heads, DIM=self.head_dim, PAGE=self.block_size, GROUP=together,
        )  # fmt: skip
        return qkv

    def attend(self, queries: torch.Tensor, cache: torch.Tensor, batch: Batch) -> torch.Tensor:
        heads, form = self.model.heads, batch.form
        out = queries.new_empty(form.tokens, heads * self.head_dim)
        if form.tiles:
            self._launch(self.tiles, 0, batch, queries, cache, out, out, out, out)
        if form.splits:
            part = queries.new_empty(form.splits, heads, self.head_dim, dtype=torch.float32)
            top, total = queries.new_empty(2, form.splits, heads, dtype=torch.float32)
            self._launch(self.splits, 2, batch, queries, cache, out, part, top, total)
            first = batch.ints[form.first_split : form.end]
            _merge_kernel[(form.rows, heads)](part, top, total, out, first, HEADS=heads, DIM=self.head_dim, num_warps=1)
        return out

    def _launch(
        self,
        launch: Launch,
        header: int,
        batch: Batch,
        queries: torch.Tensor,
        cache: torch.Tensor,
        *results: torch.Tensor,
    ) -> None:
        """Attend to the pieces named at the header; results are out and the splits' sums, maxima and weights."""
        model = self.model
        _attend_kernel[(launch.resident * self.multiprocessors,)](
            queries, cache, *results, batch.ints, header, self.scale,
            queries.stride(0), cache.stride(0), cache.stride(1),
            HEADS=model.heads, KV_HEADS=model.kv_heads, DIM=self.head_dim, PAGE=self.block_size, PIECE=PIECE,
            BLOCK_M=launch.lanes, BLOCK_N=launch.keys, SPLIT=header > 0,
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
