"""`sim models`: the models and devices that a profile can name."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from . import options
from .notes import print_json

SMALL = 1e8  # parameters: smaller models are for tests
MODEL_COLUMNS = ("model", "parameters (10^9)", "precision", "layers", "context (tokens)")
DEVICE_COLUMNS = ("device", "memory (GiB)", "bandwidth (TB/s)", "16-bit peak (TFLOP/s)", "8-bit peak (TFLOP/s)")


def register(commands: Any) -> None:
    models = commands.add_parser(
        "models", run=list_models, help="list the models and devices that --model and --device know",
        description="List the public models and devices that --model, --device and the key `profile` of a scenario "
        "know by name. Another model can be given as its config.json or folder of Hugging Face.",
    )  # fmt: skip
    options.add_json(models)


def list_models(args: argparse.Namespace) -> int:
    """Print one table of models and one of devices; JSON has bytes, tokens and FLOPs."""
    from servesim.costs.public_devices import DEVICES
    from servesim.costs.public_models import ALIASES, PUBLIC_MODELS, QUANTISED
    from servesim.files.terminal import align_columns, screen_of

    sizes = {name: model.weights + model.vocab * model.hidden for name, model in PUBLIC_MODELS.items()}
    models = {name: model for name, model in PUBLIC_MODELS.items() if sizes[name] > SMALL}
    precisions = {name: QUANTISED.get(name, model.dtype) for name, model in models.items()}
    if args.json:
        listed = {
            name: {"parameters": sizes[name], "precision": precisions[name], "layers": m.layers, "context": m.context}
            for name, m in models.items()
        }
        devices = {name: device._asdict() for name, device in DEVICES.items()}
        print_json({"models": listed, "devices": devices, "aliases": ALIASES})
        return 0
    rows = [
        (name, f"{sizes[name] / 1e9:.1f}", precisions[name], f"{m.layers}", f"{m.context:,}")
        for name, m in models.items()
    ]
    cards = [
        (name, f"{card.memory / 2**30:.1f}", *(f"{value / 1e12:,.4g}" for value in (card.bandwidth, *card[1:3])))
        for name, card in DEVICES.items()
    ]
    for table in ([MODEL_COLUMNS, *rows], [DEVICE_COLUMNS, *cards]):
        print("\n".join(align_columns(table, screen_of(sys.stdout))), end="\n\n")
    print(f"Aliases: {', '.join(f'{alias} is {device}' for alias, device in ALIASES.items())}.")
    print(
        "Capitals, dashes, the organisation and what follows the size do not matter: meta-llama/Llama-3.1-8B-Instruct."
    )
    return 0
