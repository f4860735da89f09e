"""Vidur's step costs as a profile: its tables copied as they are, and a profile.yaml that says what they are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml
from servesim.core import BadInput
from servesim.costs.device_profile import rounded
from servesim.costs.vidur import CONTEXT, VidurCost, load_tables
from servesim.files.write import open_text


def import_vidur(path: Path, out: Path) -> VidurCost:
    """Turn a file of Vidur's tables into a profile folder; return the costs as the profile will give them."""
    cost = load_tables(path)
    if (out / "profile.yaml").exists():
        raise BadInput(f"{out}: holds a profile already; `sim calibrate import` does not overwrite")
    try:
        out.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, out / "tables.npz")
    except OSError as error:
        raise BadInput(f"{out}: cannot be written: {error.strerror}") from None
    with open_text(out / "profile.yaml") as file:
        yaml.safe_dump(rounded(about(path, out, cost)), file, sort_keys=False, allow_unicode=True, width=120)
    return cost


def about(path: Path, out: Path, cost: VidurCost) -> dict[str, Any]:
    """Return profile.yaml: where the costs come from, what was measured, how they are read."""
    return {
        "name": out.name,
        "how": f"imported from {path.name}: step costs as Vidur keeps them, in tables read off at rounded-up places",
        "grid": {
            "prefill_tokens": [1, len(cost.comp) - 1],
            "decode_rows": [1, len(cost.attend) - 1],
            "context": [0, (len(cost.attend) - 1) * (len(cost.attend[0]) - 1) * CONTEXT],
        },
        "cost": {"kind": "vidur", "tables": "tables.npz"},
    }
