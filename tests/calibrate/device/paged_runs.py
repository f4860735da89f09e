"""Check a backend: run scripted requests in scattered KV blocks and compare their logits with a pass without a cache.

The comparison shows whether the cache, the block tables and the swaps are right on this device. Lengths are tokens.
It also runs in a worker (stepping_worker_script.py): Python 3.9, standard library and numpy.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

import numpy as np
from servesim.calibrate.device.backend import Row

PROMPT_LENGTHS = (1, 7, 16, 17, 40, 64, 70, 130)  # below and above one block, one tile, and several of both
OUTPUT_LENGTH = 8
KBK_REFERENCES: dict[int, tuple[Any, Any]] = {}  # by id of the network of a backend: that network, its reference


@dataclass(eq=False)
class ScriptedRequest:
    """One request: its tokens, how many of them are cached, its blocks, and the results of its steps."""

    tokens: list[int]
    prompt: int
    cached: int = 0
    table: array[int] = field(default_factory=lambda: array("i"))  # device blocks
    host_table: list[int] = field(default_factory=list)  # host blocks, while swapped out
    results: dict[int, tuple[int, Any]] = field(default_factory=dict)  # position -> next token and logits

    @property
    def pending(self) -> int:
        """Number of tokens to compute."""
        return len(self.tokens) - self.cached


@dataclass
class Comparison:
    """Differences between logits and those of the pass without a cache. A NaN stays a NaN."""

    errors: list[float] = field(default_factory=list)  # per row: |logits - reference| / |reference|
    max_difference: float = 0.0  # of a logit
    max_relative: float = 0.0  # of a logit, relative to the largest reference logit of the request
    wrong_tokens: int = 0  # rows whose most likely token is not that of the reference
    max_logit_gap: float = 0.0  # of a wrong token to the right one, in standard deviations of the reference

    def add(self, token: int, logits: Any, reference: Any, scale: float) -> None:
        """Compare one row."""
        difference, best = float(np.abs(logits - reference).max()), int(reference.argmax())
        self.errors.append(float(np.linalg.norm(logits - reference) / np.linalg.norm(reference)))
        self.max_difference = float(np.maximum(self.max_difference, difference))
        self.max_relative = float(np.maximum(self.max_relative, difference / scale))
        self.wrong_tokens += token != best
        self.max_logit_gap = max(self.max_logit_gap, float((reference[best] - reference[token]) / reference.std()))


class PagedRun:
    """Requests on a loaded backend, with block tables like an engine's.

    `poison` writes NaN into freed blocks, so a later read of them changes the logits. It needs a torch backend.
    """

    def __init__(self, backend: Any, seed: int, poison: bool = False) -> None:
        about = backend.describe()
        self.backend, self.poison = backend, poison
        self.block_size, self.vocab = about["block_size"], about["model"]["vocab"]
        self.rng, self.prompt_rng = random.Random(seed), random.Random(seed)
        self.free = list(range(about["blocks"]))
        self.free_host = list(range(about["host_blocks"]))
        self.rng.shuffle(self.free)
        self.rng.shuffle(self.free_host)
        self.requests: list[ScriptedRequest] = []
        self.rows = 0  # computed so far

    def add_request(self, length: int) -> ScriptedRequest:
        """Add a request with a random prompt."""
        request = ScriptedRequest([self.prompt_rng.randrange(self.vocab) for _ in range(length)], length)
        self.requests.append(request)
        return request

    def step(self, chunks: Mapping[ScriptedRequest, int], corrupt: Optional[ScriptedRequest] = None) -> list[int]:
        """Compute the given number of pending tokens of each request. Append the next token to those without pending.

        The first two blocks of `corrupt` are exchanged in this step.
        """
        rows = [self._row(request, tokens, request is corrupt) for request, tokens in chunks.items()]
        next_tokens: list[int] = self.backend.step(rows)
        for request, row, token, logits in zip(chunks, rows, next_tokens, self.backend.logits()):
            request.cached += len(row.tokens)
            request.results[request.cached - 1] = token, logits
            if not request.pending:
                request.tokens.append(token)
        self.rows += len(rows)
        return next_tokens

    def decode(self, *requests: ScriptedRequest) -> list[int]:
        """Generate one more token of each request."""
        return self.step(dict.fromkeys(requests, 1))

    def swap_out(self, request: ScriptedRequest) -> None:
        """Copy the blocks of a request to the host and free them."""
        request.host_table = [self.free_host.pop() for _ in request.table]
        self.backend.swap_out(list(zip(request.table, request.host_table)))
        self.finish(request)

    def swap_in(self, request: ScriptedRequest) -> None:
        """Copy the blocks of a request back, into other device blocks."""
        request.table = array("i", [self.free.pop() for _ in request.host_table])
        self.backend.swap_in(list(zip(request.host_table, request.table)))
        self.free_host += request.host_table
        request.host_table = []

    def finish(self, request: ScriptedRequest) -> None:
        """Free the device blocks of a request."""
        if self.poison:
            self.backend.loaded.cache[list(request.table)] = math.nan
        self.free += request.table
        self.rng.shuffle(self.free)
        request.table = array("i")

    def compare(self, chunks: bool = True) -> Comparison:
        """Compare all logits with those of a pass without a cache; without `chunks`, only those of generated tokens."""
        comparison = Comparison()
        for request in (request for request in self.requests if request.results):
            reference = reference_logits(self.backend, request.tokens[: request.cached])
            scale = float(np.abs(reference).max())
            for position, (token, logits) in request.results.items():
                if chunks or position >= request.prompt - 1:
                    comparison.add(token, logits, reference[position], scale)
        return comparison

    def _row(self, request: ScriptedRequest, tokens: int, corrupt: bool) -> Row:
        end = request.cached + tokens
        while len(request.table) * self.block_size < end:
            request.table.append(self.free.pop())
        table = array("i", request.table)
        if corrupt:
            table[0], table[1] = table[1], table[0]
        return Row(request.tokens[request.cached : end], request.cached, table)


class SelfTest:
    """Drives a run at random: it admits requests, computes chunks, swaps out and in, and finishes in any order."""

    def __init__(self, run: PagedRun, output_length: int, spoil: bool = False) -> None:
        self.paged, self.rng, self.output_length, self.spoil = run, run.rng, output_length, spoil
        self.running: list[ScriptedRequest] = []
        self.swapped: list[ScriptedRequest] = []
        self.counts = {"steps": 0, "chunks": 0, "swaps": 0, "spoiled": 0, "largest": 0, "smallest": 1 << 30}

    def run(self, lengths: Sequence[int]) -> None:
        """Serve prompts of these lengths. The batch grows and shrinks at random."""
        waiting = [self.paged.add_request(length) for length in lengths]
        while waiting or self.running or self.swapped:
            if self.swapped and (not self.running or self.rng.random() < 0.5):
                self.running.append(self.swapped.pop(0))
                self.paged.swap_in(self.running[-1])
            elif len(self.running) > 1 and self.rng.random() < 0.3:
                self._swap_out(self.rng.choice(self.running))
            for _ in range(self.rng.choice((0, 1, 1, 2))):
                self.running += waiting[:1]
                del waiting[:1]
            if self.running:
                self._step()

    def _step(self) -> None:
        chunks = {request: self._chunk_size(request) for request in self.running}
        self.counts["steps"] += 1
        self.counts["largest"] = max(self.counts["largest"], len(chunks))
        self.counts["smallest"] = min(self.counts["smallest"], len(chunks))
        self.paged.step(chunks, self._request_to_corrupt(chunks))
        for request in chunks:
            if len(request.tokens) == request.prompt + self.output_length:
                self.running.remove(request)
                self.paged.finish(request)

    def _chunk_size(self, request: ScriptedRequest) -> int:
        """Choose some or all of the pending tokens."""
        tokens = self.rng.randint(1, request.pending) if self.rng.random() < 0.5 else request.pending
        self.counts["chunks"] += tokens > 1 and request.cached > 0
        return tokens

    def _request_to_corrupt(self, chunks: Mapping[ScriptedRequest, int]) -> Optional[ScriptedRequest]:
        """Return the first decode that reads two blocks, once per run; this step uses a wrong table for it."""
        if not self.spoil or self.counts["spoiled"]:
            return None
        size = self.paged.block_size
        decodes = (request for request, tokens in chunks.items() if tokens == 1 and request.cached > size)
        request = next(decodes, None)
        self.counts["spoiled"] += request is not None
        return request

    def _swap_out(self, request: ScriptedRequest) -> None:
        if request.table and len(request.table) <= len(self.paged.free_host):
            self.paged.swap_out(request)
            self.running.remove(request)
            self.swapped.append(request)
            self.counts["swaps"] += 1


def run(backend: Any, args: dict[str, Any], emit: Optional[Callable[[Any], None]] = None) -> dict[str, Any]:
    """Test a loaded backend; return counts, tokens that differ from the pass without a cache, and the largest error.

    The error of a logit is relative to the largest logit. With `spoil`, one block table is wrong in one step, and the
    error must show it.
    """
    paged = PagedRun(backend, args.get("seed", 0))
    test = SelfTest(paged, args.get("answer", OUTPUT_LENGTH), args.get("spoil", False))
    test.run(args.get("prompts", PROMPT_LENGTHS))
    compared = paged.compare(chunks=False)
    return {
        **test.counts,
        "scores": len(compared.errors),
        "differ": compared.wrong_tokens,
        "error": compared.max_relative,
    }


def reference_logits(backend: Any, tokens: Sequence[int]) -> Any:
    """Return the logits after each token, [tokens, vocab], with the weights of a loaded backend, from one full pass."""
    if backend.name == "torch":
        return torch_reference(backend.loaded.weights, backend.model, tokens).cpu().numpy()
    return kbk_reference(backend, tokens)


def kbk_reference(backend: Any, tokens: Sequence[int]) -> Any:
    """Return the logits of MindFormers' own pass without a cache."""
    from servesim.calibrate.device.kbk.mindspore_setup import environment

    if id(backend.net) not in KBK_REFERENCES:
        with environment(RUN_MODE=None):  # predict mode requires flash attention
            net = backend._build(use_past=False, use_flash_attention=backend.kernels == "fused")
        net.set_dynamic_inputs()
        backend.ms.load_param_into_net(net, {p.name: p for p in backend.net.get_parameters()})
        KBK_REFERENCES[id(backend.net)] = backend.net, net
    _, net = KBK_REFERENCES[id(backend.net)]
    output, _ = net.forward(np.asarray([tokens], np.int32), np.array([len(tokens)], np.int32))
    return (output[0] if isinstance(output, tuple) else output).asnumpy().reshape(len(tokens), -1)


