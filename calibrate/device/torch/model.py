"""A Llama over a paged KV cache: one forward pass for prompts, decodes or both, packed into one sequence of tokens."""

from __future__ import annotations

import torch
from torch.nn.functional import embedding, linear

from .operators import Batch, ReferenceOperators
from .weights import Weights


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
