"""A Llama over a paged cache: one forward pass for prompts, decodes and both at once, token by token in one pack."""

from __future__ import annotations

import torch
from torch.nn.functional import embedding, linear

from .operators import Batch, Plain
from .weights import Weights


class Llama:
    """Weights, operators, the cache [blocks, layers, 2, block_size, kv_heads, head_dim], and where results are left.

    A block's keys and values of all layers lie together, so that moving a block is one copy.
    """

    def __init__(self, weights: Weights, operators: Plain, cache: torch.Tensor, rows: int) -> None:
        self.weights, self.operators, self.cache = weights, operators, cache
        head = weights.head
        self.logits = head.new_zeros(rows, len(head))
        self.winners = torch.zeros(rows, dtype=torch.int64, device=head.device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the tokens' keys and values into their slots; return each row's logits and its most likely token.

        The results stay in the same memory for every step of at most `rows` rows, as recorded graphs need it.
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
        rows = batch.form.rows
        fits = rows <= len(self.logits)
        logits = self.logits[:rows] if fits else self.logits.new_empty(rows, self.logits.shape[1])
        winners = self.winners[:rows] if fits else self.winners.new_empty(rows)
        torch.mm(x, weights.head.t(), out=logits)
        torch.argmax(logits, dim=1, out=winners)
        return logits, winners
