"""experiment.json and search.json: names and keys, and the check that a resumed experiment is still the same.

Paths in them start at the working folder of the first run. If there are such paths, the key `working_folder` says where
it is, as seen from the folder of the experiment. So commands in another working folder find the same files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

from pydantic import AfterValidator, Field
from servesim.config.paths import find_beside, names_relative_file, resolve_settings, resolve_sweep_paths
from servesim.core import BadInput
from servesim.core.limits import MAX_DRAWS, MAX_RATE, MIN_RATE
from servesim.files.checked import validate
from servesim.files.read import quote, read_json
from servesim.files.stored import Stored
from servesim.statistics.objective import METRICS

from .inputs import MISSING

EXPERIMENT_FILE = "experiment.json"
WORKING_FOLDER = "working_folder"
START_KEYS = ("versions", "profile", "inputs")  # describe the start of an experiment; older files lack some
OPTIONAL_KEYS = ("intervals", "subject_to", "indifference", "loads", "precision")  # written only if they are used
INDIFFERENCE = 0.005  # default of `indifference`
NEW_FOLDER = "use another folder with -o"
NAME_PATTERN = re.compile(r"\w[\w .+-]{0,99}")  # a name is part of a path and of a comment in best.yaml
Fraction = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=10**9)]


def check_name(name: str) -> str:
    """Return the name of an experiment; it must not contain a separator of paths or lines."""
    if not NAME_PATTERN.fullmatch(name):
        raise ValueError("a name of letters, digits, spaces and . _ + -, at most 100 characters, such as knobs-2")
    return name


def name_of_file(path: Path) -> str:
    """Return the name of an experiment whose file does not give one."""
    name = re.sub(r"[^\w .+-]", "-", path.stem)[:100].lstrip(" .+-")
    return name or "sweep"


Name = Annotated[str, AfterValidator(check_name)]


class ObjectiveKeys(Stored):
    """A metric and its goal."""

    metric: Literal[METRICS]  # type: ignore[valid-type]
    goal: Literal["min", "max"]


class ExperimentFile(Stored):
    """The keys of experiment.json."""

    name: str
    base: dict[str, Any]
    configs: list[dict[str, Any]] = Field(min_length=1)
    objectives: list[ObjectiveKeys] = Field(min_length=1)
    replications: Count
    confidence: Fraction
    ci: Optional[Fraction]
    max_replications: Count
    cut: Optional[list[Annotated[float, Field(ge=0, lt=1)]]] = Field(min_length=2, max_length=2)
    confirm: int = Field(0, ge=0, le=10**6)
    intervals: int = Field(0, ge=0, le=MAX_DRAWS)
    subject_to: list[str] = Field([])
    indifference: float = Field(INDIFFERENCE, ge=0, lt=1)
    loads: list[Annotated[float, Field(ge=MIN_RATE, le=MAX_RATE)]] = Field([])
    precision: Optional[Fraction] = None


def read_experiment_file(folder: Path) -> ExperimentFile:
    """Read experiment.json of a folder; its paths start at the working folder of this process."""
    path = folder / EXPERIMENT_FILE
    if not path.exists():
        raise BadInput(f"{folder}: expected a folder of `sim sweep` or `sim search`; it has no {EXPERIMENT_FILE}")
    return validate(ExperimentFile, read_terms(path), str(path))


def read_terms(path: Path) -> dict[str, Any]:
    """Return the keys of experiment.json or search.json; paths start at the working folder of this process."""
    terms = read_json(path)
    if not isinstance(terms, dict):
        raise BadInput(f"{path}: expected keys and values, got {quote(terms)}")
    start = terms.pop(WORKING_FOLDER, None)
    if start is None:
        return terms
    if not isinstance(start, str) or "\0" in start:
        raise BadInput(f"{path}: {WORKING_FOLDER}: expected a path, got {quote(start)}")
    folder = path.parent / start
    result = resolve_sweep_paths(terms, folder)
    if isinstance(terms.get("configs"), list):
        result["configs"] = resolve_settings(terms["configs"], folder)
    if isinstance(terms.get("inputs"), dict):
        names = {name: name.partition(" ") for name in terms["inputs"]}
        moved = {name: f"{kind} {find_beside(file, folder)}" for name, (kind, _, file) in names.items()}
        result["inputs"] = {moved[name]: digest for name, digest in terms["inputs"].items()}
    return result


def stored_terms(terms: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the keys of a file in an experiment's folder: with the working folder if there are paths that need it."""
    files = [name.partition(" ")[2] for name in terms.get("inputs", {})]
    if not any(names_relative_file({"trace": file}) for file in files) and not names_relative_file(terms["base"]):
        return dict(terms)
    return {**terms, WORKING_FOLDER: os.path.relpath(os.getcwd(), os.path.realpath(folder))}


def check_unchanged(terms: Mapping[str, Any], file: Path, noun: str) -> None:
    """Raise BadInput if an experiment or a search is resumed with terms that differ from its file."""
    new, stored = json.loads(json.dumps(terms)), read_terms(file)
    for key in ("versions", "inputs"):
        if not isinstance(stored.get(key, {}), dict):  # a damaged file must not pass as an old one without digests
            raise BadInput(f"{file}: {key}: expected names and values, got {quote(stored[key])}")
    check_versions(new.get("versions"), stored.get("versions"), file.parent, noun)
    for key in dict.fromkeys([*new, *OPTIONAL_KEYS]):
        if key not in START_KEYS and new.get(key) != stored.get(key):
            raise BadInput(f"{file.parent}: holds another {noun}: {key} differs; {NEW_FOLDER}")
    check_inputs(new.get("inputs"), stored.get("inputs"), file.parent, noun)
    if new.get("profile") != stored.get("profile"):  # of the base; older files have no other digest
        raise BadInput(f"{file.parent}: the profile changed since the {noun} started; {NEW_FOLDER}")


def changed(new: Any, stored: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the entries that differ; files of an older version of servesim may lack entries."""
    for name in new if isinstance(new, dict) and isinstance(stored, dict) else ():
        if name in stored and stored[name] != new[name]:
            yield name, stored[name], new[name]


def check_versions(new: Any, stored: Any, folder: Path, noun: str) -> None:
    """Compare the versions of servesim and Python."""
    for name, earlier, version in changed(new, stored):
        raise BadInput(
            f"{folder}: the {noun} was started with {name} {earlier}, this is {name} {version}; "
            f"continue with {earlier}, or {NEW_FOLDER}"
        )


def check_inputs(new: Any, stored: Any, folder: Path, noun: str) -> None:
    """Compare the digests of the input files."""
    for name, _, digest in changed(new, stored):
        change = "was removed" if digest == MISSING else "changed"
        raise BadInput(f"{folder}: {name} {change} since the {noun} started; restore it, or {NEW_FOLDER}")
