"""A profile: the cost model of one device and model, its source and its error.

It is a folder with profile.yaml and, for a probed device, samples.csv with all raw samples. profile.yaml has the
device, model, versions, method, cost model, held-out error and measured range.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path
from typing import Any, Optional

from servesim.core import BadInput, StepCost
from servesim.files.checked import validate
from servesim.files.write import write_yaml
from servesim.files.yaml_reader import read_yaml

from .derived import CostWithHost, FirstUseCost, NoisyCost, OverlappedCost, SampledCost, SamplingTerm, host_of
from .imported_tables import load_layers, load_vidur
from .mapping import cost_from, cost_mapping
from .parts import NO_HOST, HostPart
from .profile_file import ProfileFile
from .uncertainty import RUN_SPREAD, SESSION_SPREAD, Uncertainty, check_draws

TABLE_FILES: Mapping[str, Callable[[Path, Any], StepCost]] = {"vidur": load_vidur, "layers": load_layers}


@dataclass(frozen=True)
class Profile:
    """A cost model and its description."""

    name: str
    cost: StepCost
    about: Mapping[str, Any] = field(default_factory=dict)  # the other keys of profile.yaml
    path: Optional[Path] = None
    digest: str = ""  # hash of the folder's content

    def section(self, key: str) -> Mapping[str, Any]:
        """Return a section of profile.yaml, an empty one if it is missing or null."""
        return self.about.get(key) or {}

    @property
    def cold_start(self) -> tuple[float, float]:
        """Extra seconds of the first prefill and of the first decode, if the scenario does not say how it starts."""
        cold = self.section("cold_start")
        return float(cold.get("prefill") or 0.0), float(cold.get("decode") or 0.0)

    def measured_cold_start(self) -> tuple[float, float]:
        """Return the extra seconds of the first calls of a server that was not warmed up."""
        cold = self.section("cold") or self.section("cold_start")
        if not cold:
            raise BadInput(
                f"engine.start: profile {self.name} has no seconds of a cold start; give them as engine.cold_start"
            )
        return float(cold.get("prefill") or 0.0), float(cold.get("decode") or 0.0)

    @property
    def front_end(self) -> tuple[float, float]:
        """Seconds from sending a request to the scheduler, and seconds per request; 0 unless a server was measured."""
        front_end = self.section("front_end")
        return float(front_end.get("seconds") or 0.0), float(front_end.get("per_request") or 0.0)

    def cost_of_run(self, noise_seed: Optional[int] = None, warm: bool = False) -> StepCost:
        """Return the cost model of one run: with noise if there is a seed, and with the extra time of new shapes.

        A server that is warm has prepared all shapes.
        """
        cost = self.cost if noise_seed is None else self.with_noise(noise_seed)
        first = self.about.get("first_use")
        return cost if warm or not first else FirstUseCost(cost, int(first["tokens"]), float(first["seconds"]))

    @property
    def sampling(self) -> dict[str, SamplingTerm]:
        """Seconds to select the next tokens, by name of the variant that was measured."""
        terms = self.section("sampling").get("terms") or {}
        return {str(name): SamplingTerm(float(term["step"]), float(term["row"])) for name, term in terms.items()}

    @property
    def sampling_used(self) -> Optional[str]:
        """The variant that the measured steps used, or None if the profile does not say it."""
        used = self.section("sampling").get("used")
        return None if used is None else str(used)

    def for_run(self, sampling: Optional[str] = None, host: HostPart = NO_HOST) -> Profile:
        """Return the profile of a run that selects tokens in this way; None is the way of the measured steps.

        A host time that was measured in the run replaces that of the profile.
        """
        profile = replace(self, cost=CostWithHost(self.cost, host)) if host != NO_HOST else self
        return profile._with_sampling(sampling)

    def overlapped(self, saved: HostPart = NO_HOST) -> Profile:
        """Return the profile of an engine with steps in flight: the host works while the device runs.

        `saved`: by how much such a step is shorter than one of the profile.
        """
        if saved == NO_HOST == host_of(self.cost)[0]:
            return self
        return replace(self, cost=OverlappedCost(self.cost, saved))

    def _with_sampling(self, variant: Optional[str]) -> Profile:
        used, terms = self.sampling_used, self.sampling
        if variant is None or variant == used:
            return self
        if variant not in terms or used not in terms:
            known = f"only of {', '.join(terms)}" if terms else "of none"
            raise BadInput(
                f"engine.sampling: profile {self.name} has no time of {variant}, {known}; "
                "measure it with `sim calibrate probe`"
            )
        new, old = terms[variant], terms[used]
        cost = SampledCost(self.cost, SamplingTerm(new.step - old.step, new.row - old.row))
        return replace(self, cost=cost, about={**self.about, "sampling": {**self.about["sampling"], "used": variant}})

    @property
    def error(self) -> Mapping[str, Any]:
        """Held-out error per kind of step, as fractions of the measured time: mean, and largest or quantiles."""
        return dict(self.section("error"))

    @property
    def mean_errors(self) -> dict[str, float]:
        """Mean held-out error per kind of step, or of the times of whole runs."""
        means = {str(kind): (error or {}).get("mean") for kind, error in self.error.items()}
        return {kind: abs(float(mean)) for kind, mean in means.items() if mean is not None}

    def with_noise(self, seed: int) -> StepCost:
        """Return a cost model with the noise of the measured steps; the seed makes it reproducible."""
        noise = self.about.get("noise")
        if not isinstance(noise, Mapping) or not noise:
            raise BadInput(f"noise: profile {self.name} has no measured noise; measure it with `sim calibrate probe`")
        return NoisyCost(self.cost, noise, seed)

    @property
    def uncertainty(self) -> Uncertainty:
        """The joint uncertainty of the parameters; without one in the profile, only the spread between sessions."""
        stored = self.section("uncertainty")
        session = stored.get("session")
        return Uncertainty(stored.get("draws") or (), SESSION_SPREAD if session is None else float(session))

    def in_same_session(self) -> Profile:
        """Return the profile for a run of the session that measured it: step times vary less than between sessions."""
        stored = {**self.section("uncertainty"), "session": min(self.uncertainty.session, RUN_SPREAD)}
        return replace(self, about={**self.about, "uncertainty": stored})

    def measured_within(self, seconds: float, now: datetime) -> bool:
        """Return whether the profile was measured no longer ago than this."""
        try:
            date = datetime.fromisoformat(str(self.about.get("date")))
        except ValueError:
            return False
        date = date if date.tzinfo is not None else date.replace(tzinfo=timezone.utc)
        return abs((now - date).total_seconds()) <= seconds

    def representatives(self, count: int) -> list[Profile]:
        """Return profiles whose cost models represent the uncertainty of this one."""
        return [replace(self, cost=cost) for cost in self.uncertainty.representatives(self.cost, count)]

    def outside_range(self, largest: Mapping[str, float]) -> list[str]:
        """Return the values of a run's largest step shape that exceed the measured range."""
        grid = self.section("grid")
        return [
            f"{name} {value:g} (measured {grid[name][0]:g} to {grid[name][1]:g})"
            for name, value in largest.items()
            if name in grid and value > grid[name][1]
        ]


