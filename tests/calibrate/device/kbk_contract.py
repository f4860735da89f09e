"""Looks at MindSpore and MindFormers as they are: run under their interpreter, kbk_contract.py OUT.json PART...

signatures   what our stand-ins and our calls rely on, as inspect sees it
unpatched    how the model as it is on an Ascend fails on a CPU, given right inputs and wrong ones
synchronize  whether a primed synchronize waits, and what an unprimed one does
checkpoint   writes weights.npz of the current folder as micro.ckpt
events       device time against wall time (needs an Ascend)
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import time
from pathlib import Path
from typing import Any, Callable

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
RELIED_ON = (
    "mindformers.models.llama.LlamaForCausalLM.__init__",
    "mindformers.models.llama.LlamaForCausalLM.construct",
    "mindformers.models.llama.LlamaForCausalLM.forward",
    "mindformers.models.llama.LlamaForCausalLM.add_flags_custom",
    "mindformers.models.llama.LlamaForCausalLM.pre_gather_func",
    "mindformers.models.llama.LlamaForCausalLM.set_dynamic_inputs",
    "mindformers.models.llama.LlamaForCausalLM.kvcache",
    "mindformers.models.llama.LlamaForCausalLM.convert_name",
    "mindformers.modules.paged_attention_mgr.PagedAttentionMgr.__init__",
    "mindformers.modules.paged_attention_mgr.PagedAttentionMgr.construct",
    "mindformers.modules.paged_attention_mgr.PagedAttentionMgr.paged_attn",
    "mindformers.modules.infer_attention.InferRotaryEmbedding.__init__",
    "mindformers.modules.infer_attention.InferRotaryEmbedding.construct",
    "mindformers.modules.infer_attention.InferAttention.__init__",
    "mindformers.modules.infer_attention.InferAttention.construct",
    "mindformers.modules.infer_attention.InferAttention._apply_rotary_pos_emb",
    "mindformers.modules.infer_attention.InferAttention._prefill_attention",
    "mindformers.modules.infer_attention.InferAttention._incre_attention",
    "mindformers.model_runner.MindIEModelRunner.swap",
    "mindspore.ops.auto_generate.ReshapeAndCache.__init__",
    "mindspore.ops.auto_generate.ReshapeAndCache.__call__",
    "mindspore.ops.auto_generate.PagedAttention.__init__",
    "mindspore.ops.auto_generate.PagedAttention.__call__",
    "mindspore.ops.ApplyRotaryPosEmb.__init__",
    "mindspore.ops.ApplyRotaryPosEmb.__call__",
    "mindspore.runtime.synchronize",
)


def kbk() -> Any:
    """Return the backend's module, found beside this file as a worker finds it."""
    if "servesim" in sys.modules:
        return importlib.import_module("servesim.calibrate.device.kbk.backend")
    sys.path.insert(0, str(ROOT / "calibrate" / "device"))
    beside = importlib.import_module("worker").Beside(str(ROOT / "calibrate" / "device"))
    sys.path.pop(0)
    sys.meta_path.insert(0, beside)
    return importlib.import_module("servesim.calibrate.device.kbk.backend")


def signatures() -> dict[str, str]:
    found = {name: str(inspect.signature(named(name))) for name in RELIED_ON}
    from mindspore._c_expression import swap_cache

    found["mindspore._c_expression.swap_cache"] = str(swap_cache.__doc__).splitlines()[0]
    return found


def named(path: str) -> Any:
    """Import what a dotted path leads to."""
    module, attributes = path, []
    while True:
        try:
            thing: Any = importlib.import_module(module)
            break
        except ImportError:
            module, _, last = module.rpartition(".")
            attributes.insert(0, last)
    for attribute in attributes:
        thing = getattr(thing, attribute)
    return thing


def unpatched() -> dict[str, str]:
    """Call the model of the Ascend, unpatched and in float16, with dynamic shapes."""
    module = kbk()
    backend = module.Kbk(device="CPU", kernels="fused")
    micro = importlib.import_module("servesim.calibrate.device.backend").MODELS["micro"]
    found = {"prefill": failure(lambda: backend.load(micro, 16, 16))}
    net = backend.net
    right = {"block_tables": np.zeros((2, 1), np.int32), "slot_mapping": np.array([3, 3], np.int32)}
    changes = {
        "decode": {},
        "float tables": {"block_tables": np.zeros((2, 1), np.float32)},
        "long slots": {"slot_mapping": np.array([3, 3], np.int64)},
        "flat tables": {"block_tables": np.zeros(2, np.int32)},
    }
    net.add_flags_custom(is_first_iteration=False)
    for name, change in changes.items():
        net.phase = name  # or it would ask for the graph that failed before
        found[name] = failure(lambda inputs={**right, **change}: decode(net, **inputs))
    return found


def decode(net: Any, **inputs: Any) -> None:
    """Decode two rows behind three cached tokens."""
    net.forward(np.ones((2, 1), np.int32), np.array([4, 4], np.int32), prefill=False, use_past=True, **inputs)


def failure(work: Callable[[], Any]) -> str:
    """Return how something fails."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it worked"


def synchronize() -> dict[str, list[float]]:
    """Time a synchronize behind work that is still going on, and then the reading of its result."""
    module = kbk()
    backend = module.Kbk(device="CPU", mode="pynative")
    ms = backend.ms
    ms.set_context(pynative_synchronize=False)  # as it is by default: operators return before they are done
    found = {"unprimed": waiting(ms, ms.runtime.synchronize)}
    backend.synchronize()
    found["primed"] = waiting(ms, backend.synchronize)
    return found


def waiting(ms: Any, wait: Callable[[], Any]) -> list[float]:
    """Return the seconds spent in the wait, and then in reading the result."""
    square = ms.Tensor(np.ones((1500, 1500), np.float32))
    product = ms.ops.matmul(square, square)
    start = time.perf_counter()
    wait()
    waited = time.perf_counter() - start
    product.asnumpy()
    return [waited, time.perf_counter() - start - waited]


def checkpoint() -> str:
    """Write given weights as MindSpore does."""
    import mindspore as ms

    rows = [{"name": name, "data": ms.Tensor(value)} for name, value in np.load("weights.npz").items()]
    ms.save_checkpoint(rows, "micro.ckpt")
    return "micro.ckpt"


def events() -> dict[str, list[float]]:
    """Return device seconds by events and wall seconds of some decode steps."""
    module = kbk()
    backend = module.Kbk()
    types = importlib.import_module("servesim.calibrate.device.backend")
    backend.load(types.MODELS["tiny"], 64, 16)
    ms = backend.ms
    device, wall = [], []
    for position in range(16, 32):
        first, last = (ms.runtime.Event(enable_timing=True) for _ in range(2))
        backend.synchronize()
        start = time.perf_counter()
        first.record()
        backend.step([types.Row([1], position, [1, 2])])
        last.record()
        backend.synchronize()
        wall.append(time.perf_counter() - start)
        device.append(first.elapsed_time(last) / 1e3)
    return {"device": device, "wall": wall}


def main() -> None:
    out, *parts = sys.argv[1:]
    known = (synchronize, signatures, unpatched, checkpoint, events)  # the first one must find synchronize unused
    found = {part.__name__: part() for part in known if part.__name__ in parts}
    Path(out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
