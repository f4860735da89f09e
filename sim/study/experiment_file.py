"""experiment.json, search.json and tune.json: names, keys, and the check that a resumed run is still the same.

A resumed experiment must read the same files: runs on an older and a newer trace must not share one result. So the
files hold digests of the traces, profiles, and user policies and routers, also those of the pools of a cluster.

Paths in them start at the working folder of the first run. If there are such paths, the key `working_folder` says where
it is, as seen from the folder of the experiment. So commands in another working folder find the same files.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from servesim.config.cluster import router_class
from servesim.config.layers import ROUTERS, Tree, as_section
from servesim.config.paths import find_beside, names_relative_file, paths_in, resolve_settings, resolve_sweep_paths
from servesim.config.registry import policy_class
from servesim.config.scenario import Scenario
from servesim.config.user_code import names_file
from servesim.core import BadInput
from servesim.costs.device_profile import load_profile
from servesim.costs.named_profile import is_named, measured_for
from servesim.files.read import quote, read_json
from servesim.files.write import FileExists, list_files, write_json
from servesim.version import __version__

EXPERIMENT_FILE = "experiment.json"
WORKING_FOLDER = "working_folder"
MISSING = "missing"  # instead of the digest of a file that does not exist
NEW_FOLDER = "use another folder with -o"


def name_of_file(path: Path) -> str:
    """Return the name of an experiment whose file does not give one."""
    return valid_name(path.stem)


def valid_name(text: str) -> str:
    """Return a text as the name of an experiment."""
    return re.sub(r"[^\w .+-]", "-", text)[:100].lstrip(" .+-") or "sweep"


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


def open_folder(
    folder: Path, file: str, terms: Mapping[str, Any], resume: bool, noun: str,
    otherwise: str = "use --fresh or another folder (-o)",
) -> None:  # fmt: skip
    """Create the folder of a sweep, a search or a tuning run, or check that it holds the same one."""
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder}: expected a folder to write to, found a file")
    others = [path for path in list_files(folder) if not path.name.startswith(file)]
    if others and not (folder / file).exists():
        raise BadInput(f"{folder}: expected a new folder or that of a {noun}, found {others[0].name} in it")
    try:  # atomic, so that only one of several processes writes it
        write_json(folder / file, stored_terms(terms, folder), overwrite=False)
    except FileExists:
        if not resume and others:
            raise BadInput(f"{folder}: already holds a {noun}; continue with --resume, or {otherwise}") from None
        check_unchanged(terms, folder / file, noun)


def check_unchanged(terms: Mapping[str, Any], file: Path, noun: str) -> None:
    """Raise BadInput if an experiment is resumed with other terms than those of its file."""
    new, stored = json.loads(json.dumps(terms)), read_terms(file)
    for key in ("versions", "inputs"):
        if not isinstance(stored.get(key), dict):
            raise BadInput(f"{file}: {key}: expected names and values, got {quote(stored.get(key))}")
    for name, version in new["versions"].items():
        earlier = stored["versions"].get(name)
        if earlier not in (None, version):
            raise BadInput(
                f"{file.parent}: the {noun} was started with {name} {earlier}, this is {name} {version}; "
                f"continue with {earlier}, or {NEW_FOLDER}"
            )
    for key in new:
        if key not in ("versions", "inputs") and new[key] != stored.get(key):
            raise BadInput(f"{file.parent}: holds another {noun}: {key} differs; {NEW_FOLDER}")
    for name, digest in new["inputs"].items():
        if digest != stored["inputs"].get(name, digest):
            change = "was removed" if digest == MISSING else "changed"
            raise BadInput(f"{file.parent}: {name} {change} since the {noun} started; restore it, or {NEW_FOLDER}")


def versions() -> dict[str, str]:
    """Return the versions that the numbers of a run depend on."""
    return {"servesim": __version__, "python": platform.python_version()}


def input_digests(scenarios: Iterable[Tree]) -> dict[str, str]:
    """Return the digest of every file that the scenarios read: `trace X.csv`, `policy own.py`, `profile NAME`."""
    names = sorted({name for tree in scenarios for name in input_names(tree)})
    return {f"{kind} {path}": digest(kind, path) for kind, path in names}


def input_names(tree: Tree) -> Iterable[tuple[str, str]]:
    """Yield the kind and the path of every file that a scenario reads."""
    trace = as_section("trace", tree.get("trace")) or {}
    yield from ((kind, trace[key]) for kind, key in (("trace", "path"), ("tokenizer", "tokenizer")) if trace.get(key))
    yield from (("workload", path) for path in paths_in({"workload": tree.get("workload")}))
    yield from ((kind, name.rpartition(":")[0] if ".py:" in name else name) for kind, name in code_of(tree))
    default = Scenario.model_fields["profile"].default
    for profile in (tree.get("profile", default), *(pool.get("profile") for pool in pools_of(tree))):
        if isinstance(profile, str) or is_named(profile):
            yield "profile", profile if isinstance(profile, str) else measured_for(profile)


def pools_of(tree: Tree) -> Sequence[Tree]:
    """Return the pools of the cluster of a scenario."""
    return (tree.get("cluster") or {}).get("pools") or ()


def code_of(tree: Tree) -> Iterable[tuple[str, str]]:
    """Yield the user's policies and routers of a scenario, FILE.py:NAME or FILE.py, with their kind."""
    sections = [("policy", "policy", part) for part in (tree, *pools_of(tree))]
    sections += [("router", key, tree.get("cluster") or {}) for key in ROUTERS]
    for kind, key, part in sections:
        name = (as_section(key, part.get(key)) or {}).get("name")
        if isinstance(name, str) and names_file(name):
            yield kind, name


def load_code(scenarios: Iterable[Tree]) -> None:
    """Load the user's files of an experiment before its first run: with a file that does not load, each run fails."""
    for kind, name in sorted({code for tree in scenarios for code in code_of(tree)}):
        policy_class(name) if kind == "policy" else router_class(name, "cluster.router")


def digest(kind: str, path: str) -> str:
    """Return a digest of the content of a file or folder."""
    if kind == "profile":
        return load_profile(path).digest
    if path == "-":
        raise BadInput(f"{kind} -: expected a file: many runs read it, and a resumed sweep reads it again")
    start, result = Path(path), hashlib.sha256()
    try:
        files = sorted(file for file in start.rglob("*") if file.is_file()) if start.is_dir() else [start]
        if not files or not all(file.is_file() for file in files):
            return MISSING
        for file in files:
            with file.open("rb") as data:
                while block := data.read(1 << 20):
                    result.update(block)
    except (OSError, ValueError) as error:
        raise BadInput(f"{kind} {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return result.hexdigest()[:16]
