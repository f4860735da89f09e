"""The kernels of a paged Llama, in Triton.

Attention reads keys and values through the block tables. Its work is a list of pieces of PIECE_INTEGERS integers.
Programs take pieces until none is left, so one launch size serves every batch, and time depends on the keys read.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls, allow-incomplete-defs
# (kernel bodies are Triton code, not Python: their arguments are device pointers and scalars)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_kernel(x, residual, weight, out, width, epsilon, ADD: tl.constexpr, WIDTH: tl.constexpr):
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
def gate_kernel(x, out, width, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = at < width
    left = tl.load(x + row * 2 * width + at, mask=inside, other=0.0)
    right = tl.load(x + row * 2 * width + width + at, mask=inside, other=0.0)
    wide = left.to(tl.float32)
    tl.store(out + row * width + at, (wide * tl.sigmoid(wide)).to(left.dtype) * right, mask=inside)


@triton.jit
def rotate_kernel(
    qkv, cache, cos, sin, positions, slots, block_stride, value_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Process one token and GROUP heads: all queries, all keys or all values. Queries are rotated in place."""
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


@triton.jit(do_not_specialize=["rows"])
def plan_kernel(
    singles, tables, positions, count, first_split, pieces, rows,
    ROWS: tl.constexpr, UNIT: tl.constexpr, MOST: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Cut the contexts of one-token rows into few, even pieces of at most MOST units; the longest come first."""
    row = tl.arange(0, ROWS)
    live = row < tl.load(singles)
    table = tl.load(tables + row, mask=live, other=0)
    end = tl.load(positions + row, mask=live, other=-1) + 1
    units = (end + UNIT - 1) // UNIT
    parts = (units + MOST - 1) // MOST
    first = tl.cumsum(parts, 0) - parts
    tl.store(first_split + row, first, mask=row <= rows)
    base = units // tl.maximum(parts, 1)
    extra = units - base * parts  # the first `extra` parts of a row have one unit more
    start = 0
    for shorter in tl.static_range(MOST):
        size = MOST - shorter
        own = tl.where(base + 1 == size, extra, tl.where(base == size, parts - extra, 0))
        skip = tl.where(base == size, extra, 0)
        place = start + tl.cumsum(own, 0) - own
        for index in range(tl.max(own, 0)):
            mine = index < own
            part = skip + index
            begin = UNIT * (part * base + tl.minimum(part, extra))
            piece = pieces + (place + index) * PIECE
            tl.store(piece, table, mask=mine)
            tl.store(piece + 1, row, mask=mine)
            tl.store(piece + 2, 1, mask=mine)
            tl.store(piece + 3, end - 1, mask=mine)
            tl.store(piece + 4, begin, mask=mine)
            tl.store(piece + 5, tl.minimum(begin + UNIT * size, end), mask=mine)
            tl.store(piece + 6, first + part, mask=mine)
        start += tl.sum(own, 0)
    tl.store(count, start)


# Flash attention over pieces x key heads. A row of the tile is a query of one of the heads that share the keys.
# With SPLIT a piece is a section of a context: unnormalised sums, maxima (base 2) and weights are stored in part*.
@triton.jit
def attend_kernel(
    queries, cache, out, part, part_max, part_sum, ints, pieces, count, scale, query_stride, block_stride, value_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, PIECE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    lane = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM)
    for work in range(tl.program_id(0), tl.load(count) * KV_HEADS, tl.num_programs(0)):
        kv_head = work % KV_HEADS
        piece = pieces + work // KV_HEADS * PIECE
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
def merge_kernel(part, part_max, part_sum, out, first_split, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Merge the splits of one row and head. Rows without splits are skipped."""
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
