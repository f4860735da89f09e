"""The torch backend: a Llama over a block-pool cache on a CUDA device, or on the CPU with plain operators.

A step is one packed forward pass whatever its rows are. Rows are padded to a gear (decodes to a number of rows,
prompts and mixed steps to a number of tokens) and on CUDA every gear is a recorded graph, so that the host's part of
a step is: fill one array, copy it, start the graph, read the tokens. Steps beyond the gears run launch by launch and
unpadded; they are long enough to hide their launches. A prompt of one token runs as a decode at position 0.
"""
# mypy: allow-untyped-calls
# (parts of torch.cuda carry no annotations)

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Optional, TypeVar

import numpy as np
import torch
from servesim.calibrate.device.backend import Backend, Model, OutOfMemory, Row
from servesim.core import BadInput

from .model import Llama
from .operators import Batch, Plain
from .packing import Form, Packer
from .reference import reference_logits
from .weights import random_weights, stored_weights

GEARS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)  # rows of a decode
TOKEN_GEARS = (32, 64, 96, 128, 160, 192, 256, 320, 384, 512)  # of prompts and mixed steps
INPUT = 1 << 21  # integers a step's description may have
# signs of CUDA, of its libraries, of the CPU (x86 and Arm)
OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")

Result = TypeVar("Result")


