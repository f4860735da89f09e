"""What `sim recommend` tries on SGLang."""

from servesim.config.families import Tuning

TUNINGS = {
    "sglang": Tuning(
        "sglang-0.5.18",
        {
            "policy.chunked_prefill_size": (1024, 2048, 4096, 8192, 16384),
            "policy.max_running_requests": (64, 128, 256, 512),
            "policy.schedule_policy": ("fcfs", "lpm"),
        },
    ),
}
