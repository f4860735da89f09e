"""The options that name a device: what runs the model calls, and with which model."""

from __future__ import annotations

import argparse
from typing import Any, Optional


def add_device_options(parser: argparse.ArgumentParser, model: Optional[str] = "tiny", required: bool = True) -> Any:
    """Add them in a group of their own, which is returned; `model` is the one that is taken if none is named."""
    group = parser.add_argument_group("device")
    taken = model or "the profile's if left out"
    group.add_argument(
        "--backend", choices=("kbk", "torch", "fake"), required=required, help="what runs the model calls"
    )
    group.add_argument("--model", default=model, metavar="NAME", help=f"llama2-7b, tiny or micro ({taken})")
    group.add_argument("--weights", metavar="PATH", help="weights to load; random ones if left out")
    group.add_argument("--worker-python", metavar="PATH", help="the interpreter that has the framework")
    group.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="an option of the backend")
    return group
