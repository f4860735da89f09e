"""How the next token of each row is selected: on the host from copied logits, or on the device with `ops` or `mint`.

Functions get the module mindspore as an argument, so that this file can be imported without it.
"""

from __future__ import annotations

from typing import Any

from servesim.core import BadInput

VARIANTS = ("host", "ops", "mint")  # the first one is the default


def supported(device: str) -> tuple[str, ...]:
    """Return the variants that a device has operators for. MindSpore has no CPU kernel for mint.argmax."""
    return tuple(variant for variant in VARIANTS if variant != "mint" or device != "CPU")


def check_variant(variant: str, device: str) -> None:
    """Raise BadInput if a device has no operator for a variant."""
    if variant not in supported(device):
        raise BadInput(
            f"sampling: mint has no operator on a {device} (MindSpore has mint.argmax for Ascend only), "
            f"expected one of {', '.join(supported(device))}"
        )


def select(ms: Any, variant: str, logits: Any) -> Any:
    """Return the most likely token of each row of a logits tensor as a numpy array; only tokens leave the device."""
    if variant == "host":
        return logits.asnumpy().argmax(-1)
    operators = ms.mint if variant == "mint" else ms.ops
    return operators.argmax(logits, dim=-1).asnumpy()
