"""The kernels of MindFormers' paged Llama that only an Ascend has, made of plain MindSpore operators.

Rotary embedding, cache write, prompt attention, paged attention and the running sum of the lengths, behind the
interfaces of the cells they stand in for. Attention works on tiles, and only on those that are alive, so that its time
follows the tokens attended to, as that of the fused kernels does, and not the longest row times the rows.
A cache here is one row a slot and head: reshaping a parameter copies all of it, on every call.
This file imports mindspore at its top, because the graph compiler reads its source; only backend.py loads it.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindformers.models.llama import LlamaForCausalLM
from mindformers.modules.infer_attention import InferAttention
from mindformers.modules.paged_attention_mgr import PagedAttentionMgr
from mindspore import nn, ops
from mindspore.common.initializer import initializer

FAR = -1e30  # a score that softmax turns into nothing
TILE = 64  # tokens of a prompt that are attended from, or to, at once


class TiledAttention(nn.Cell):  # type: ignore[misc]
    """Softmax attention over pairs of a query tile and a key tile, summed up by query tile."""

    def __init__(self) -> None:
        super().__init__()
        self.score = ops.BatchMatMul(transpose_b=True)
        self.mix = ops.BatchMatMul()

    def construct(self, query: Any, key: Any, value: Any, owner: Any, seen: Any, tiles: Any) -> Any:
        """Return [tiles, heads, m, head] from scaled queries, keys and values [pairs, heads, m or n, head]."""
        scores = self.score(query, key)  # [pairs, heads, m, n]
        scores = ops.select(seen, scores, ops.full_like(scores, FAR))
        weights = ops.softmax(scores, -1)
        # A softmax is 1 / sum(exp(score - top)) at its top: so the log of the pair's sum of exps needs no second exp.
        sums = ops.amax(scores, -1) - ops.log(ops.amax(weights, -1))  # [pairs, heads, m]
        top = ops.unsorted_segment_max(sums, owner, tiles)
        share = ops.expand_dims(ops.exp(sums - ops.gather(top, owner, 0)), -1)
        total = ops.unsorted_segment_sum(share, owner, tiles)
        return ops.unsorted_segment_sum(self.mix(weights, value) * share, owner, tiles) / total


class ReferenceCache(PagedAttentionMgr):  # type: ignore[misc]
    """The paged cache: scatter new keys and values in, attend to what the block tables name."""

    def __init__(self, n_heads: int, head_dim: int, n_kv_heads: int, kv_shape: Any, *args: Any, **kwargs: Any) -> None:
        blocks, self.block_size = kv_shape[0], kv_shape[1]
        dtype = kwargs.get("compute_dtype", ms.float32)
        super().__init__(n_heads, head_dim, n_kv_heads, (1, 1, 1, 1), *args, **kwargs)
        rows = (blocks * self.block_size * n_kv_heads, head_dim)
        self.key_cache = ms.Parameter(initializer("zeros", rows, dtype), name="key_cache", requires_grad=False)
        self.value_cache = ms.Parameter(initializer("zeros", rows, dtype), name="value_cache", requires_grad=False)
        self.kv_heads = ms.Tensor(np.arange(n_kv_heads, dtype=np.int32))
        heads = np.arange(n_heads, dtype=np.int32) // (n_heads // n_kv_heads)
        self.heads = ms.Tensor(heads.reshape(1, n_heads, 1))  # the key and value head each query head reads
        self.places = ms.Tensor(np.arange(self.block_size, dtype=np.int32).reshape(1, 1, self.block_size))
        self.write = ops.ScatterUpdate()
        self.alive = ops.NonZero()
        self.attention = TiledAttention()

    def construct(self, key: Any, value: Any, slot_mapping: Any, batch_valid_length: Any = None) -> Any:
        """Write one key and value a token into its slot."""
        rows = ops.expand_dims(slot_mapping, 1) * self.n_kv_heads + self.kv_heads  # [tokens, kv heads]
        heads = (-1, self.n_kv_heads, self.head_dim)
        keys = self.write(self.key_cache, rows, ops.reshape(key, heads))
        values = self.write(self.value_cache, rows, ops.reshape(value, heads))
        return ops.depend(keys, values)

    def paged_attn(
        self, query: Any, batch_valid_length: Any, block_tables: Any, attn_mask: Any = None, q_seq_lens: Any = None
    ) -> Any:
        """Attend from one token a row to the cache its table names, up to its valid length."""
        rows, width = ops.shape(block_tables)
        starts = (ops.cumsum(ops.ones((width,), ms.int32), 0) - 1) * self.block_size
        alive = ops.less(ops.expand_dims(starts, 0), ops.expand_dims(batch_valid_length, 1))
        alive = ops.cast(self.alive(alive), ms.int32)  # [pairs, 2]: a row, and a column of its table
        owner = alive[:, 0]
        blocks = ops.reshape(ops.gather_nd(block_tables, alive), (-1, 1, 1))
        cached = (blocks * self.block_size + self.places) * self.n_kv_heads + self.heads  # [pairs, heads, block size]
        places = ops.reshape(alive[:, 1], (-1, 1, 1)) * self.block_size + self.places
        seen = ops.less(places, ops.reshape(ops.gather(batch_valid_length, owner, 0), (-1, 1, 1)))
        query = ops.reshape(query * self.scale_value, (rows, self.n_heads, 1, self.head_dim))
        query = ops.gather(query, owner, 0)
        key = ops.gather(self.key_cache, cached, 0)
        value = ops.gather(self.value_cache, cached, 0)
        mixed = self.attention(query, key, value, owner, ops.expand_dims(seen, 1), rows)
        return ops.reshape(mixed, (rows, 1, self.n_heads * self.head_dim))


class ReferenceAttention(InferAttention):  # type: ignore[misc]
    """Attention over flattened prompts or over the paged cache, by the flag that MindFormers sets."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        heads = np.arange(self.n_head, dtype=np.int32).reshape(1, self.n_head, 1)
        self.heads = ms.Tensor(heads)
        self.kv_heads = ms.Tensor(heads // (self.n_head // self.n_kv_head))
        places = np.arange(TILE, dtype=np.int32)
        self.places = ms.Tensor(places.reshape(1, 1, TILE))
        self.lead = ms.Tensor((places[:, None] - places[None, :]).reshape(1, 1, TILE, TILE))
        self.alive = ops.NonZero()
        self.attention = TiledAttention()

    def _places(self, tokens: Any, lengths: Any) -> Any:
        """Return for each flattened token which prompt it is of, and its place there."""
        index = ops.cumsum(ops.ones((tokens,), ms.int32), 0) - 1
        ends = ops.cumsum(lengths, 0)
        past = ops.cast(ops.greater_equal(ops.expand_dims(index, 1), ops.expand_dims(ends, 0)), ms.int32)
        prompt = ops.sum(past, 1)
        return prompt, index - ops.gather(ends - lengths, prompt, 0)

    def _turned(self, vector: Any, cos: Any, sin: Any) -> Any:
        """Turn the halves of each head by their angles."""
        heads = ops.reshape(vector, (ops.shape(cos)[0], -1, self.head_dim))
        half = self.head_dim // 2
        swapped = ops.concat((-heads[:, :, half:], heads[:, :, :half]), 2)
        turned = heads * ops.expand_dims(cos, 1) + swapped * ops.expand_dims(sin, 1)
        return ops.reshape(turned, ops.shape(vector))

    def _apply_rotary_pos_emb(self, query: Any, key: Any, freqs_cis: Any, batch_valid_length: Any) -> Any:
        """Turn queries and keys: prompts come with the whole table of angles, decodes with one row each."""
        cos, sin, _ = freqs_cis
        if self.is_first_iteration:
            _, place = self._places(ops.shape(query)[1], batch_valid_length)
            cos = ops.gather(cos, place, 0)
            sin = ops.gather(sin, place, 0)
        return self._turned(query, cos, sin), self._turned(key, cos, sin)

    def _prefill_attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any,
        alibi_mask: Any,
        actual_seq_qlen: Any = None,
        actual_seq_kvlen: Any = None,
    ) -> Any:
        """Attend within each of the flattened prompts, backwards."""
        tokens = ops.shape(query)[1]
        lengths = actual_seq_qlen
        starts = (ops.cumsum(ops.ones(((tokens + TILE - 1) // TILE,), ms.int32), 0) - 1) * TILE
        tile = ops.cast(self.alive(ops.less(ops.expand_dims(starts, 0), ops.expand_dims(lengths, 1))), ms.int32)
        prompt, start = tile[:, 0], tile[:, 1] * TILE  # of each tile: its prompt, and where in it it begins
        first = ops.gather(ops.cumsum(lengths, 0) - lengths, prompt, 0) + start
        index = ops.minimum(ops.reshape(first, (-1, 1, 1)) + self.places, tokens - 1)  # [tiles, 1, TILE]

        same = ops.equal(ops.expand_dims(prompt, 1), ops.expand_dims(prompt, 0))
        back = ops.greater_equal(ops.expand_dims(start, 1), ops.expand_dims(start, 0))
        pair = ops.cast(self.alive(ops.logical_and(same, back)), ms.int32)  # [pairs, 2]: a query tile, a key tile
        owner, other = pair[:, 0], pair[:, 1]
        ahead = ops.reshape(ops.gather(start, owner, 0) - ops.gather(start, other, 0), (-1, 1, 1, 1))
        seen = ops.greater_equal(self.lead, -ahead)  # [pairs, 1, TILE, TILE]

        rows = (-1, self.head_dim)
        cells = ops.gather(index, other, 0) * self.n_kv_head + self.kv_heads  # [pairs, heads, TILE]
        askers = ops.gather(index, owner, 0) * self.n_head + self.heads
        query = ops.gather(ops.reshape(query * self.scale_value, rows), askers, 0)
        key = ops.gather(ops.reshape(key, rows), cells, 0)
        value = ops.gather(ops.reshape(value, rows), cells, 0)
        mixed = self.attention(query, key, value, owner, seen, ops.shape(tile)[0])
        return self._flattened(mixed, tokens, lengths)

    def _flattened(self, mixed: Any, tokens: Any, lengths: Any) -> Any:
        """Return tiles as flattened tokens again."""
        prompt, place = self._places(tokens, lengths)
        tiles = (lengths + TILE - 1) // TILE
        tile = ops.gather(ops.cumsum(tiles, 0) - tiles, prompt, 0) + place // TILE
        rows = (ops.reshape(tile, (-1, 1, 1)) * self.n_head + self.heads) * TILE + ops.reshape(place % TILE, (-1, 1, 1))
        flat = ops.gather(ops.reshape(mixed, (-1, self.head_dim)), rows, 0)
        return ops.reshape(flat, (1, tokens, self.n_head * self.head_dim))


class ReferenceLlama(LlamaForCausalLM):  # type: ignore[misc]
    """The model, but for the running sum of lengths by which it picks each prompt's last token."""

    def pre_gather_func(self, pre_gather: Any, output: Any, batch_valid_length: Any, gather_index: Any = None) -> Any:
        """Return the last token of each flattened prompt; a decode has no other."""
        if not pre_gather:
            return output
        return ops.gather(output, ops.cumsum(batch_valid_length, 0) - 1, 1)
