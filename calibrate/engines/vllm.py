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
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.request import Request

MODEL = {  # any model with full attention: the scheduler sees only its maximum length
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 1000,
    "hidden_act": "silu", "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NO_LIMIT = 1 << 24  # maximum length of a model without one, in tokens
STOP = 2  # the token that ends an answer
TEXT_TOKENS = 1 << 22  # tokens of one named text
LIMITS = ("max_num_seqs", "max_num_batched_tokens")  # of running requests and of a step
DECISIVE = ("async_scheduling", "enable_prefix_caching")  # flags that matter to the loop of a run
OURS = {  # flags that the scenario sets elsewhere
    "block_size": "engine.block_size", "max_model_len": "engine.max_model_len",
    "num_gpu_blocks_override": "engine.num_blocks", "model": "no model: it is pretended",
}  # fmt: skip


class PretendedExecutor(Executor):  # type: ignore[misc]
    """An executor without a model: the parent process says which requests got a token."""

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
        names = inspect.signature(FullAttentionSpec).parameters
        spec = {**spec, **({"use_mla": False} if "use_mla" in names else {})}
        return {
            "get_kv_cache_spec": {"layer": FullAttentionSpec(**spec)},
            "determine_available_memory": 1 << 50,
            "get_supported_kv_cache_layouts": ["LBNHC"],
            "get_supported_tasks": ("generate",),
        }

    @property
    def max_concurrent_batches(self) -> int:  # versions before 0.14 ask the executor
        return 2 if self.scheduler_config.async_scheduling else 1

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        self.newest = self.engine.record(scheduler_output)
        return self.newest if non_block else self.newest.result()

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return self.newest if non_block else self.newest.result()


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
        for number, stops in self.engine.driver.wait(self.step):
            tokens[request_id(number)] = [STOP if stops else self.engine.next_token(number)]
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
            "steps_in_flight": 2 if config.scheduler_config.async_scheduling else 1,
            "prefix_cache": bool(config.cache_config.enable_prefix_caching),
            **{name: flags.get(name) or getattr(config.scheduler_config, name) for name in LIMITS},
        }

    def start(self, flags: dict[str, Any], blocks: int, block_size: int, max_model_len: Optional[int]) -> None:
        """Build an engine with this number of blocks, without those that vLLM reserves."""
        gc.unfreeze()  # an engine freezes the heap when it starts
        ours = {"block_size": block_size, "num_gpu_blocks_override": blocks + 1}  # one is the null block
        config = self._config({**flags, **ours}, max_model_len)
        PretendedExecutor.engine = self
        self.core = EngineCore(config, PretendedExecutor, log_stats=False)
        self.texts: dict[int, tuple[int, int]] = {}  # request: text of its answer, and its tokens so far
        self.freed: list[Any] = []
        free = self.core.scheduler.kv_cache_manager.free

        def note_and_free(request: Any) -> None:
            self.freed.append(request)
            free(request)

        self.core.scheduler.kv_cache_manager.free = note_and_free

    @staticmethod
    def _names() -> set[str]:
        return {field.name for field in fields(EngineArgs)}

    def _config(self, flags: dict[str, Any], max_model_len: Optional[int]) -> Any:
        if isinstance(flags.get("scheduler_cls"), str) and ".py:" in flags["scheduler_cls"]:
            flags["scheduler_cls"] = load_class(flags["scheduler_cls"])
        length = max_model_len or NO_LIMIT
        with open(os.path.join("model", "config.json"), "w", encoding="utf-8") as file:
            json.dump({**MODEL, "max_position_embeddings": length}, file)
        check = current_platform.check_and_update_config
        current_platform.check_and_update_config = lambda config: None
        try:
            args = EngineArgs(
                model=os.path.abspath("model"), skip_tokenizer_init=True, max_model_len=length, enforce_eager=True,
                **flags,
            )  # fmt: skip
            return args.create_engine_config()
        except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
            raise BadInput(f"policy: vLLM {vllm.__version__} refuses these flags: {one_line(error)}") from None
        finally:
            current_platform.check_and_update_config = check

    def add(self, number: int, arrival: float, priority: int, text: list[list[int]], answer: int, limit: int) -> None:
        """Add a request. Its text is a list of pieces of named texts."""
        tokens = [TEXT_TOKENS * (name + 1) + place for name, count in text for place in range(count)]
        self.texts[number] = (answer, 0)
        params = SamplingParams(max_tokens=limit, ignore_eos=True, temperature=0.0, stop_token_ids=[STOP])
        options = {
            "request_id": request_id(number), "prompt_token_ids": tokens, "sampling_params": params,
            "pooling_params": None, "arrival_time": arrival, "priority": priority, "eos_token_id": None,
            "block_hasher": self.core.request_block_hasher,
        }  # fmt: skip
        names = inspect.signature(Request.__init__).parameters
        self.core.add_request(Request(**{name: value for name, value in options.items() if name in names}))

    def abort(self, numbers: list[int]) -> None:
        self.core.abort_requests([request_id(number) for number in numbers])

    def step(self) -> None:
        """Run the step function of the engine once."""
        self.freed.clear()
        self.core.step_fn()

    def free_blocks(self) -> int:
        blocks: int = self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return blocks

    def record(self, output: Any) -> StepResult:
        """Note a decision of the scheduler, and return the result of its step."""
        requests, given = self.core.scheduler.requests, output.num_scheduled_tokens
        scheduled = [[int(id), n, requests[id].num_computed_tokens - n] for id, n in given.items()]
        step = self.driver.schedule(scheduled, [int(request.request_id) for request in self.freed])
        return StepResult(self, step, list(given))

    def next_token(self, number: int) -> int:
        answer, place = self.texts[number]
        self.texts[number] = (answer, place + 1)
        return TEXT_TOKENS * (answer + 1) + place


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