class TorchBackend(Backend):
    """Runs steps with torch; see the top of the file."""

    name = "torch"

    def __init__(
        self,
        device: Optional[str] = None,  # cuda, cuda:1, cpu; None: cuda where there is one
        seed: int = 0,  # of random weights
        dtype: Optional[str] = None,  # None: the model's on CUDA, float32 on the CPU
        gears: Sequence[int] = GEARS,
        token_gears: Sequence[int] = TOKEN_GEARS,
        kernels: Optional[str] = None,  # fused or reference; None: fused on CUDA, reference on the CPU
        graphs: bool = True,  # False: without graphs, to see what they are worth
        threads: Optional[int] = None,  # of a CPU, one a core; 1 does not wait for a thread that others hold up
    ) -> None:
        if threads is not None and (type(threads) is not int or threads < 1):
            raise BadInput(f"threads: expected at least 1, got {threads!r}")
        available = torch.cuda.is_available()
        self.device = torch.device(device or ("cuda" if available else "cpu"))
        if self.device.type not in ("cuda", "cpu") or (self.device.type == "cuda" and not available):
            raise BadInput(f"device: {self.device}, but torch has only the cpu{' and cuda' if available else ''} here")
        self.seed, self.dtype_name = seed, dtype
        self.gears, self.token_gears = tuple(gears), tuple(token_gears)
        self.cuda = self.device.type == "cuda"
        self.threads = None if self.cuda else threads
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        self.kernels = kernels or ("fused" if self.cuda else "reference")
        self.use_graphs = graphs and self.cuda and self.kernels == "fused"
        if self.kernels not in ("fused", "reference") or (self.kernels == "fused" and not self.cuda):
            raise BadInput(f"kernels: {self.kernels} on {self.device}, expected reference, or fused on CUDA")
        self.graphs: dict[Form, Any] = {}
        self.host: list[torch.Tensor] = []
        self.loaded: Optional[Llama] = None

    def load(
        self, model: Model, blocks: int, block_size: int, host_blocks: int = 0, weights: Optional[str] = None
    ) -> None:
        self.graphs, self.loaded, self.host = {}, None, []
        self.model, self.blocks, self.block_size = model, blocks, block_size
        self.dtype = getattr(torch, self.dtype_name or (model.dtype if self.cuda else "float32"))
        self._guarded(lambda: self._build(host_blocks, weights))

    def step(self, rows: Sequence[Row]) -> list[int]:
        llama = self._llama()
        form, used, order = self.packer.pack(rows)

        def run() -> list[int]:
            if self.cuda:
                self.ints[:used].copy_(self.staging[:used], non_blocking=True)
            graph = self.graphs.get(form)
            if graph is None:
                self.last, winners = llama.forward(Batch(form, self.ints))
            else:
                graph.replay()
                self.last, winners = llama.logits, llama.winners
            return self.fetch(winners, len(rows))

        found = self._guarded(run)
        self.last, self.order = self.last[: len(rows)], order
        if order is None:
            return found
        tokens = [0] * len(rows)
        for row, token in zip(order, found):
            tokens[row] = token
        return tokens

    def fetch(self, winners: torch.Tensor, rows: int) -> list[int]:
        """Return the step's tokens when they are there.

        It asks again and again instead of sleeping, so that the processor is awake when they come.
        """
        if not self.cuda or rows > len(self.found):
            winners = winners[:rows]
        else:
            winners, source = self.found[:rows], winners[:rows]
            winners.copy_(source, non_blocking=True)
            self.done.record()
            while not self.done.query():
                time.sleep(0)  # lets other threads have the interpreter
        tokens: list[int] = winners.tolist()
        return tokens

    def logits(self) -> np.ndarray[Any, Any]:
        """Return the logits of the last step's rows, [rows, vocab]: for checks."""
        # a copy, since the next step writes to the same memory
        packed: np.ndarray[Any, Any] = self.last.float().cpu().numpy().copy()
        return packed if self.order is None else packed[np.argsort(self.order)]

    def plain(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """Return the logits after each of the tokens from one pass without a cache, in float32: for checks."""
        found: np.ndarray[Any, Any] = reference_logits(self._llama().weights, self.model, tokens).cpu().numpy()
        return found

    def _swap(self, pairs: Sequence[tuple[int, int]], out: bool) -> None:
        """Begin the copies; later steps and copies come after them."""
        device: tuple[Any, int] = self._llama().cache, self.blocks
        host: tuple[Any, int] = self.host, len(self.host)
        (source, sources), (target, targets) = (device, host) if out else (host, device)
        for one, other in pairs:
            if not (0 <= one < sources and 0 <= other < targets):
                raise ValueError(f"swap: block {one} of {sources} to block {other} of {targets}")
        for one, other in pairs:
            target[other].copy_(source[one], non_blocking=True)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = {
            "backend": self.name,
            "device": torch.cuda.get_device_name(self.device) if self.cuda else f"cpu {platform.machine()}",
            "kernels": self.kernels,
            "threads": self.threads,
            "versions": _versions(self.cuda),
        }
        if self.loaded is not None:
            described.update(
                dtype=str(self.dtype).replace("torch.", ""),
                model=asdict(self.model),
                blocks=self.blocks,
                block_size=self.block_size,
                host_blocks=len(self.host),
                graphs=len(self.graphs),
                gears=list(self.packer.gears),
                token_gears=list(self.packer.token_gears),
            )
        return described

    def _llama(self) -> Llama:
        if self.loaded is None:
            raise RuntimeError("no model is loaded")
        return self.loaded

    def _build(self, host_blocks: int, path: Optional[str]) -> None:
        model, device, blocks = self.model, self.device, self.blocks
        operators = self._operators()
        shape = (model.layers, 2, self.block_size, model.kv_heads, model.hidden // model.heads)
        cache = torch.zeros(blocks + 1, *shape, dtype=self.dtype, device=device)  # one more for padding
        if path is None:
            weights = random_weights(model, device, self.dtype, self.seed)
        else:
            weights = stored_weights(model, device, self.dtype, path)
        self.staging = torch.zeros(INPUT, dtype=torch.int32, pin_memory=self.cuda)
        self.ints = torch.zeros_like(self.staging, device=device) if self.cuda else self.staging
        gears = [gear for gear in self.gears if gear <= max(blocks, 1)]  # a row holds a block at least
        self.packer = Packer(
            self.staging.numpy(), blocks, self.block_size, model.context, model.vocab, operators.tile, gears,
            self.token_gears,
        )  # fmt: skip
        llama = Llama(weights, operators, cache, rows=max(gears))
        if self.use_graphs:
            self._record(llama)
        if self.cuda:
            self.found = torch.zeros(len(llama.winners), dtype=torch.int64, pin_memory=True)
            self.done = torch.cuda.Event()
        self.host = [torch.empty(shape, dtype=self.dtype, pin_memory=self.cuda) for _ in range(host_blocks)]
        self.loaded = llama

    def _operators(self) -> Plain:
        if self.kernels == "reference":
            return Plain(self.model, self.block_size, self.device)
        from .fused_operators import Fused  # triton comes with torch for CUDA only

        return Fused(self.model, self.block_size, self.device)

    def _record(self, llama: Llama) -> None:
        """Record a graph for every form, the largest first, so that the others fit into its memory."""
        pool = torch.cuda.graph_pool_handle()
        for form in self.packer.forms():
            used = self.packer.blank(form)
            self.ints[:used].copy_(self.staging[:used])
            batch = Batch(form, self.ints)
            llama.forward(batch)  # compiles, and lets the libraries choose their kernels
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                llama.forward(batch)
            graph.replay()  # the first replay also uploads it
            torch.cuda.synchronize(self.device)
            self.graphs[form] = graph

    def _guarded(self, work: Callable[[], Result]) -> Result:
        """Do the work; memory that ran out becomes OutOfMemory, raised when nothing holds the failed work any more."""
        try:
            return work()
        except RuntimeError as error:
            if not any(sign in str(error) for sign in OUT_OF_MEMORY):
                raise
            why = str(error).splitlines()[0]
        self.synchronize()  # the input may still be on its way
        raise OutOfMemory(why)


def _versions(cuda: bool) -> dict[str, Optional[str]]:
    versions: dict[str, Optional[str]] = {"python": platform.python_version(), "torch": torch.__version__}
    if cuda:
        import triton

        versions.update(triton=triton.__version__, cuda=torch.version.cuda, driver=_driver())
    return versions


def _driver() -> Optional[str]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
