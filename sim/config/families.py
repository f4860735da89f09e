"""What a folder of policies/ holds beside the policies: the configuration of the server, and what to try on it.

The modules config_file.py, export.py and tuning.py of a folder import this package. So this package loads them by
name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Optional

from servesim.core import ClientRequest
from servesim.costs.kv_memory import device_memory, memory_of_profile
from servesim.policies import FAMILIES


class ConfigFile(NamedTuple):
    """The configuration file of a real server, which a scenario may name."""

    title: str  # e.g. the config.json of MindIE
    scenario: Callable[[Mapping[str, Any], str], dict[str, Any]]  # of a file and its name
    not_simulated: Callable[[Mapping[str, Any], str], Optional[str]] = lambda tree, where: None  # in a file, as a text
    without_blocks: str = ""  # warning if the file gives no number of KV blocks; {blocks} is the number of the run


def family_modules(name: str) -> Iterator[Any]:
    """Yield the modules of this name, of the families that have one."""
    for family in FAMILIES:
        path = f"servesim.policies.{family}.{name}"
        if find_spec(path) is not None:
            yield import_module(path)


def config_files() -> dict[str, str]:
    """Return the folders of the families with a configuration file, by the key that only such a file has."""
    return {family.config_key: folder for folder, family in FAMILIES.items() if family.config_key}


def read_by(folder: str) -> ConfigFile:
    """Return the configuration file that a family reads."""
    found: ConfigFile = import_module(f"servesim.policies.{folder}.config_file").CONFIG_FILE
    return found


def config_file_in(tree: Mapping[str, Any]) -> Optional[ConfigFile]:
    """Return the configuration file that a mapping comes from; None: from another file."""
    return next((read_by(folder) for key, folder in config_files().items() if key in tree), None)


def config_file_of(policy: str) -> Optional[ConfigFile]:
    """Return the configuration file of the server that runs a policy."""
    folders = (folder for folder in config_files().values() if policy in FAMILIES[folder].policies)
    return next(map(read_by, folders), None)


class Tuning(NamedTuple):
    """What `sim recommend` tries on a server."""

    preset: str  # the newest version
    grids: Sequence[Mapping[str, Sequence[Any]]]  # settings that matter -> values; what it refuses is left out
    # settings that it chooses by device, or that the requests need: of the profile's description and the requests
    defaults: Callable[[Mapping[str, Any], Sequence[ClientRequest]], Mapping[str, Any]]


def memory_settings(about: Mapping[str, Any], **engine: Any) -> dict[str, Any]:
    """Return keys of the engine section with the memory of a profile's device; nothing if its model has no size."""
    memory = device_memory(about) if memory_of_profile(about) else None
    return {f"engine.{key}": value for key, value in {"device_memory": memory, **engine}.items()} if memory else {}


def longest(shipped: int, lengths: Iterable[int]) -> int:
    """Return the shipped limit of a length; if a request is longer, its length in whole kilotokens."""
    needed = max(lengths, default=0)
    return shipped if needed <= shipped else -(-needed // 1024) * 1024


@cache
def tunings() -> dict[str, Tuning]:
    """Return what to try, by the name of the server."""
    return {name: tuning for module in family_modules("tuning") for name, tuning in module.TUNINGS.items()}
