"""Assemble a scenario from layers of keys: preset, configuration of a server, file, options, `--set`.

Presets are the lowest layers. The configuration that `server_config` names is over them, no matter which layer names
it. The keys of all layers follow in their order: later ones win. `assemble` merges them once, `scenario_from` checks
the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from servesim.core import BadInput
from servesim.costs.named_profile import is_named, merge_profile
from servesim.files.read import quote, read_json, show_path
from servesim.files.yaml_reader import parse, read_yaml

from .families import config_file_in, config_files, read_by
from .paths import resolve_paths, resolve_sweep_paths
from .registry import preset

Tree = dict[str, Any]
EXCLUSIVE = (  # a key in a tree that is merged over another one removes the other key there
    ("trace", "workload"), ("workload", "trace"), ("num_blocks", "device_memory"), ("device_memory", "num_blocks"),
    ("replicas", "pools"), ("pools", "replicas"),
)  # fmt: skip
ROUTERS = ("router", "decode_router")  # keys of a cluster
SHORT_FORMS = {"policy": "name", "trace": "path", **dict.fromkeys(ROUTERS, "name")}  # key of a section -> of its text
TRACE_ENDINGS = (".csv", ".jsonl", ".parquet")  # of file names
NAMES = ("policy.name", *(f"cluster.{key}.name" for key in ROUTERS))  # another name drops the fields of the old one
MAX_SECTIONS = 20  # of a key; scenarios have fewer than ten levels


class Layer(NamedTuple):
    """Keys of a scenario from one place: sections that are merged, or settings that each replace one value."""

    keys: Mapping[str, Any]  # a setting is `section.key`
    source: str = ""  # of a setting: how messages name it
    folder: Optional[Path] = None  # of a file: its relative paths are searched there first
    are_settings: bool = False

    def over(self, tree: Tree) -> Tree:
        """Return a tree with these keys over it."""
        if not self.are_settings:
            return merge(tree, {key: value for key, value in self.keys.items() if key != "preset"})
        for key, value in sorted(self.keys.items(), key=name_first):
            try:
                tree = set_key(tree, key, value)
            except BadInput as bad:
                raise BadInput(f"{self.source}: {bad}") from None
        return tree


def assemble(layers: Iterable[Layer], stored: Optional[Tree] = None) -> Tree:
    """Return the keys of a scenario; `stored` is one that was assembled before, which the layers change."""
    found = [
        layer if layer.folder is None else layer._replace(keys=resolve_paths(layer.keys, layer.folder))
        for layer in layers
    ]
    names = [str(layer.keys["preset"]) for layer in found if "preset" in layer.keys and not layer.are_settings]
    lower = [Layer(preset(name)) for name in names]
    servers = [layer.keys["server_config"] for layer in found if "server_config" in layer.keys]
    if servers and isinstance(servers[-1], str):
        lower.append(Layer(read_server(servers[-1])))
    tree: Tree = {}
    for layer in [*lower, Layer(stored or {}), *found]:
        tree = layer.over(tree)
    return tree


def read_scenario_file(path: Union[str, Path], settings: Sequence[str] = ()) -> Tree:
    """Return the scenario of a file, with settings as `--set` has them."""
    return assemble([file_layer(path), *setting_layers(settings)])


def file_layer(path: Union[str, Path]) -> Layer:
    """Return the keys of a scenario file; the configuration of a server is a scenario that names it."""
    tree = read_mapping(path, "scenario")
    if config_file_in(tree) is not None:
        return Layer({"server_config": str(path)})
    return Layer(tree, folder=Path(path).parent)


def setting_layers(settings: Sequence[str]) -> list[Layer]:
    """Return the layers of `--set KEY=VALUE` options; values are YAML."""
    layers = []
    for setting in settings:
        key, sign, text = setting.partition("=")
        option = f"--set {show_path(setting)}"
        if not sign or not key:
            raise BadInput(f"{option}: expected KEY=VALUE, e.g. policy.max_num_seqs=64")
        layers.append(Layer({key: parse(text, option)}, option, are_settings=True))
    return sorted(layers, key=lambda layer: all(map(name_first, layer.keys.items())))


def read_server(path: str) -> Tree:
    """Return the scenario of a server's own configuration."""
    tree = read_mapping(path, "configuration")
    file = config_file_in(tree)
    if file is None:
        raise BadInput(f"{path}: expected {' or '.join(read_by(folder).title for folder in config_files().values())}")
    return file.scenario(tree, path)


def read_sweep_file(path: Union[str, Path], what: str = "sweep") -> Tree:
    """Read the keys of a sweep or search file."""
    return resolve_sweep_paths(read_mapping(path, what), Path(path).parent)


def read_mapping(path: Union[str, Path], what: str) -> Tree:
    """Read a YAML file of scenario, sweep or search keys."""
    if str(path) == "-":
        raise BadInput(f"-: expected a {what} file; only a trace is read from standard input, with --trace -")
    if str(path).lower().removesuffix(".gz").endswith(TRACE_ENDINGS):
        raise BadInput(f"{path}: expected a {what} file (YAML), not a trace; for a trace use --trace {path}")
    tree = read_json(path) if str(path).endswith(".json") else read_yaml(path)  # YAML does not allow all tabs of JSON
    if not isinstance(tree, dict):
        found = "an empty file" if tree is None else type(tree).__name__
        raise BadInput(f"{path}: expected a mapping of {what} keys, got {found}")
    return tree


