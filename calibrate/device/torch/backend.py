"""The torch backend: a paged Llama on a CUDA device, or on the CPU with reference operators.

A step is one packed forward pass for prompts, decodes or both. It is padded to a bucket (gear): decodes by rows,
prompts and mixed steps by tokens. On CUDA every bucket is a recorded graph. The host then fills one array, copies it,
starts the graph and reads the tokens. Larger steps run without graph and padding; they are long enough
to hide the launch time. A prompt of one token runs as a decode at position 0.

On CUDA a step can be launched while the one before runs. Its unknown tokens are copied on the device, from the result
of that step into the input, before its graph starts. The launch of a step without graph takes many milliseconds, so
another thread does it: the tokens of the step before can be read meanwhile. The CPU computes a step when its tokens are
collected.
"""
# mypy: allow-untyped-calls
# (parts of torch.cuda have no annotations)

from __future__ import annotations

import platform
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Optional, TypeVar

import numpy as np
import torch
from servesim.calibrate.device.backend import ROW_BUCKETS, Backend, Model, OutOfMemory, Row, check_choice
from servesim.core import BadInput

from .model import Llama, random_weights, stored_weights
from .operators import Batch, ReferenceOperators
from .packing import GraphShape, PackedStep, Packer

TOKEN_BUCKETS = (32, 64, 96, 128, 160, 192, 256, 320, 384, 512)  # padded tokens of prefill and mixed steps
INPUT_SIZE = 1 << 21  # maximum integers of a packed step
# parts of the error messages of CUDA, of its libraries, of the CPU (x86 and Arm)
OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")

VARIANTS = ("device", "host")  # of token selection; the first one is the default

Result = TypeVar("Result")


