"""What `sim recommend` tries on MindIE, and the lengths that its config.json must allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from servesim.config.families import Tuning, longest, memory_settings
from servesim.core import ClientRequest


def defaults(about: Mapping[str, Any], requests: Sequence[ClientRequest]) -> dict[str, Any]:
    """Return the values that MindIE ships, larger ones if the requests are longer."""
    prompt = longest(2048, (request.prompt for request in requests))
    return {
        "policy.max_input_token_len": prompt,
        "policy.max_prefill_tokens": max(8192, prompt),
        "policy.max_iter_times": longest(512, (request.limit for request in requests)),
        "engine.max_model_len": longest(2560, (request.prompt + request.limit for request in requests)),
        **memory_settings(about),
    }


TUNINGS = {
    "mindie": Tuning(
        "mindie-3.0",
        [
            {
                "policy.max_batch_size": (50, 100, 200, 400),
                "policy.max_prefill_batch_size": (8, 50),
                "policy.max_prefill_tokens": (2048, 8192, 16384),
            },
            {"policy.stage_policy": ("throughput",), "policy.max_batch_size": (100, 200, 400)},
        ],
        defaults,
    ),
}
