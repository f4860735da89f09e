"""Import Vidur's step costs as a profile: a copy of its tables, and a profile.yaml."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from servesim.core import BadInput
from servesim.costs.device_profile import round_numbers
from servesim.costs.vidur import CONTEXT_STEP, VidurCost, load_tables
from servesim.files.write import replacing, write_yaml


def import_vidur(path: Path, out: Path, base: float = 0.0) -> VidurCost:
    """Convert a file of Vidur's tables into a profile folder; return its cost model. `base`: host seconds per step."""
    cost = load_tables(path, base)
    if (out / "profile.yaml").exists():
        raise BadInput(f"{out}: already holds a profile, which is not overwritten; use another folder")
    with replacing(out / "tables.npz") as part:
        shutil.copyfile(path, part)
    write_yaml(out / "profile.yaml", round_numbers(profile_yaml(path, out, cost)), width=120)
    return cost


def profile_yaml(path: Path, out: Path, cost: VidurCost) -> dict[str, Any]:
    """Return the contents of profile.yaml: source, measured range and cost model."""
    return {
        "name": out.name,
        "how": f"imported from {path.name}: Vidur's step-cost tables; shapes are rounded up to the next table entry",
        "grid": {
            "prefill_tokens": [1, len(cost.comp) - 1],
            "decode_rows": [1, len(cost.attend) - 1],
            "context": [0, (len(cost.attend) - 1) * (len(cost.attend[0]) - 1) * CONTEXT_STEP],
        },
        "cost": {"kind": "vidur", "tables": "tables.npz", **({"base": cost.base} if cost.base else {})},
    }
