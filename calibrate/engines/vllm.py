"""The installed vLLM without a model: its own EngineCore, scheduler and KV cache, with an executor that pretends.

Only the executor is ours. Configuration, checks, block pool, prefix cache and step functions are those of the installed
version. The platform of this machine has no say in the scheduler: the CPU's would switch asynchronous scheduling off.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import json
import os
import sys
from concurrent.futures import Future
from dataclasses import fields
from typing import Any, Optional

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")

import vllm
from servesim.core import BadInput
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

MODEL = {  # any model with full attention: the scheduler sees only its maximum length
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 1000,
    "hidden_act": "silu", "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIG: Any = sys.modules.get("vllm.config.vllm")  # None: an old version
HAS_TRITON = getattr(CONFIG, "HAS_TRITON", False)  # of this machine
NO_LIMIT = 1 << 24  # maximum length of a model without one, in tokens
STOP = 2  # the token that ends an answer
TEXT_TOKENS = 1 << 22  # tokens of one named text
LIMITS = ("max_num_seqs", "max_num_batched_tokens")  # of running requests and of a step
SPECULATION = {"num_speculative_tokens": 0, "speculative_method": "eagle", "mtp_modules": 1}  # not flags of vLLM
STAGES = "pipeline_parallel_size"
DECISIVE = ("async_scheduling", "enable_prefix_caching", STAGES, *SPECULATION)  # flags that matter to the loop of a run
OURS = {  # flags that the scenario sets elsewhere
    "block_size": "engine.block_size", "max_model_len": "engine.max_model_len",
    "num_gpu_blocks_override": "engine.num_blocks", "model": "no model: it is pretended",
}  # fmt: skip


class PretendedExecutor(Executor):  # type: ignore[misc]
    """An executor without a model and a drafter: the parent process says how many tokens requests got."""

    engine: VllmEngine

    def _init_executor(self) -> None:
        pass

    def check_health(self) -> None:
        pass

    def collective_rpc(self, method: Any, *args: Any, **options: Any) -> Any:
        """Answer for the only worker."""
        return [self.answers()[method]] if method in self.answers() else []

    def answers(self) -> dict[str, Any]:
        spec = {
            "block_size": self.cache_config.block_size,
            "num_kv_heads": 1,
            "head_size": 1,
            "dtype": self.model_config.dtype,
        }
        if "use_mla" in inspect.signature(FullAttentionSpec).parameters:
            spec["use_mla"] = False
        layers = [
            FullAttentionSpec(**spec) if window is None else SlidingWindowSpec(**spec, sliding_window=window)
            for window in self.engine.windows
        ]
        return {
            "get_kv_cache_spec": {f"layer {number}": layer for number, layer in enumerate(layers)},
            "determine_available_memory": 1 << 50,
            "get_supported_kv_cache_layouts": ["LBNHC"],
            "get_supported_tasks": ("generate",),
        }

    @property
    def max_concurrent_batches(self) -> int:  # versions before 0.14 ask the executor
        return batches(self.vllm_config)

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        self.newest = self.engine.record(scheduler_output)
        return self.newest if non_block else self.newest.result()

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return self.newest if non_block else self.newest.result()

    def take_draft_token_ids(self) -> Any:
        drafts, self.engine.drafts = self.engine.drafts, {}
        return DraftTokenIds(list(drafts), [[0] * count for count in drafts.values()])


class StepResult(Future[Any]):
    """The result of a step. It is known when the parent process says that the step has returned."""

    def __init__(self, engine: VllmEngine, step: int, ids: list[str]) -> None:
        super().__init__()
        self.engine, self.step, self.ids = engine, step, ids

    def done(self) -> bool:
        return not self.ids or self.step in self.engine.driver.results

    def result(self, timeout: Optional[float] = None) -> Any:
        if not self.ids:
            return EMPTY_MODEL_RUNNER_OUTPUT
        tokens = {}
        for number, count, drafts in self.engine.driver.wait(self.step):
            tokens[request_id(number)] = self.engine.next_tokens(number, count)
            self.engine.drafts[request_id(number)] = drafts
        return ModelRunnerOutput(
            req_ids=self.ids,
            req_id_to_index={id: index for index, id in enumerate(self.ids)},
            sampled_token_ids=[tokens.get(id, []) for id in self.ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )


class VllmEngine:
    """The vLLM of this interpreter. It has one run at a time."""

    def __init__(self) -> None:
        self.driver: Any = None
        self.core: Any = None
        os.makedirs("model", exist_ok=True)
        for name in ("_check_enough_kv_cache_memory", "check_enough_kv_cache_memory"):
            if hasattr(kv_cache_utils, name):  # a scenario may have fewer blocks than its longest request needs
                setattr(kv_cache_utils, name, lambda *args: None)

    def settings(self, flags: dict[str, Any]) -> dict[str, Any]:
        """Return the version, the names of all flags, and what the flags mean to the loop of a run."""
        for name in set(flags) & set(OURS):
            raise BadInput(f"policy.{name}: expected {OURS[name]}, got this flag")
        for name in flags:
            if name not in self._names():
                raise BadInput(f"policy.{name}: vLLM {vllm.__version__} has no such flag (EngineArgs)")
        chosen = {name: value for name, value in flags.items() if name in DECISIVE}
        config = self._config({**chosen, "block_size": 16}, 16)  # `start` checks the others, with the real length
        return {
            "version": vllm.__version__,
            "flags": sorted(self._names()),
            "drafts": flags.get("num_speculative_tokens", 0),
            "steps_in_flight": batches(config),
            "stages": flags.get(STAGES, 1),
            "prefix_cache": bool(config.cache_config.enable_prefix_caching),
            **{name: flags.get(name) or getattr(config.scheduler_config, name) for name in LIMITS},
        }

    def start(
        self, flags: dict[str, Any], blocks: int, block_size: int, max_model_len: Optional[int],
        windows: list[Optional[int]],
    ) -> None:  # fmt: skip
        """Build an engine with this number of blocks, without those that vLLM reserves.

        `windows`: one layer per KV cache group, which is its group; None: full attention.
        """
        self.windows = windows or [None]
        gc.unfreeze()  # an engine freezes the heap when it starts
        ours = {"block_size": block_size, "num_gpu_blocks_override": blocks + 1}  # one is the null block
        config = self._config({**flags, **ours}, max_model_len)
        PretendedExecutor.engine = self
        self.core = EngineCore(config, PretendedExecutor, log_stats=False)
        # request: text of its answer, its tokens so far, and which one ends it
        self.texts: dict[int, tuple[int, int, Optional[int]]] = {}
        self.speculates = bool(flags.get("num_speculative_tokens"))
        self.drafts: dict[str, int] = {}  # by the id of the request, offered after the last step
        self.freed: list[Any] = []
        free = self.core.scheduler.kv_cache_manager.free

        def note_and_free(request: Any) -> None:
            self.freed.append(request)
            free(request)

        self.core.scheduler.kv_cache_manager.free = note_and_free

    @staticmethod
    def _names() -> set[str]:
        return {field.name for field in fields(EngineArgs)} | set(SPECULATION)

    def _config(self, flags: dict[str, Any], max_model_len: Optional[int]) -> Any:
        if isinstance(flags.get("scheduler_cls"), str) and ".py:" in flags["scheduler_cls"]:
            flags["scheduler_cls"] = load_class(flags["scheduler_cls"])
        length = max_model_len or NO_LIMIT
        # with stages, asynchronous scheduling needs the new model runner, and that needs Triton
        if CONFIG is not None:
            CONFIG.HAS_TRITON = HAS_TRITON or flags.get(STAGES, 1) > 1
        count, method, modules = (flags.pop(name, default) for name, default in SPECULATION.items())
        if count:  # other methods than these need a drafter; the scheduler sees only the name of the method
            kind = method if method == "ngram" else "ngram_gpu"
            flags["speculative_config"] = {"method": kind, "num_speculative_tokens": count}
        with open(os.path.join("model", "config.json"), "w", encoding="utf-8") as file:
            json.dump({**MODEL, "max_position_embeddings": length}, file)
        check = current_platform.check_and_update_config
        current_platform.check_and_update_config = lambda config: None
        try:
            args = EngineArgs(
                model=os.path.abspath("model"), skip_tokenizer_init=True, max_model_len=length, enforce_eager=True,
                **flags,
            )  # fmt: skip
            config = args.create_engine_config()
            if count:
                config.speculative_config.method = method
                config.speculative_config.draft_model_config.hf_config.num_nextn_predict_layers = modules
            return config
        except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
            raise BadInput(f"policy: vLLM {vllm.__version__} refuses these flags: {one_line(error)}") from None
        finally:
            current_platform.check_and_update_config = check

    def add(
        self, number: int, arrival: float, priority: int, text: list[list[int]], answer: int, limit: int,
        stop: Optional[int],
    ) -> None:  # fmt: skip
        """Add a request. Its text is a list of pieces of named texts."""
        tokens = [TEXT_TOKENS * (name + 1) + place for name, count in text for place in range(count)]
        self.texts[number] = (answer, 0, stop)
        params = SamplingParams(max_tokens=limit, ignore_eos=True, temperature=0.0, stop_token_ids=[STOP])
        options = {
            "request_id": request_id(number), "prompt_token_ids": tokens, "sampling_params": params,
            "pooling_params": None, "arrival_time": arrival, "priority": priority, "eos_token_id": None,
            "block_hasher": self.core.request_block_hasher,
        }  # fmt: skip
        names = inspect.signature(Request.__init__).parameters
        self.core.add_request(Request(**{name: value for name, value in options.items() if name in names}))

    def abort(self, number: int) -> None:
        """Abort one request. vLLM frees those of one call in any order, because it makes a set of them."""
        self.core.abort_requests([request_id(number)])

    def step(self) -> None:
        """Run the step function of the engine once."""
        self.freed.clear()
        executed = self.core.step_fn()
        if self.speculates:
            self.core.post_step(executed[1])

    def free_blocks(self) -> int:
        blocks: int = self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return blocks

    def record(self, output: Any) -> StepResult:
        """Note a decision of the scheduler, and return the result of its step."""
        requests, given = self.core.scheduler.requests, output.num_scheduled_tokens
        drafts = {id: len(tokens) for id, tokens in output.scheduled_spec_decode_tokens.items()}
        scheduled = [
            [int(id), n, requests[id].num_computed_tokens - n, drafts.get(id, 0), self.blocks_of(id)]
            for id, n in given.items()
        ]
        step = self.driver.schedule(scheduled, [int(request.request_id) for request in self.freed])
        return StepResult(self, step, list(given))

    def blocks_of(self, id: str) -> int:
        """Return the blocks of a request, if the drafter writes into some of them; 0: those of its tokens."""
        return len(self.core.scheduler.kv_cache_manager.get_block_ids(id)[0]) if self.speculates else 0

    def next_tokens(self, number: int, count: int) -> list[int]:
        answer, place, stop = self.texts[number]
        self.texts[number] = (answer, place + count, stop)
        first = TEXT_TOKENS * (answer + 1)
        return [STOP if new + 1 == stop else first + new for new in range(place, place + count)]


def batches(config: Any) -> int:
    """Return how many batches the engine has in flight."""
    known: int = getattr(config, "max_concurrent_batches", 2 if config.scheduler_config.async_scheduling else 1)
    return known


def request_id(number: int) -> str:
    """Return the id of a request in vLLM. Ids of requests with equal times sort in the order of arrival."""
    return f"{number:09d}"


def load_class(name: str) -> Any:
    """Return a scheduler class of a user, FILE.py:NAME."""
    path, _, attribute = name.rpartition(":")
    spec = importlib.util.spec_from_file_location("servesim_user_scheduler", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return getattr(module, attribute)
    except Exception as error:
        raise BadInput(
            f"policy.scheduler_cls: {name} does not load: {type(error).__name__}: {one_line(error)}"
        ) from None


def one_line(error: Exception) -> str:
    """Return the first message of an error. An error of pydantic has several lines before it."""
    if hasattr(error, "errors"):
        return str(error.errors()[0]["msg"])
    return (str(error).splitlines() or [type(error).__name__])[0]