def bundled_profiles() -> dict[str, Path]:
    """Return the folders of the profiles in the package, by name."""
    folder = Path(str(files("servesim.calibrate.profiles")))
    return {path.parent.name: path.parent for path in sorted(folder.glob("*/profile.yaml"))}


def exists(path: Path) -> bool:
    """Whether a path exists; a name with unusable characters does not."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    return exists(path) and path.is_dir()


def load_profile(source: Any) -> Profile:
    """Load a bundled profile by name, a folder by path, or the costs of a scenario (a mapping)."""
    if isinstance(source, Mapping):
        digest = hashlib.sha256(repr(sorted(source.items(), key=str)).encode()).hexdigest()[:16]
        return Profile("inline", cost_from(source, "profile"), digest=digest)
    folder = bundled_profiles().get(str(source)) or Path(str(source))
    file = folder / "profile.yaml" if is_folder(folder) else folder
    if not exists(file):
        known = ", ".join(bundled_profiles()) or "none"
        raise BadInput(f"profile {source}: no such bundled profile or folder with a profile.yaml; bundled: {known}")
    about = read_yaml(file)
    validate(ProfileFile, about, str(file))
    terms = about.pop("cost")
    load = TABLE_FILES.get(str(terms.get("kind")))
    if load is not None:
        cost = load(file.parent / str(terms.get("tables", "tables.npz")), terms.get("base", 0.0))
    else:
        cost = cost_from(terms, f"{file}: cost")
    check_draws(about.get("uncertainty"), cost, str(file))
    return Profile(str(about.get("name", file.parent.name)), cost, about, file.parent, folder_digest(file.parent))


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
    validate(ProfileFile, tree, f"{path}: not written")
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
