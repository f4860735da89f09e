"""The same Llama without a cache, in float32 and plain torch: the reference for paged steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from servesim.calibrate.device.backend import Model
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from .weights import Weights


def reference_logits(weights: Weights, model: Model, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits after each token, [tokens, vocab], from one full causal pass."""
    device = weights.head.device
    x = weights.embedding[torch.tensor(tokens, device=device)].float()
    for layer in weights.layers:
        x = x + _attention(_norm(x, layer.before_attention) @ layer.qkv.float().t(), model) @ layer.output.float().t()
        gate, up = linear(_norm(x, layer.before_mlp), layer.gate_up.float()).chunk(2, dim=1)
        x = x + linear(silu(gate) * up, layer.down.float())
    return linear(_norm(x, weights.norm), weights.head.float())


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt(x.pow(2).mean(1, keepdim=True) + 1e-5) * weight.float()


def _attention(qkv: torch.Tensor, model: Model) -> torch.Tensor:
    dim = model.hidden // model.heads
    heads = qkv.view(len(qkv), -1, dim).transpose(0, 1)  # [heads, tokens, dim]
    q, k, v = heads.split_with_sizes([model.heads, model.kv_heads, model.kv_heads])
    group = model.heads // model.kv_heads
    k, v = _rotate(k).repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    return scaled_dot_product_attention(_rotate(q), k, v, is_causal=True).transpose(0, 1).flatten(1)


def _rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (i, i + dim / 2) as a complex number, by position times frequency."""
    half = x.shape[2] // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float64, device=x.device), rates)
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=2).float()
