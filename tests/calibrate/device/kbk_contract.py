"""Inspect the installed MindSpore and MindFormers. Run under their interpreter: kbk_contract.py OUT.json SECTION...

signatures   signatures that the reference kernels and the backend rely on
unpatched    errors of the unpatched Ascend model on a CPU, with right and wrong inputs
synchronize  seconds that the first and a later synchronize wait
checkpoint   writes weights.npz of the current folder as micro.ckpt
replaced     tokens of steps with mint.argmax replaced by an operator that a CPU has
events       device time and wall time of steps (needs an Ascend)
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
REQUIRED_SIGNATURES = (
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
    """Return the module of the backend, imported as in a worker."""
    if "servesim" in sys.modules:
        return importlib.import_module("servesim.calibrate.device.kbk.backend")
    sys.path.insert(0, str(ROOT / "calibrate" / "device"))
    finder = importlib.import_module("worker").PackageFinder(str(ROOT / "calibrate" / "device"))
    sys.path.pop(0)
    sys.meta_path.insert(0, finder)
    return importlib.import_module("servesim.calibrate.device.kbk.backend")


def signatures() -> dict[str, str]:
    results = {name: str(inspect.signature(import_path(name))) for name in REQUIRED_SIGNATURES}
    from mindspore._c_expression import swap_cache

    results["mindspore._c_expression.swap_cache"] = str(swap_cache.__doc__).splitlines()[0]
    return results


def import_path(path: str) -> Any:
    """Import the object of a dotted path."""
    module, attributes = path, []
    while True:
        try:
            target: Any = importlib.import_module(module)
            break
        except ImportError:
            module, _, last = module.rpartition(".")
            attributes.insert(0, last)
    for attribute in attributes:
        target = getattr(target, attribute)
    return target


def unpatched() -> dict[str, str]:
    """Call the unpatched Ascend model in float16, with dynamic shapes."""
    module = kbk()
    backend = module.KbkBackend(device="CPU", kernels="fused")
    micro = importlib.import_module("servesim.calibrate.device.backend").MODELS["micro"]
    results = {"prefill": failure(lambda: backend.load(micro, 16, 16))}
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
        net.phase = name  # else it would reuse the graph that failed before
        results[name] = failure(lambda inputs={**right, **change}: decode(net, **inputs))
    return results


def decode(net: Any, **inputs: Any) -> None:
    """Decode two rows after three cached tokens."""
    net.forward(np.ones((2, 1), np.int32), np.array([4, 4], np.int32), prefill=False, use_past=True, **inputs)


def failure(work: Callable[[], Any]) -> str:
    """Return the error of a call as text."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it worked"


def synchronize() -> dict[str, list[float]]:
    """Time a synchronize after unfinished work, and then the reading of the result."""
    module = kbk()
    backend = module.KbkBackend(device="CPU", mode="pynative")
    ms = backend.ms
    ms.set_context(pynative_synchronize=False)  # the default: operators return before they are done
    results = {"unprimed": waiting(ms, ms.runtime.synchronize)}
    backend.synchronize()
    results["primed"] = waiting(ms, backend.synchronize)
    return results


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
    """Write weights.npz as a MindSpore checkpoint."""
    import mindspore as ms

    rows = [{"name": name, "data": ms.Tensor(value)} for name, value in np.load("weights.npz").items()]
    ms.save_checkpoint(rows, "micro.ckpt")
    return "micro.ckpt"


def replaced() -> dict[str, Any]:
    """Run the same steps with the variants host, ops and mint; on a CPU, ops.argmax replaces mint.argmax."""
    module = kbk()
    backend = module.KbkBackend(device="CPU", mode="pynative", sampling="ops")
    types = importlib.import_module("servesim.calibrate.device.backend")
    ms, called = backend.ms, []

    def argmax(tensor: Any, dim: int) -> Any:
        called.append(list(tensor.shape))
        return ms.ops.argmax(tensor, dim=dim)

    ms.mint.argmax = argmax
    backend.load(types.MODELS["micro"], 16, 16)
    rows = [types.Row([5, 6, 7], 0, [1]), types.Row([9] * 20, 0, [2, 3]), types.Row([4], 0, [4])]
    results: dict[str, Any] = {}
    for variant in ("host", "ops", "mint"):
        backend.sampling = variant
        results[variant] = backend.step(rows)
    chosen = backend.logits([0, 1, 2]).argmax(-1).tolist()
    assert chosen == backend.logits().argmax(-1).tolist()
    return {**results, "shapes": called, "logits": chosen}


def events() -> dict[str, list[float]]:
    """Return the device seconds (from events) and the wall seconds of some decode steps."""
    module = kbk()
    backend = module.KbkBackend()
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
    out, *names = sys.argv[1:]
    sections = (synchronize, signatures, unpatched, checkpoint, replaced, events)  # synchronize must come first
    results = {section.__name__: section() for section in sections if section.__name__ in names}
    Path(out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
