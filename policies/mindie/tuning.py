"""What `sim recommend` tries on MindIE."""

from servesim.config.families import Tuning

TUNINGS = {
    "mindie": Tuning(
        "mindie-3.0",
        {
            "policy.max_batch_size": (50, 100, 200, 400),
            "policy.max_prefill_batch_size": (8, 16, 50),
            "policy.max_prefill_tokens": (4096, 8192, 16384),
        },
    ),
}