class TorchBackend(Backend):
    """Runs steps with torch; see the module docstring."""

    name = "torch"
    speculation = "verified"
    packer: Packer
    selection: TokenSelection
    staging: list[torch.Tensor]  # input on the host: while the device uses one buffer, the host fills the other one
    ints: torch.Tensor  # input on the device

    def __init__(
        self,
        device: Optional[str] = None,  # cuda, cuda:1 or cpu; default: cuda if available
        seed: int = 0,  # of random weights
        dtype: Optional[str] = None,  # default: the dtype of the model on CUDA, float32 on the CPU
        row_buckets: Sequence[int] = ROW_BUCKETS,  # padding buckets, in rows
        token_buckets: Sequence[int] = TOKEN_BUCKETS,  # padding buckets, in tokens
        kernels: Optional[str] = None,  # fused or reference; default: fused on CUDA, reference on the CPU
        graphs: bool = True,  # False measures the benefit of graphs
        threads: Optional[int] = None,  # CPU threads, default one per core; 1 varies least on a busy host
        sampling: str = VARIANTS[0],  # device: argmax in the model call; host: copy the logits and select there
    ) -> None:
        check_choice("sampling", sampling, VARIANTS)
        self.sampling, self.samplings = sampling, VARIANTS
        # It has buffers for two steps. Tokens that the host selects are not on the device when the next step starts.
        self.max_steps_in_flight = 2 if sampling == "device" else 1
        if threads is not None and (type(threads) is not int or threads < 1):
            raise BadInput(f"threads: expected at least 1, got {threads!r}")
        available = torch.cuda.is_available()
        self.device = torch.device(device or ("cuda" if available else "cpu"))
        if self.device.type not in ("cuda", "cpu") or (self.device.type == "cuda" and not available):
            raise BadInput(f"device: {self.device}, but torch has only the cpu{' and cuda' if available else ''} here")
        self.seed, self.dtype_name = seed, dtype
        self.row_buckets, self.token_buckets = tuple(row_buckets), tuple(token_buckets)
        self.cuda = self.device.type == "cuda"
        self.threads = None if self.cuda else threads
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        self.kernels = kernels or ("fused" if self.cuda else "reference")
        self.use_graphs = graphs and self.cuda and self.kernels == "fused"
        if self.kernels not in ("fused", "reference") or (self.kernels == "fused" and not self.cuda):
            raise BadInput(f"kernels: {self.kernels} on {self.device}, expected reference, or fused on CUDA")
        self.graphs: dict[GraphShape, Any] = {}
        self.host: list[torch.Tensor] = []
        self.loaded: Optional[Llama] = None
        self.buffer = 0  # of `staging`, filled last
        self.launched: deque[tuple[PackedStep, int]] = deque()  # steps in flight, and the buffer of each
        self.thread = ThreadPoolExecutor(1)  # launches steps without graph; it starts with the first one
        self.launching: Optional[Future[None]] = None

    def load(
        self, model: Model, blocks: int, block_size: int, host_blocks: int = 0, weights: Optional[str] = None
    ) -> None:
        self.graphs, self.loaded, self.host = {}, None, []
        self.launched.clear()
        self.model, self.blocks, self.block_size = model, blocks, block_size
        self.dtype = getattr(torch, self.dtype_name or (model.dtype if self.cuda else "float32"))
        self._convert_memory_errors(lambda: self._build(host_blocks, weights))

    def launch(self, rows: Sequence[Row]) -> None:
        assert len(self.launched) < self.max_steps_in_flight, f"{len(self.launched)} steps are in flight"
        self._finish_launch()
        step = self._pack(rows)
        if self.cuda and self.launched and step.shape not in self.graphs:
            self.launching = self.thread.submit(self._start, step, self.buffer)
        elif self.cuda:
            self._start(step, self.buffer)
        self.launched.append((step, self.buffer))

    def _start(self, step: PackedStep, buffer: int) -> None:
        """Start a packed step and the copy of its tokens."""
        self._run(step, buffer)
        if self.sampling == "device":
            self.selection.start_copy(self.next_tokens, buffer)

    def _finish_launch(self) -> None:
        """Wait until the other thread has launched its step."""
        if self.launching is not None:
            launching, self.launching = self.launching, None
            launching.result()

    def collect(self) -> list[int]:
        step, buffer = self.launched.popleft()
        if not self.launched:
            self._finish_launch()
        if not self.cuda:
            self._run(step, buffer)
        self.order = step.order
        if not self.cuda or self.sampling == "host":
            return self.select_tokens(self.sampling)
        return self._in_order(self.selection.finish_copy(step.outputs, buffer))

    def compute(self, rows: Sequence[Row]) -> None:
        step = self._pack(rows)
        self._run(step, self.buffer)
        self.order = step.order

    def _pack(self, rows: Sequence[Row]) -> PackedStep:
        """Write the rows into the buffer that the step in flight does not use."""
        self._llama()
        self.buffer = 1 - self.buffer
        self.packer.buffer = self.staging[self.buffer].numpy()
        return self.packer.pack(rows, self.launched[-1][0] if self.launched else None)

    def _run(self, step: PackedStep, buffer: int) -> None:
        """Start a packed step; on the CPU, compute it."""
        llama, used, staging = self._llama(), step.used, self.staging[buffer]

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            ints = staging
            if self.cuda:
                ints = self.ints
                ints[:used].copy_(staging[:used], non_blocking=True)
            if step.unknown:
                target, source = ints[used - 2 * step.unknown : used].long().chunk(2)
                ints[target] = self.next_tokens[source].int()
            graph = self.graphs.get(step.shape)
            if graph is None:
                return llama.forward(Batch(step.shape, ints))
            graph.replay()
            return llama.logits, llama.next_tokens

        logits, next_tokens = self._convert_memory_errors(run)
        self.last_logits, self.next_tokens = logits[: step.outputs], next_tokens[: step.outputs]

    def select_tokens(self, sampling: str) -> list[int]:
        def run() -> list[int]:
            if sampling == "host":
                return self.selection.select_on_host(self.last_logits)
            return self.selection.read_tokens(self.next_tokens)

        return self._in_order(self._convert_memory_errors(run))

    def _in_order(self, packed_tokens: list[int]) -> list[int]:
        """Return the tokens in the order of the rows of the step."""
        if self.order is None:
            return packed_tokens
        tokens = [0] * len(packed_tokens)
        for row, token in zip(self.order, packed_tokens):
            tokens[row] = token
        return tokens

    def logits(self, rows: Optional[Sequence[int]] = None) -> Any:
        if self.launched and self.cuda:
            return None
        places = np.arange(len(self.last_logits)) if self.order is None else np.argsort(self.order)
        chosen = torch.from_numpy(places if rows is None else places[list(rows)]).to(self.device)
        # Chosen on the device, so that only these are copied. The next step writes to the memory of all.
        return self.last_logits[chosen].float().cpu().numpy()

    def _swap(self, pairs: Sequence[tuple[int, int]], to_host: bool) -> None:
        """Start the copies. The device runs later steps and copies after them."""
        assert self.cuda or not self.launched, "the CPU has not computed the step in flight"
        self._finish_launch()
        device: tuple[Any, int] = self._llama().cache, self.blocks
        host: tuple[Any, int] = self.host, len(self.host)
        (source, sources), (target, targets) = (device, host) if to_host else (host, device)
        for source_block, target_block in pairs:
            if not (0 <= source_block < sources and 0 <= target_block < targets):
                raise ValueError(f"swap: block {source_block} of {sources} to block {target_block} of {targets}")
        for source_block, target_block in pairs:
            target[target_block].copy_(source[source_block], non_blocking=True)

    def synchronize(self) -> None:
        self._finish_launch()
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def describe(self) -> dict[str, Any]:
        about: dict[str, Any] = {
            "backend": self.name,
            "device": torch.cuda.get_device_name(self.device) if self.cuda else f"cpu {platform.machine()}",
            "kernels": self.kernels,
            "threads": self.threads,
            "sampling": self.sampling,
            "versions": _versions(self.cuda),
        }
        if self.loaded is not None:
            about.update(
                dtype=str(self.dtype).replace("torch.", ""),
                model=asdict(self.model),
                blocks=self.blocks,
                block_size=self.block_size,
                host_blocks=len(self.host),
                graphs=len(self.graphs),
                row_buckets=list(self.packer.row_buckets),
                token_buckets=list(self.packer.token_buckets),
            )
        return about

    def _llama(self) -> Llama:
        if self.loaded is None:
            raise RuntimeError("no model is loaded")
        return self.loaded

    def _build(self, host_blocks: int, path: Optional[str]) -> None:
        model, device, blocks = self.model, self.device, self.blocks
        operators = self._operators()
        shape = (model.layers, 2, self.block_size, model.kv_heads, model.head_size)
        cache = torch.zeros(blocks + 1, *shape, dtype=self.dtype, device=device)  # the last block is for padding
        if path is None:
            weights = random_weights(model, device, self.dtype, self.seed)
        else:
            weights = stored_weights(model, device, self.dtype, path)
        self.staging = [torch.zeros(INPUT_SIZE, dtype=torch.int32, pin_memory=self.cuda) for _ in range(2)]
        self.ints = torch.zeros_like(self.staging[0], device=device) if self.cuda else self.staging[0]
        row_buckets = [rows for rows in self.row_buckets if rows <= max(blocks, 1)]  # each row needs at least one block
        self.packer = Packer(
            self.staging[0].numpy(), blocks, self.block_size, model.context, model.vocab, operators.tile, row_buckets,
            self.token_buckets,
        )  # fmt: skip
        llama = Llama(weights, operators, cache, max(row_buckets))
        if self.use_graphs:
            self._record(llama)
        self.selection = TokenSelection(llama.logits, self.cuda)
        self.host = [torch.empty(shape, dtype=self.dtype, pin_memory=self.cuda) for _ in range(host_blocks)]
        self.loaded = llama

    def _operators(self) -> ReferenceOperators:
        if self.kernels == "reference":
            return ReferenceOperators(self.model, self.block_size, self.device)
        from .fused_operators import FusedOperators  # triton is only installed with torch for CUDA

        return FusedOperators(self.model, self.block_size, self.device)

    def _record(self, llama: Llama) -> None:
        """Record a graph for every graph shape. The largest comes first, so the others fit into its memory."""
        pool = torch.cuda.graph_pool_handle()
        for shape in self.packer.graph_shapes():
            used = self.packer.fill_with_padding(shape)
            self.ints[:used].copy_(self.staging[0][:used])
            batch = Batch(shape, self.ints)
            llama.forward(batch)  # compiles kernels; the libraries choose theirs
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                llama.forward(batch)
            graph.replay()  # the first replay also uploads it
            torch.cuda.synchronize(self.device)
            self.graphs[shape] = graph

    def _convert_memory_errors(self, work: Callable[[], Result]) -> Result:
        """Run the work and convert a memory error into OutOfMemory.

        It is raised outside `except`, where no traceback keeps the failed work in memory.
        """
        try:
            return work()
        except RuntimeError as error:
            if not any(text in str(error) for text in OUT_OF_MEMORY):
                raise
            message = str(error).splitlines()[0]
        if self.cuda:
            torch.cuda.synchronize(self.device)  # the copy of the input may still run
        raise OutOfMemory(message)


