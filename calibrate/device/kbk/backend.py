"""The kbk backend: MindFormers' paged Llama on MindSpore, kernel by kernel (jit level O0), on an Ascend or a CPU.

On an Ascend the model runs unchanged, with its fused kernels. On a CPU, kernels.py replaces the kernels that only an
Ascend has. `describe` returns which of the two as kernels: fused or reference.

A step makes at most two model calls. The first runs the prompts that start at position 0, flattened. The second runs
all other tokens over the paged cache, one row per token; a prompt of one token is a decode at position 0. Later chunks
of a prompt use the second call, because MindFormers' prompt attention does not read the cache. Each row reads the keys
that earlier rows wrote in the same call. The result is exact; the attention costs as much as decodes of these rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Optional

import numpy as np
from servesim.calibrate.device.backend import Backend, Model, OutOfMemory, Row, check_choice
from servesim.calibrate.device.worker import first_line
from servesim.core import BadInput

from .mindspore_setup import (
    VARIANTS,
    check_variant,
    device_name,
    environment,
    fill_random,
    frameworks,
    read_checkpoint,
    select_tokens,
    supported_variants,
    versions,
)

KERNELS = ("fused", "reference")
MODES = ("graph", "pynative")
OUT_OF_MEMORY = ("out of memory", "memory not enough", "memory isn't enough", "alloc failed", "malloc", "bad_alloc")


class KbkBackend(Backend):
    """Runs MindFormers' Llama on the MindSpore of this interpreter."""

    name = "kbk"

    def __init__(
        self,
        device: Optional[str] = None,  # Ascend or CPU; default: Ascend if available
        kernels: Optional[str] = None,  # fused or reference; default: fused on Ascend, reference on the CPU
        mode: str = "graph",  # graph (kernel by kernel) or pynative
        dtype: Optional[str] = None,  # default: float16 with fused kernels, float32 with reference kernels
        threads: Optional[int] = None,  # CPU threads, default one per core; 1 is slower but varies far less
        sampling: str = VARIANTS[0],  # host: select from copied logits; ops or mint: on the device, with that operator
    ) -> None:
        check_choice("mode", mode, MODES)
        check_choice("kernels", kernels or KERNELS[0], KERNELS)
        check_choice("sampling", sampling, VARIANTS)
        if threads is not None and (type(threads) is not int or threads < 1):
            raise BadInput(f"threads: expected at least 1, got {threads!r}")
        self.ms, self.mindformers = frameworks()
        self.device = device or ("Ascend" if self.ms.device_context.ascend.is_available() else "CPU")
        self.kernels = kernels or ("fused" if self.device == "Ascend" else "reference")
        check_variant(sampling, self.device)
        self.sampling, self.samplings = sampling, supported_variants(self.device)
        self.mode = mode
        self.threads = threads
        self.dtype = dtype or ("float16" if self.kernels == "fused" else "float32")
        self.model: Optional[Model] = None
        self.net: Any = None
        self._calls: list[tuple[list[int], Any]] = []  # rows of each model call of the last step, and its logits
        self._configure()

    def _configure(self) -> None:
        ms = self.ms
        ms.set_device(self.device)
        if self.threads is not None:
            ms.device_context.cpu.op_tuning.threads_num(self.threads)
            ms.runtime.dispatch_threads_num(self.threads)
        config = {"jit_level": "O0"}
        if self.device == "Ascend":
            config["infer_boost"] = "on"
        if self.mode == "graph":
            ms.set_context(mode=ms.GRAPH_MODE, jit_config=config)
        else:
            ms.set_context(mode=ms.PYNATIVE_MODE, pynative_synchronize=True)  # 8 times as fast on a CPU

    def load(
        self, model: Model, blocks: int, block_size: int, host_blocks: int = 0, weights: Optional[str] = None
    ) -> None:
        self.model, self.blocks, self.block_size, self.host_blocks = model, blocks, block_size, host_blocks
        self.net = None  # frees the previous model first
        with memory_errors():
            with environment(RUN_MODE="predict"):
                self.net = self._build(use_past=True, use_flash_attention=True)
            self.net.set_dynamic_inputs()
            if weights is None:
                fill_random(self.ms, self.net)
            else:
                read_checkpoint(self.ms, self.mindformers, self.net, weights)
            self._host = [self._host_copy(cache) for cache in self._caches()]
        self.synchronize()  # on a CPU, the first synchronize of a process does not wait
        self.step([Row([0, 0], 0, [0])])  # compiles the prefill graph
        self.step([Row([0], 2, [0])])  # compiles the decode graph
        self.synchronize()

    def _build(self, **settings: Any) -> Any:
        """Return the network, with reference kernels where the device has no fused ones."""
        model = self.model
        assert model is not None
        config = self.mindformers.LlamaConfig(
            batch_size=1,
            seq_length=model.context,
            hidden_size=model.hidden,
            num_layers=model.layers,
            num_heads=model.heads,
            n_kv_heads=model.kv_heads,
            intermediate_size=model.intermediate,
            vocab_size=model.vocab,
            compute_dtype=self.dtype,
            param_init_type=self.dtype,
            rotary_dtype=self.dtype,
            layernorm_compute_type="float32",
            softmax_compute_type="float32",
            pad_token_id=-1,  # else the pass without a cache would mask token 0
            is_dynamic=True,
            use_rope_slice=True,
            fused_rms_norm=self.kernels == "fused",
            block_size=self.block_size,
            num_blocks=self.blocks,
            **settings,
        )
        with self._kernels() as kind:
            net = kind(config)
        net.set_train(False)
        return net

    @contextmanager
    def _kernels(self) -> Iterator[Any]:
        """Make MindFormers build its layers from the selected kernels; yield the model class."""
        if self.kernels == "fused":
            yield self.mindformers.LlamaForCausalLM
            return
        from mindformers.models.llama import llama_transformer
        from mindformers.modules import infer_attention

        from . import kernels

        fused = llama_transformer.InferAttention, infer_attention.PagedAttentionMgr
        llama_transformer.InferAttention = kernels.ReferenceAttention
        infer_attention.PagedAttentionMgr = kernels.ReferenceCache
        try:
            yield kernels.ReferenceLlama
        finally:
            llama_transformer.InferAttention, infer_attention.PagedAttentionMgr = fused

    def step(self, rows: Sequence[Row]) -> list[int]:
        with memory_errors():
            self.compute(rows)
            return self.select_tokens(self.sampling)

    def compute(self, rows: Sequence[Row]) -> None:
        assert self.model is not None, "load first"
        check_rows(rows, self.model, self.block_size)
        prompts = [index for index, row in enumerate(rows) if row.position == 0 and len(row.tokens) > 1]
        others = [index for index, row in enumerate(rows) if row.position > 0 or len(row.tokens) == 1]
        self._calls = []
        if prompts:
            self._calls.append((prompts, self._run_prompts([rows[index] for index in prompts])))
        if others:
            self._calls.append((others, self._run_paged([rows[index] for index in others])))

    def select_tokens(self, sampling: str) -> list[int]:
        tokens: dict[int, int] = {}
        for rows, logits in self._calls:
            tokens.update(zip(rows, select_tokens(self.ms, sampling, logits).tolist()))
        return [tokens[row] for row in range(len(tokens))]

    def logits(self, rows: Optional[Sequence[int]] = None) -> Any:
        places = np.argsort([row for computed, _ in self._calls for row in computed])
        copied = np.concatenate([logits.asnumpy() for _, logits in self._calls])
        return copied[places if rows is None else places[list(rows)]]

    def _run_prompts(self, rows: Sequence[Row]) -> Any:
        """Run whole prompts, or first chunks of prompts, flattened into one row."""
        tokens = [np.asarray(row.tokens, np.int32) for row in rows]
        flat = np.concatenate(tokens).reshape(1, -1)
        lengths = np.array([len(row.tokens) for row in rows], np.int32)
        return self._forward(
            flat, lengths, self._tables(rows, lengths), self._cache_slots(rows), True, origin_inputs=tokens
        )

    def _run_paged(self, rows: Sequence[Row]) -> Any:
        """Run tokens that follow cached ones, one row per token. Return the logits of the last token of each chunk."""
        single = [
            Row([token], row.position + offset, row.table) for row in rows for offset, token in enumerate(row.tokens)
        ]
        tokens = np.array([row.tokens for row in single], np.int32)
        lengths = np.array([row.position + 1 for row in single], np.int32)
        logits = self._forward(tokens, lengths, self._tables(single, lengths), self._cache_slots(single), False)
        if len(single) == len(rows):
            return logits
        last = np.cumsum([len(row.tokens) for row in rows]) - 1
        return self.ms.ops.gather(logits, self.ms.Tensor(last, self.ms.int32), 0)

    def _cache_slots(self, rows: Sequence[Row]) -> Any:
        """Return the cache slot of each token of the rows."""
        slots = []
        for row in rows:
            positions = np.arange(row.position, row.position + len(row.tokens), dtype=np.int32)
            blocks = np.asarray(row.table, np.int32)[positions // self.block_size]
            slots.append(blocks * np.int32(self.block_size) + positions % np.int32(self.block_size))
        return np.concatenate(slots)

    def _tables(self, rows: Sequence[Row], lengths: Any) -> Any:
        """Return the block tables as one array, as wide as the longest row needs, padded with -1."""
        width = -(-int(lengths.max()) // self.block_size)
        tables = np.full((len(rows), width), -1, np.int32)
        for table, row in zip(tables, rows):
            used = row.table[:width]
            table[: len(used)] = used
        if tables.max() >= self.blocks:
            raise BadInput(f"row: block {tables.max()}, expected a block below {self.blocks}")
        return tables

    def _forward(self, tokens: Any, lengths: Any, tables: Any, slots: Any, prefill: bool, **more: Any) -> Any:
        """Call the model as llm-serving's kbk backend does, and return its logits on the device."""
        if self.mode == "pynative":  # a graph is compiled with its flag; without graphs, every call sets it
            self.net.add_flags_custom(is_first_iteration=prefill)
        output, _ = self.net.forward(
            tokens, lengths, block_tables=tables, slot_mapping=slots, prefill=prefill, use_past=True, **more
        )
        return output[0] if isinstance(output, tuple) else output

    def _caches(self) -> list[Any]:
        assert self.model is not None, "load first"
        return [cache for layer in range(self.model.layers) for cache in self.net.kvcache(layer)]

    def _host_copy(self, cache: Any) -> Any:
        """Return host memory with the layout of a cache."""
        from mindspore.common.initializer import Zero

        rows = cache.shape[0] // self.blocks * max(self.host_blocks, 1)
        host = self.ms.Tensor(shape=(rows, *cache.shape[1:]), dtype=cache.dtype, init=Zero())
        return self.ms.Parameter(host, name="host_of_" + cache.name, requires_grad=False).init_data()

    def _swap(self, pairs: Sequence[tuple[int, int]], to_host: bool) -> None:
        from mindspore._c_expression import swap_cache

        if not pairs:
            return
        limits = (self.blocks, self.host_blocks) if to_host else (self.host_blocks, self.blocks)
        if (np.asarray(pairs) >= limits).any():
            raise BadInput(f"swap: expected device blocks below {self.blocks} and host blocks below {self.host_blocks}")
        caches = self._caches()
        rows = caches[0].shape[0] // self.blocks  # rows per block: one in a fused cache, many in a reference cache
        moves = (np.asarray(pairs, np.int64)[:, None, :] * rows + np.arange(rows)[None, :, None]).reshape(-1, 2)
        for host, cache in zip(self._host, caches):
            swap_cache(host, cache, self.ms.Tensor(moves), to_host)

    def synchronize(self) -> None:
        self.ms.runtime.synchronize()

    def describe(self) -> dict[str, Any]:
        about: dict[str, Any] = {
            "backend": self.name,
            "device": device_name(self.ms, self.device),
            "kernels": self.kernels,
            "mode": self.mode,
            "jit_level": "O0" if self.mode == "graph" else None,
            "dtype": self.dtype,
            "threads": self.threads,
            "sampling": self.sampling,
            "versions": versions(),
        }
        if self.model is not None:
            about.update(
                model=asdict(self.model),
                blocks=self.blocks,
                block_size=self.block_size,
                host_blocks=self.host_blocks,
                graphs=len(self.net.compile_cache),
            )
        return about


@contextmanager
def memory_errors() -> Iterator[None]:
    """Convert memory errors into OutOfMemory. MindSpore raises RuntimeError for these and for other failures."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or any(text in str(error).lower() for text in OUT_OF_MEMORY):
            raise OutOfMemory(first_line(error)) from error
        raise


def check_rows(rows: Sequence[Row], model: Model, block_size: int) -> None:
    """Raise BadInput for a row without tokens, with too few blocks, or longer than the model's context."""
    for row in rows:
        end = row.position + len(row.tokens)
        if not row.tokens or end > model.context or end > len(row.table) * block_size:
            raise BadInput(
                f"row: {len(row.tokens)} tokens after {row.position} cached ones in {len(row.table)} blocks of "
                f"{block_size}, expected at least 1 token, enough blocks, and a length of at most {model.context}"
            )
