"""MindSpore, kernel by kernel (jit level O0): MindFormers' paged Llama on an Ascend, or the same path on a CPU.

On an Ascend the model runs as it is, with its fused kernels. On a CPU the kernels that only an Ascend has are replaced
by kernels.py. Which of the two it is goes into `describe` as kernels: fused or reference.

A step makes at most two calls of the model: one with the prompts that start at 0, flattened; one over the paged cache
with everything else, one row a token. Prompts of one token run as decodes at position 0. Later chunks of a prompt go
through the second call, since MindFormers' prompt attention cannot see the cache: each token is a row that sees what
the rows before it wrote in the same call. That is exact, and costs as much attention as decodes of these rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Optional

from servesim.calibrate.device.backend import Backend, Model, OutOfMemory, Row
from servesim.calibrate.device.worker import first_line
from servesim.core import BadInput

from .environment import device_name, environment, frameworks, versions
from .weights import fill, read

KERNELS = ("fused", "reference")
MODES = ("graph", "pynative")
OUT_OF_MEMORY = ("out of memory", "memory not enough", "memory isn't enough", "alloc failed", "malloc", "bad_alloc")


class Kbk(Backend):
    """A Llama of MindFormers on the MindSpore of this interpreter."""

    name = "kbk"

    def __init__(
        self,
        device: Optional[str] = None,  # Ascend or CPU; an Ascend if there is one
        kernels: Optional[str] = None,  # fused or reference; what the device has
        mode: str = "graph",  # graph (kernel by kernel) or pynative
        dtype: Optional[str] = None,  # float16 with fused kernels, float32 with reference kernels
        threads: Optional[int] = None,  # of a CPU, one a core; with 1, steps are slower and far more alike
    ) -> None:
        if mode not in MODES:
            raise BadInput(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
        if kernels not in (None, *KERNELS):
            raise BadInput(f"kernels: expected one of {', '.join(KERNELS)}, got {kernels!r}")
        if threads is not None and (type(threads) is not int or threads < 1):
            raise BadInput(f"threads: expected at least 1, got {threads!r}")
        self.ms, self.mindformers = frameworks()
        self.device = device or ("Ascend" if self.ms.device_context.ascend.is_available() else "CPU")
        self.kernels = kernels or ("fused" if self.device == "Ascend" else "reference")
        self.mode = mode
        self.threads = threads
        self.dtype = dtype or ("float16" if self.kernels == "fused" else "float32")
        self.model: Optional[Model] = None
        self.net: Any = None
        self._plain: Any = None
        self._scores: list[Any] = []
        self._begin()

    def _begin(self) -> None:
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
            ms.set_context(mode=ms.PYNATIVE_MODE, pynative_synchronize=True)  # eight times as fast on a CPU

    def load(
        self, model: Model, blocks: int, block_size: int, host_blocks: int = 0, weights: Optional[str] = None
    ) -> None:
        self.model, self.blocks, self.block_size, self.host_blocks = model, blocks, block_size, host_blocks
        self.net = self._plain = None  # what was loaded before makes room first
        with memory_errors():
            with environment(RUN_MODE="predict"):
                self.net = self._built(use_past=True, use_flash_attention=True)
            self.net.set_dynamic_inputs()
            if weights is None:
                fill(self.ms, self.net)
            else:
                read(self.ms, self.mindformers, self.net, weights)
            self._host = [self._host_copy(cache) for cache in self._caches()]
        self.synchronize()  # on a CPU the first one of a process returns at once
        self.step([Row([0, 0], 0, [0])])  # compiles the graph of prompts, the next one that of decodes
        self.step([Row([0], 2, [0])])
        self.synchronize()

    def _built(self, **settings: Any) -> Any:
        """Return the network, with stand-ins for the kernels that are not there."""
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
            pad_token_id=-1,  # else the plain pass would not see token 0
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
        """Have MindFormers build its layers from the kernels in use; yields the model's class."""
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
        self._check(rows)
        prompts = [index for index, row in enumerate(rows) if row.position == 0 and len(row.tokens) > 1]
        others = [index for index, row in enumerate(rows) if row.position > 0 or len(row.tokens) == 1]
        scores: dict[int, Any] = {}
        with memory_errors():
            if prompts:
                scores.update(zip(prompts, self._prompts([rows[index] for index in prompts])))
            if others:
                scores.update(zip(others, self._paged([rows[index] for index in others])))
        self._scores = [scores[index] for index in range(len(rows))]
        return [int(row.argmax()) for row in self._scores]

    def logits(self) -> Any:
        """Return the scores of the last step's rows, [rows, vocab]: for checks."""
        import numpy as np

        return np.stack(self._scores)

    def _check(self, rows: Sequence[Row]) -> None:
        assert self.model is not None, "load first"
        for row in rows:
            end = row.position + len(row.tokens)
            if not row.tokens or end > self.model.context or end > len(row.table) * self.block_size:
                raise BadInput(
                    f"row: {len(row.tokens)} tokens behind {row.position} in {len(row.table)} blocks of "
                    f"{self.block_size}, expected some tokens, room for them, and at most {self.model.context} in all"
                )

    def _prompts(self, rows: Sequence[Row]) -> Any:
        """Run whole prompts, or first chunks of prompts, flattened into one row."""
        import numpy as np

        tokens = [np.asarray(row.tokens, np.int32) for row in rows]
        flat = np.concatenate(tokens).reshape(1, -1)
        slots = np.concatenate([self._slots(row) for row in rows])
        lengths = np.array([len(row.tokens) for row in rows], np.int32)
        return self._forward(flat, lengths, self._tables(rows, lengths), slots, True, origin_inputs=tokens)

    def _paged(self, rows: Sequence[Row]) -> Any:
        """Run tokens that stand behind cached ones, a row each; only the last of a chunk is asked for its scores."""
        import numpy as np

        single = [
            Row([token], row.position + offset, row.table) for row in rows for offset, token in enumerate(row.tokens)
        ]
        tokens = np.array([row.tokens for row in single], np.int32)
        slots = np.concatenate([self._slots(row) for row in single])
        lengths = np.array([row.position + 1 for row in single], np.int32)
        scores = self._forward(tokens, lengths, self._tables(single, lengths), slots, False)
        return scores[np.cumsum([len(row.tokens) for row in rows]) - 1]

    def _slots(self, row: Row) -> Any:
        """Return where in the cache the tokens of a row go."""
        import numpy as np

        places = np.arange(row.position, row.position + len(row.tokens), dtype=np.int32)
        blocks = np.asarray(row.table, np.int32)[places // self.block_size]
        return blocks * np.int32(self.block_size) + places % np.int32(self.block_size)

    def _tables(self, rows: Sequence[Row], lengths: Any) -> Any:
        """Return the block tables as one array, no wider than the longest row needs and padded with -1."""
        import numpy as np

        width = -(-int(lengths.max()) // self.block_size)
        tables = np.full((len(rows), width), -1, np.int32)
        for table, row in zip(tables, rows):
            blocks = row.table[:width]
            table[: len(blocks)] = blocks
        if tables.max() >= self.blocks:
            raise BadInput(f"row: block {tables.max()}, expected one of the {self.blocks} that were loaded")
        return tables

    def _forward(self, tokens: Any, lengths: Any, tables: Any, slots: Any, prefill: bool, **more: Any) -> Any:
        """Call the model as llm-serving's kbk backend does, and bring its scores to the host."""
        if self.mode == "pynative":  # a graph is compiled once with its flag; without graphs it must be set each time
            self.net.add_flags_custom(is_first_iteration=prefill)
        answer, _ = self.net.forward(
            tokens, lengths, block_tables=tables, slot_mapping=slots, prefill=prefill, use_past=True, **more
        )
        return (answer[0] if isinstance(answer, tuple) else answer).asnumpy()

    def plain(self, tokens: Sequence[int]) -> Any:
        """Return the scores after each token of a sequence, from the same weights in one pass and without a cache."""
        import numpy as np

        if self._plain is None:
            with environment(RUN_MODE=None):  # predict mode would insist on flash attention
                self._plain = self._built(use_past=False, use_flash_attention=self.kernels == "fused")
            self._plain.set_dynamic_inputs()
            self.ms.load_param_into_net(self._plain, {p.name: p for p in self.net.get_parameters()})
        answer, _ = self._plain.forward(np.asarray([tokens], np.int32), np.array([len(tokens)], np.int32))
        return (answer[0] if isinstance(answer, tuple) else answer).asnumpy().reshape(len(tokens), -1)

    def _caches(self) -> list[Any]:
        assert self.model is not None, "load first"
        return [cache for layer in range(self.model.layers) for cache in self.net.kvcache(layer)]

    def _host_copy(self, cache: Any) -> Any:
        """Return host memory of the same form as a cache."""
        from mindspore.common.initializer import Zero

        rows = cache.shape[0] // self.blocks * max(self.host_blocks, 1)
        host = self.ms.Tensor(shape=(rows, *cache.shape[1:]), dtype=cache.dtype, init=Zero())
        return self.ms.Parameter(host, name="host_of_" + cache.name, requires_grad=False).init_data()

    def _swap(self, pairs: Sequence[tuple[int, int]], out: bool) -> None:
        import numpy as np
        from mindspore._c_expression import swap_cache

        if not pairs:
            return
        limits = (self.blocks, self.host_blocks) if out else (self.host_blocks, self.blocks)
        if (np.asarray(pairs) >= limits).any():
            raise BadInput(f"swap: expected device blocks below {self.blocks} and host blocks below {self.host_blocks}")
        caches = self._caches()
        rows = caches[0].shape[0] // self.blocks  # a block is one row of a fused cache, many of a reference one
        moves = (np.asarray(pairs, np.int64)[:, None, :] * rows + np.arange(rows)[None, :, None]).reshape(-1, 2)
        for host, cache in zip(self._host, caches):
            swap_cache(host, cache, self.ms.Tensor(moves), out)

    def synchronize(self) -> None:
        self.ms.runtime.synchronize()

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = {
            "backend": self.name,
            "device": device_name(self.ms, self.device),
            "kernels": self.kernels,
            "mode": self.mode,
            "jit_level": "O0" if self.mode == "graph" else None,
            "dtype": self.dtype,
            "threads": self.threads,
            "versions": versions(),
        }
        if self.model is not None:
            described.update(
                model=asdict(self.model),
                blocks=self.blocks,
                block_size=self.block_size,
                host_blocks=self.host_blocks,
                graphs=len(self.net.compile_cache),
            )
        return described


@contextmanager
def memory_errors() -> Iterator[None]:
    """Tell a device that has no room from one that fails otherwise; MindSpore has one kind of error for both."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or any(words in str(error).lower() for words in OUT_OF_MEMORY):
            raise OutOfMemory(first_line(error)) from error
        raise