class TokenSelection:
    """Selects the next token of each row: on the device as a part of the model call, or on the host from the logits.

    Of equal logits, the first one is selected.
    A copy to pinned memory and a busy wait react faster than a blocking copy. It has two buffers, so that the tokens of
    one step can be copied while those of another one are read. Logits of more rows than usual are copied without it.
    """

    def __init__(self, logits: torch.Tensor, cuda: bool) -> None:
        self.cuda = cuda
        self.rows, vocab = logits.shape
        if cuda:
            self.host_tokens = [torch.zeros(self.rows, dtype=torch.int64, pin_memory=True) for _ in range(2)]
            self.host_logits = torch.zeros(0, vocab)
            self.copied = [torch.cuda.Event() for _ in range(2)]

    def read_tokens(self, next_tokens: torch.Tensor) -> list[int]:
        """Return tokens that the device has selected."""
        if self.cuda:
            self.start_copy(next_tokens, 0)
            return self.finish_copy(len(next_tokens), 0)
        tokens: list[int] = next_tokens.tolist()
        return tokens

    def start_copy(self, next_tokens: torch.Tensor, buffer: int) -> None:
        """Start the copy of tokens into one of the buffers, after the work that the device has now."""
        if len(next_tokens) > len(self.host_tokens[buffer]):
            self.host_tokens[buffer] = torch.zeros(len(next_tokens), dtype=torch.int64, pin_memory=True)
        self._copy(next_tokens, self.host_tokens[buffer], buffer)

    def finish_copy(self, rows: int, buffer: int) -> list[int]:
        """Wait for a copy and return the tokens."""
        self._wait(buffer)
        tokens: list[int] = self.host_tokens[buffer][:rows].tolist()
        return tokens

    def select_on_host(self, logits: torch.Tensor) -> list[int]:
        """Copy the logits to the host and select there, with numpy: threads of torch would make single steps slow."""
        logits = logits.float()
        if self.cuda and len(logits) <= self.rows:
            if not len(self.host_logits):  # many megabytes, which only this variant needs
                self.host_logits = torch.zeros(self.rows, logits.shape[1], pin_memory=True)
            logits = self._copy(logits, self.host_logits, 0)
            self._wait(0)
        tokens: list[int] = logits.cpu().numpy().argmax(axis=1).tolist()
        return tokens

    def _copy(self, source: torch.Tensor, target: torch.Tensor, buffer: int) -> torch.Tensor:
        target = target[: len(source)]
        target.copy_(source, non_blocking=True)
        self.copied[buffer].record()
        return target

    def _wait(self, buffer: int) -> None:
        while not self.copied[buffer].query():
            time.sleep(0)  # releases the interpreter lock for other threads


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
