"""A profile: what steps cost on one device, where that is known from, and how far it can be trusted.

A folder with profile.yaml (device, model, versions, how measured, the cost model, its held-out error, the measured
grid) and samples.csv (every raw sample, where there are any).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Optional

import yaml
from servesim.core import BadInput, StepCost
from servesim.files.write import open_text
from servesim.files.yaml_reader import read_yaml

from .mapping import cost_from, mapping
from .noise import NoisyCost
from .vidur import load_tables


@dataclass(frozen=True)
class Profile:
    """Step costs and what is known about them."""

    name: str
    cost: StepCost
    about: Mapping[str, Any] = field(default_factory=dict)  # everything else in profile.yaml
    path: Optional[Path] = None
    digest: str = ""  # of the folder's content: what anything cached is keyed by

    @property
    def cold_start(self) -> tuple[float, float]:
        """Seconds that the first prefill and the first decode take longer."""
        cold = self.about.get("cold_start") or {}
        return float(cold.get("prefill", 0.0)), float(cold.get("decode", 0.0))

    @property
    def front_end(self) -> float:
        """Seconds from sending a request to the scheduler, where the profile was measured from outside."""
        return float((self.about.get("front_end") or {}).get("seconds") or 0.0)

    @property
    def error(self) -> Mapping[str, Any]:
        """What the fit is off by on held-out points, by kind of step, as a part of the measured time."""
        return dict(self.about.get("error") or {})

    def noisy(self, seed: int) -> StepCost:
        """Return costs that scatter as the measured steps did; the same seed gives the same scatter."""
        noise = self.about.get("noise")
        if not isinstance(noise, Mapping) or not noise:
            raise BadInput(f"noise: profile {self.name} keeps no residuals; measure it with `sim calibrate probe`")
        return NoisyCost(self.cost, noise, seed)

    def outside(self, extremes: Mapping[str, float]) -> list[str]:
        """Say which of a run's extremes lie beyond the measured grid."""
        grid = self.about.get("grid") or {}
        return [
            f"{name} {value:g} (measured {grid[name][0]:g} to {grid[name][1]:g})"
            for name, value in extremes.items()
            if name in grid and value > grid[name][1]
        ]


def bundled() -> dict[str, Path]:
    """Return the profiles that come with the package."""
    folder = Path(str(files("servesim.calibrate.profiles")))
    return {path.parent.name: path.parent for path in sorted(folder.glob("*/profile.yaml"))}


def load_profile(given: Any) -> Profile:
    """Load a bundled profile by name, a folder by path, or costs written out in the scenario."""
    if isinstance(given, Mapping):
        digest = hashlib.sha256(repr(sorted(given.items(), key=str)).encode()).hexdigest()[:16]
        return Profile("inline", cost_from(given, "profile"), digest=digest)
    folder = bundled().get(str(given)) or Path(str(given))
    file = folder / "profile.yaml" if folder.is_dir() else folder
    if not file.is_file():
        known = ", ".join(bundled()) or "none"
        raise BadInput(f"profile {given}: no such bundled profile or folder with a profile.yaml; bundled: {known}")
    about = read_yaml(file)
    if not isinstance(about, dict) or not isinstance(about.get("cost"), dict):
        raise BadInput(f"{file}: expected a mapping with a `cost` section")
    terms = about.pop("cost")
    if terms.get("kind") == "vidur":
        cost: StepCost = load_tables(file.parent / str(terms.get("tables", "tables.npz")))
    else:
        cost = cost_from(terms, f"{file}: cost")
    return Profile(str(about.get("name", file.parent.name)), cost, about, file.parent, digest_of(file.parent))


def digest_of(folder: Path) -> str:
    """Return a digest of a profile folder's content."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*")):
        if path.name in ("profile.yaml", "samples.csv", "samples.csv.gz", "tables.npz"):
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


def write_profile(folder: Path, about: Mapping[str, Any], cost: StepCost) -> None:
    """Write profile.yaml, whole or not at all; what stands in the folder already stays."""
    tree = {**{key: value for key, value in about.items() if value is not None}, "cost": mapping(cost)}
    with open_text(folder / "profile.yaml") as file:
        yaml.safe_dump(rounded(tree), file, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)


def rounded(value: Any) -> Any:
    """Return plain YAML data with its numbers cut to six significant digits."""
    if isinstance(value, Mapping):
        return {str(key): rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    if hasattr(value, "item"):  # a numpy scalar
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
