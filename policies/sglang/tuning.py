"""What `sim recommend` tries on SGLang, and the defaults that SGLang chooses by the memory of its device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from servesim.config.families import Tuning, memory_settings
from servesim.core import ClientRequest
from servesim.costs.kv_memory import device_memory

MIB = 2**20
SIZES = (  # below a memory in GiB: chunked_prefill_size; rows of the largest CUDA graph, and with 4 or more devices
    (20, 2048, 8, 80), (35, 2048, 24, 80), (60, 4096, 32, 160), (160, 8192, 256, 512), (float("inf"), 16384, 512, 512),
)  # fmt: skip


def defaults(about: Mapping[str, Any], requests: Sequence[ClientRequest]) -> dict[str, Any]:
    """Return SGLang's defaults: the size of a chunk, and the memory that mem_fraction_static leaves free."""
    memory, degree = device_memory(about), int(about.get("tensor_parallel") or 1)
    if not memory:
        return {}
    chunk, rows, more_rows = next(sizes for limit, *sizes in SIZES if memory < limit * 1024 * MIB)
    free = 512 + 1.5 * chunk + 2 * (rows if degree < 4 else more_rows) + 128 * degree
    free = max(free, 10240) if memory > 60 * 1024 * MIB else free
    used = memory_settings(about, gpu_memory_utilization=1, reserve=int(free * MIB))
    return {"policy.chunked_prefill_size": chunk, **used}


TUNINGS = {
    "sglang": Tuning(
        "sglang-0.5.18",
        [
            {
                "policy.chunked_prefill_size": (1024, 2048, 4096, 8192, 16384),
                "policy.max_running_requests": (128, 256, None),
            },
            {"policy.schedule_policy": ("fcfs", "lpm"), "policy.schedule_conservativeness": (0.3, 1.0)},
        ],
        defaults,
    ),
}