def as_section(key: str, value: Any) -> Any:
    """Return `policy: NAME`, `router: NAME` and `trace: FILE` as mappings; other values unchanged."""
    return {SHORT_FORMS[key]: value} if key in SHORT_FORMS and isinstance(value, str) else value


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """Return the base with a tree merged over it, key by key. If `over` names another policy, the old fields go."""
    result = without_memory(base, over.get("profile"))
    for key, value in over.items():
        old = as_section(key, result.get(key))
        if key == "profile" and is_named(value):
            result[key] = merge_profile(old, value)
        elif isinstance(old, Mapping) and isinstance(value, Mapping):
            other = key in ("policy", *ROUTERS) and "name" in value and value["name"] != old.get("name")
            result[key] = dict(value) if other else merge(old, value)
        else:
            result[key] = value
    for key, other in EXCLUSIVE:
        if over.get(key) is not None and other not in over:
            result.pop(other, None)
    return result


def without_memory(tree: Mapping[str, Any], profile: Any) -> Tree:
    """Return a scenario without its KV memory if a profile by name is merged over it: it is of another device."""
    engine = tree.get("engine")
    if not (is_named(profile) and isinstance(engine, Mapping)):
        return dict(tree)
    gone = ("num_blocks", "device_memory") if "device" in profile else ("num_blocks",)
    return {**tree, "engine": {key: value for key, value in engine.items() if key not in gone}}


def override(tree: Tree, settings: Sequence[str]) -> Tree:
    """Return a mapping with `KEY=VALUE` settings over it: options of a backend, fields of a policy."""
    for layer in setting_layers(settings):
        tree = layer.over(tree)
    return tree


def value_at(tree: Any, key: str) -> Any:
    """Return the value of `section.key`, None if nothing sets it."""
    section = ""
    for name in key.split("."):
        tree, section = item_of(as_section(section, tree), name), name
    return tree


def texts_in(tree: Any, key: str = "") -> dict[str, str]:
    """Return all texts of a tree by their keys, such as `cluster.pools.0.policy.name`."""
    tree = as_section(key.rpartition(".")[2], tree)
    if isinstance(tree, str):
        return {key: tree}
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    return {
        place: text for name, value in items for place, text in texts_in(value, f"{key}.{name}".lstrip(".")).items()
    }


def item_of(tree: Any, name: str) -> Any:
    """Return the value of a key, or the item of a list (a pool) that has this name."""
    if isinstance(tree, list):
        return next((item for item in tree if isinstance(item, Mapping) and item.get("name") == name), None)
    return tree.get(name) if isinstance(tree, Mapping) else None


def set_key(tree: Tree, key: str, value: Any) -> Tree:
    """Return the tree with the value of `section.key` replaced; another name drops the fields of the old policy."""
    if key.count(".") > MAX_SECTIONS:
        raise BadInput(f"expected at most {MAX_SECTIONS} sections, got {key.count('.')}")
    if key == "profile" and is_named(value):
        return merge(tree, {key: value})
    section, _, name = key.partition(".")
    known: Any = tree.get(section) if is_named(tree.get(section)) else {}
    if section == "profile" and is_named({name: value}) and name not in known:
        return merge(tree, {section: {name: value}})  # over a profile that does not name it: its memory goes
    if key in ("cluster.replicas", "cluster.pools"):
        return merge(tree, {section: {name: value}})
    if key in NAMES and value_at(tree, key) not in (None, value):
        key, value = key.removesuffix(".name"), {"name": value}
    changed: Tree = set_in(tree, key.split("."), value)
    return changed


def set_in(tree: Any, keys: Sequence[str], value: Any) -> Any:
    """Return the tree with one value set; an item of a list (a pool) is found by its name."""
    if isinstance(tree, list) and len(keys) > 1:
        pool = item_of(tree, keys[0])
        if pool is None:
            known = ", ".join(str(item["name"]) for item in tree if isinstance(item, Mapping) and "name" in item)
            raise BadInput(f"no pool {quote(keys[0])}; known: {known or 'none'}")
        return [set_in(item, keys[1:], value) if item is pool else item for item in tree]
    if not isinstance(tree, Mapping):
        raise BadInput(f"expected a section that holds {'.'.join(keys)}, got {quote(tree)}")
    if len(keys) == 1:
        return {**tree, keys[0]: value}
    section = as_section(keys[0], tree.get(keys[0]) or {})
    return {**tree, keys[0]: set_in(section, keys[1:], value)}


def apply_assignment(base: Tree, assignment: Mapping[str, Any]) -> Tree:
    """Return the base scenario with an assignment applied; another policy name drops the fields of the old policy."""
    tree = {**base, "policy": as_section("policy", base.get("policy") or {"name": "llm-serving"})}
    for key, value in sorted(assignment.items(), key=nesting_order):
        if key in ("policy", "policy.name"):
            tree = merge(tree, {"policy": value if isinstance(value, Mapping) else {"name": value}})
        elif key in ("trace", "workload"):
            tree = {k: v for k, v in tree.items() if k not in ("trace", "workload")} | {key: value}
        elif "." not in key and isinstance(value, Mapping):
            tree = merge(tree, {key: value})
        else:
            tree = set_key(tree, key, value)
    return tree


def nesting_order(item: tuple[str, Any]) -> tuple[int, bool]:
    """Sort sections before their keys, and the name of a policy or a router before its fields."""
    return item[0].count("."), name_first(item)


def name_first(item: tuple[str, Any]) -> bool:
    """Sort the name of a policy or a router before its fields, which another name would drop."""
    return item[0] not in NAMES