def torch_reference(weights: Any, model: Any, tokens: Sequence[int]) -> Any:
    """Return the logits of a full causal pass in float32 and plain torch."""
    import torch
    from torch.nn.functional import linear, scaled_dot_product_attention, silu

    def norm(x: Any, weight: Any) -> Any:
        return x / torch.sqrt(x.pow(2).mean(1, keepdim=True) + 1e-5) * weight.float()

    def rotate(x: Any) -> Any:
        """Rotate each pair (i, i + dim / 2) as a complex number, by position times frequency."""
        half = x.shape[2] // 2
        rates = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
        angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float64, device=x.device), rates)
        pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), dim=2).float()

    def attention(qkv: Any) -> Any:
        heads = qkv.view(len(qkv), -1, model.hidden // model.heads).transpose(0, 1)  # [heads, tokens, dim]
        q, k, v = heads.split_with_sizes([model.heads, model.kv_heads, model.kv_heads])
        group = model.heads // model.kv_heads
        k, v = rotate(k).repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        return scaled_dot_product_attention(rotate(q), k, v, is_causal=True).transpose(0, 1).flatten(1)

    x = weights.embedding[torch.tensor(tokens, device=weights.head.device)].float()
    for layer in weights.layers:
        x = x + attention(norm(x, layer.before_attention) @ layer.qkv.float().t()) @ layer.output.float().t()
        gate, up = linear(norm(x, layer.before_mlp), layer.gate_up.float()).chunk(2, dim=1)
        x = x + linear(silu(gate) * up, layer.down.float())
    return linear(norm(x, weights.norm), weights.head.float())
