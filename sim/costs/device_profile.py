"""Load and write profiles: a bundled one, a folder, the names of a model and a device, or the costs of a scenario.

A folder has profile.yaml and, for a probed device, samples.csv with all raw samples. profile.yaml has the device,
model, versions, method, cost model, held-out error and measured range.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from servesim.core import BadInput, StepCost
from servesim.files.checked import validate
from servesim.files.write import write_yaml
from servesim.files.yaml_reader import read_yaml

from .imported_tables import load_layers, load_vidur
from .mapping import cost_from, cost_mapping
from .named_profile import derive_named, is_named, measured_for
from .profile import Profile
from .uncertainty import check_draws

__all__ = ["Profile", "bundled_profiles", "load_profile", "write_profile"]
TABLE_FILES: Mapping[str, Callable[[Path, Any], StepCost]] = {"vidur": load_vidur, "layers": load_layers}


@cache  # a report loads the profile of every configuration
def bundled_profiles() -> Mapping[str, Path]:
    """Return the folders of the profiles in the package, by name."""
    folder = Path(str(files("servesim.calibrate.profiles")))
    return {path.parent.name: path.parent for path in sorted(folder.glob("*/profile.yaml"))}


def exists(path: Path) -> bool:
    """Whether a path exists; a name with unusable characters does not."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def load_profile(source: Any) -> Profile:
    """Load a bundled profile by name, a folder by path, or a mapping: names of model and device, or costs."""
    if isinstance(source, Mapping):
        if is_named(source):
            return derive_named(source, load_profile(measured_for(source)))
        digest = hashlib.sha256(repr(sorted(source.items(), key=str)).encode()).hexdigest()[:16]
        return Profile("inline", cost_from(source, "profile"), digest=digest)
    bundled = bundled_profiles().get(str(source))
    folder = bundled or Path(str(source))
    file = folder / "profile.yaml" if exists(folder) and folder.is_dir() else folder
    if not exists(file):
        known = ", ".join(bundled_profiles()) or "none"
        raise BadInput(f"profile {source}: no such bundled profile or folder with a profile.yaml; bundled: {known}")
    about = read_yaml(file)
    if bundled is None:  # a test checks those in the package
        check_file(about, str(file))
    terms = about.pop("cost")
    load = TABLE_FILES.get(str(terms.get("kind")))
    if load is not None:
        cost = load(file.parent / str(terms.get("tables", "tables.npz")), terms.get("base", 0.0))
    else:
        cost = cost_from(terms, f"{file}: cost")
    check_draws(about.get("uncertainty"), cost, str(file))
    return Profile(str(about.get("name", file.parent.name)), cost, about, file.parent, folder_digest(file.parent))


def check_file(about: Any, where: str) -> None:
    """Raise BadInput if a key of profile.yaml that is used is wrong, or a size of the model is not known."""
    from .profile_file import ModelKeys, ProfileFile

    validate(ProfileFile, about, where)
    if isinstance(about.get("model"), Mapping):
        validate(ModelKeys, about["model"], f"{where}: model")


def folder_digest(folder: Path) -> str:
    """Return a digest of a profile folder's content."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*")):
        if path.name in ("profile.yaml", "samples.csv", "samples.csv.gz", "tables.npz"):
            try:
                digest.update(path.name.encode() + path.read_bytes())
            except OSError as error:
                raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()[:16]


def write_profile(folder: Path, about: Mapping[str, Any], cost: StepCost | Mapping[str, Any]) -> None:
    """Write profile.yaml; other files in the folder stay. A profile that could not be read back is not written.

    `cost` is a mapping if the folder has the tables of the cost model in a file.
    """
    path = folder / "profile.yaml"
    known = {key: value for key, value in about.items() if value is not None}
    tree = round_numbers({**known, "cost": cost_mapping(cost) if isinstance(cost, StepCost) else cost})
    check_file(tree, f"{path}: not written")
    if tree["cost"].get("kind") not in TABLE_FILES:
        cost_from(tree["cost"], f"{path}: not written: cost")
    write_yaml(path, tree, width=120, default_flow_style=None)


def round_numbers(value: Any) -> Any:
    """Return YAML data with floats rounded to six significant digits."""
    if isinstance(value, Mapping):
        return {str(key): round_numbers(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [round_numbers(inner) for inner in value]
    if hasattr(value, "item"):  # a numpy scalar
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
