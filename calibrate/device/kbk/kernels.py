"""Reference kernels: MindFormers' Ascend-only kernels, rebuilt from standard MindSpore operators.

They replace rotary embedding, cache write, prompt attention, paged attention and the cumulative sum of lengths, with
the interfaces of the original cells. Attention only computes tiles with live tokens. Its time depends on the tokens
read, as with the fused kernels, and not on rows times the longest row.
The cache has one row per slot and head, because MindSpore copies a whole parameter to reshape it.
This file imports mindspore at the top, because the graph compiler reads its source. Only backend.py loads it.
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

MASKED_SCORE = -1e30  # softmax turns it into 0
TILE = 64  # queries or keys per tile


class TiledAttention(nn.Cell):  # type: ignore[misc]
    """Softmax attention over pairs of a query tile and a key tile, summed per query tile."""

    def __init__(self) -> None:
        super().__init__()
        self.score = ops.BatchMatMul(transpose_b=True)
        self.mix = ops.BatchMatMul()

    def construct(self, query: Any, key: Any, value: Any, owner: Any, visible: Any, tiles: Any) -> Any:
        """Return [tiles, heads, m, head] from scaled queries, keys and values [pairs, heads, m or n, head]."""
        scores = self.score(query, key)  # [pairs, heads, m, n]
        scores = ops.select(visible, scores, ops.full_like(scores, MASKED_SCORE))
        weights = ops.softmax(scores, -1)
        # At its maximum, a softmax is 1 / sum(exp(score - max)). This gives the log-sum-exp without a second exp.
        sums = ops.amax(scores, -1) - ops.log(ops.amax(weights, -1))  # [pairs, heads, m]
        top = ops.unsorted_segment_max(sums, owner, tiles)
        scale = ops.expand_dims(ops.exp(sums - ops.gather(top, owner, 0)), -1)
        total = ops.unsorted_segment_sum(scale, owner, tiles)
        return ops.unsorted_segment_sum(self.mix(weights, value) * scale, owner, tiles) / total


class ReferenceCache(PagedAttentionMgr):  # type: ignore[misc]
    """The paged cache: writes new keys and values, and attends to the blocks of the block tables."""

    def __init__(self, n_heads: int, head_dim: int, n_kv_heads: int, kv_shape: Any, *args: Any, **kwargs: Any) -> None:
        blocks, self.block_size = kv_shape[0], kv_shape[1]
        dtype = kwargs.get("compute_dtype", ms.float32)
        super().__init__(n_heads, head_dim, n_kv_heads, (1, 1, 1, 1), *args, **kwargs)
        rows = (blocks * self.block_size * n_kv_heads, head_dim)
        self.key_cache = ms.Parameter(initializer("zeros", rows, dtype), name="key_cache", requires_grad=False)
        self.value_cache = ms.Parameter(initializer("zeros", rows, dtype), name="value_cache", requires_grad=False)
        self.kv_heads = ms.Tensor(np.arange(n_kv_heads, dtype=np.int32))
        heads = np.arange(n_heads, dtype=np.int32) // (n_heads // n_kv_heads)
        self.heads = ms.Tensor(heads.reshape(1, n_heads, 1))  # key and value head of each query head
        self.offsets = ms.Tensor(np.arange(self.block_size, dtype=np.int32).reshape(1, 1, self.block_size))
        self.write = ops.ScatterUpdate()
        self.nonzero = ops.NonZero()
        self.attention = TiledAttention()

    def construct(self, key: Any, value: Any, slot_mapping: Any, batch_valid_length: Any = None) -> Any:
        """Write one key and value per token into its slot."""
        rows = ops.expand_dims(slot_mapping, 1) * self.n_kv_heads + self.kv_heads  # [tokens, kv heads]
        heads = (-1, self.n_kv_heads, self.head_dim)
        keys = self.write(self.key_cache, rows, ops.reshape(key, heads))
        values = self.write(self.value_cache, rows, ops.reshape(value, heads))
        return ops.depend(keys, values)

    def paged_attn(
        self, query: Any, batch_valid_length: Any, block_tables: Any, attn_mask: Any = None, q_seq_lens: Any = None
    ) -> Any:
        """Attend from one token per row to its cached tokens, up to its valid length."""
        rows, width = ops.shape(block_tables)
        starts = (ops.cumsum(ops.ones((width,), ms.int32), 0) - 1) * self.block_size
        live = ops.less(ops.expand_dims(starts, 0), ops.expand_dims(batch_valid_length, 1))
        live = ops.cast(self.nonzero(live), ms.int32)  # [pairs, 2]: row, column of its block table
        owner = live[:, 0]
        blocks = ops.reshape(ops.gather_nd(block_tables, live), (-1, 1, 1))
        cached = (blocks * self.block_size + self.offsets) * self.n_kv_heads + self.heads  # [pairs, heads, block size]
        positions = ops.reshape(live[:, 1], (-1, 1, 1)) * self.block_size + self.offsets
        visible = ops.less(positions, ops.reshape(ops.gather(batch_valid_length, owner, 0), (-1, 1, 1)))
        query = ops.reshape(query * self.scale_value, (rows, self.n_heads, 1, self.head_dim))
        query = ops.gather(query, owner, 0)
        key = ops.gather(self.key_cache, cached, 0)
        value = ops.gather(self.value_cache, cached, 0)
        mixed = self.attention(query, key, value, owner, ops.expand_dims(visible, 1), rows)
        return ops.reshape(mixed, (rows, 1, self.n_heads * self.head_dim))


class ReferenceAttention(InferAttention):  # type: ignore[misc]
    """Attention over flattened prompts or over the paged cache; a flag of MindFormers selects which."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        heads = np.arange(self.n_head, dtype=np.int32).reshape(1, self.n_head, 1)
        self.heads = ms.Tensor(heads)
        self.kv_heads = ms.Tensor(heads // (self.n_head // self.n_kv_head))
        positions = np.arange(TILE, dtype=np.int32)
        self.offsets = ms.Tensor(positions.reshape(1, 1, TILE))
        self.distances = ms.Tensor((positions[:, None] - positions[None, :]).reshape(1, 1, TILE, TILE))
        self.nonzero = ops.NonZero()
        self.attention = TiledAttention()

    def _token_positions(self, tokens: Any, lengths: Any) -> Any:
        """Return the prompt index and the position in that prompt of each flattened token."""
        index = ops.cumsum(ops.ones((tokens,), ms.int32), 0) - 1
        ends = ops.cumsum(lengths, 0)
        past = ops.cast(ops.greater_equal(ops.expand_dims(index, 1), ops.expand_dims(ends, 0)), ms.int32)
        prompt = ops.sum(past, 1)
        return prompt, index - ops.gather(ends - lengths, prompt, 0)

    def _rotate(self, vector: Any, cos: Any, sin: Any) -> Any:
        """Rotate the halves of each head by their angles."""
        heads = ops.reshape(vector, (ops.shape(cos)[0], -1, self.head_dim))
        half = self.head_dim // 2
        swapped = ops.concat((-heads[:, :, half:], heads[:, :, :half]), 2)
        rotated = heads * ops.expand_dims(cos, 1) + swapped * ops.expand_dims(sin, 1)
        return ops.reshape(rotated, ops.shape(vector))

    def _apply_rotary_pos_emb(self, query: Any, key: Any, freqs_cis: Any, batch_valid_length: Any) -> Any:
        """Rotate queries and keys. Prompts get the whole table of angles, decodes one row each."""
        cos, sin, _ = freqs_cis
        if self.is_first_iteration:
            _, position = self._token_positions(ops.shape(query)[1], batch_valid_length)
            cos = ops.gather(cos, position, 0)
            sin = ops.gather(sin, position, 0)
        return self._rotate(query, cos, sin), self._rotate(key, cos, sin)

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
        """Causal attention within each flattened prompt."""
        tokens = ops.shape(query)[1]
        lengths = actual_seq_qlen
        starts = (ops.cumsum(ops.ones(((tokens + TILE - 1) // TILE,), ms.int32), 0) - 1) * TILE
        tile = ops.cast(self.nonzero(ops.less(ops.expand_dims(starts, 0), ops.expand_dims(lengths, 1))), ms.int32)
        prompt, start = tile[:, 0], tile[:, 1] * TILE  # per tile: its prompt, its first position
        first = ops.gather(ops.cumsum(lengths, 0) - lengths, prompt, 0) + start
        index = ops.minimum(ops.reshape(first, (-1, 1, 1)) + self.offsets, tokens - 1)  # [tiles, 1, TILE]

        same = ops.equal(ops.expand_dims(prompt, 1), ops.expand_dims(prompt, 0))
        back = ops.greater_equal(ops.expand_dims(start, 1), ops.expand_dims(start, 0))
        pair = ops.cast(self.nonzero(ops.logical_and(same, back)), ms.int32)  # [pairs, 2]: query tile, key tile
        owner, other = pair[:, 0], pair[:, 1]
        ahead = ops.reshape(ops.gather(start, owner, 0) - ops.gather(start, other, 0), (-1, 1, 1, 1))
        visible = ops.greater_equal(self.distances, -ahead)  # [pairs, 1, TILE, TILE]

        rows = (-1, self.head_dim)
        key_rows = ops.gather(index, other, 0) * self.n_kv_head + self.kv_heads  # [pairs, heads, TILE]
        query_rows = ops.gather(index, owner, 0) * self.n_head + self.heads
        query = ops.gather(ops.reshape(query * self.scale_value, rows), query_rows, 0)
        key = ops.gather(ops.reshape(key, rows), key_rows, 0)
        value = ops.gather(ops.reshape(value, rows), key_rows, 0)
        mixed = self.attention(query, key, value, owner, visible, ops.shape(tile)[0])
        return self._flatten_tiles(mixed, tokens, lengths)

    def _flatten_tiles(self, mixed: Any, tokens: Any, lengths: Any) -> Any:
        """Convert tiles back to flattened tokens."""
        prompt, position = self._token_positions(tokens, lengths)
        tiles = (lengths + TILE - 1) // TILE
        tile = ops.gather(ops.cumsum(tiles, 0) - tiles, prompt, 0) + position // TILE
        offset = ops.reshape(position % TILE, (-1, 1, 1))
        rows = (ops.reshape(tile, (-1, 1, 1)) * self.n_head + self.heads) * TILE + offset
        flat = ops.gather(ops.reshape(mixed, (-1, self.head_dim)), rows, 0)
        return ops.reshape(flat, (1, tokens, self.n_head * self.head_dim))


class ReferenceLlama(LlamaForCausalLM):  # type: ignore[misc]
    """The model, with a replaced cumulative sum of lengths, which finds the last token of each prompt."""

    def pre_gather_func(self, pre_gather: Any, output: Any, batch_valid_length: Any, gather_index: Any = None) -> Any:
        """Return the last token of each flattened prompt. Decodes have one token per row and stay unchanged."""
        if not pre_gather:
            return output
        return ops.gather(output, ops.cumsum(batch_valid_length, 0) - 1, 1)
