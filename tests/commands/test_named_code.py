"""Every key of a scenario that can name code: the page refuses it, and commands on stored results execute none of it.

The keys come from the schema of the scenario. So a new key is tested without a change of this file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from servesim.cli import main
from servesim.config.first_scenario import flow
from servesim.config.layers import merge, read_scenario_file
from servesim.config.scenario import Scenario, scenario_from
from servesim.config.user_code import allow_code, load_module, use_access
from servesim.core import BadInput
from servesim.explorer.controls import controls_of
from servesim.explorer.state import Choice, Origin
from servesim.runs.simulate import simulate

CODE = """
from servesim.policies.papers import Orca
from servesim.routers import ROUTERS
class Gather(Orca):
    pass
class Route(ROUTERS["round-robin"]):
    pass
"""
SCENARIO = "profile: {base: 0.001}\nworkload: {requests: 3, arrivals: {kind: burst}, lengths: {prompt: 8, output: 2}}\n"
SECTIONS = ("policy", "cluster.router", "cluster.decode_router", "cluster.pools.0.policy")
EXECUTED = {f"{section}{name}" for section in SECTIONS for name in ("", ".name")}  # keys that name a Python file
NAMES = ("", "name", "scheduler_cls")  # of a section without fields of its own: as a text, and with these keys


def keys_of(
    schema: Mapping[str, Any], types: Mapping[str, Any], key: str = "", inside: tuple[str, ...] = ()
) -> set[str]:
    """Return all keys of a schema whose value may be a text; a number is that of an item of a list."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return set() if name in inside else keys_of(types[name], types, key, (*inside, name))
    found = {key} if schema.get("type") == "string" and not schema.keys() & {"enum", "const"} else set()
    if schema.get("type") == "object" and "properties" not in schema:
        found |= {f"{key}.{name}".rstrip(".") for name in NAMES}
    parts = [(key, option) for form in ("anyOf", "oneOf", "allOf") for option in schema.get(form, ())]
    parts += [(f"{key}.{name}".lstrip("."), part) for name, part in schema.get("properties", {}).items()]
    parts += [(f"{key}.0", schema["items"])] if isinstance(schema.get("items"), dict) else []
    return found.union(*(keys_of(part, types, place, inside) for place, part in parts))


def tree_of(key: str, text: str) -> Any:
    """Return a scenario with one key."""
    first, _, rest = key.partition(".")
    value = tree_of(rest, text) if rest else text
    if first == "0":
        return [{"name": "pool", **value} if isinstance(value, dict) else value]
    return {first: value}


def all_keys() -> list[str]:
    schema = Scenario.model_json_schema()
    return sorted(keys_of(schema, schema["$defs"]))


class Place:
    """A working folder with a file of code that leaves a mark when it is executed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._mark = folder, folder / "executed"
        (folder / "mine.py").write_text(f"{CODE}\nopen({str(self._mark)!r}, 'w').close()\n")
        (folder / "plain.yaml").write_text(SCENARIO)

    def was_executed(self) -> bool:
        """Whether the file was executed since the last call."""
        found = self._mark.exists()
        self._mark.unlink(missing_ok=True)
        load_module.cache_clear()
        return found

    def trees(self, keys: Iterable[str] = ()) -> Iterator[tuple[str, Any]]:
        """Yield each key, of all keys by default, with a scenario that names the file there."""
        for key in keys or all_keys():
            name = "Route" if "router" in key else "Gather"
            yield key, merge(read_scenario_file("plain.yaml"), tree_of(key, f"mine.py:{name}"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path)


def test_the_keys_that_execute_code_are_known(place: Place) -> None:
    """So the other tests here name code at the right places. A new key that executes code is added there."""
    executed = set()
    for key, tree in place.trees():
        with suppress(BadInput), allow_code():
            simulate(scenario_from(tree))
        executed |= {key} if place.was_executed() else set()
    assert executed == EXECUTED


def test_the_page_executes_no_code_that_it_names(place: Place) -> None:
    with allow_code():
        origin = Origin("plain.yaml")
    for key, tree in place.trees():
        section = key.partition(".")[0]
        choice = Choice(settings={section: flow(tree[section])})
        with pytest.raises(BadInput, match=r"executes only code that its scenario file names|no such file"):
            origin.tree(choice)
        for use in (origin.scenario, origin.copies, lambda choice: controls_of(origin, choice)):
            with pytest.raises(BadInput):
                use(choice)
        assert not place.was_executed(), key


def test_the_permission_of_the_page_is_that_of_the_names_in_its_file(place: Place) -> None:
    """Also if the check before it does not know a key."""
    with allow_code():
        origin = Origin("plain.yaml")
    for key, tree in place.trees():
        with suppress(BadInput), use_access(origin.access):
            simulate(scenario_from(tree))
        assert not place.was_executed(), key


def test_stored_results_execute_no_code_that_they_name(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    (place.folder / "sweep.yaml").write_text("base: plain.yaml\nparams: {policy.decode_batch: [1, 2]}\n")
    assert main(["run", "plain.yaml", "-o", "run", "-q"]) == 0
    assert main(["sweep", "sweep.yaml", "-o", "swept", "-q", "-j", "1", "--no-report"]) == 0
    manifest, experiment = Path("run/manifest.json"), Path("swept/experiment.json")
    stored, terms = json.loads(manifest.read_text()), json.loads(experiment.read_text())
    Path("other").mkdir()
    for name in ("result.json", "requests.csv"):
        (Path("other") / name).write_text((Path("run") / name).read_text())
    for key, tree in place.trees(EXECUTED):
        Path("other/manifest.json").write_text(json.dumps({**stored, "scenario": merge(stored["scenario"], tree)}))
        experiment.write_text(json.dumps({**terms, "base": merge(terms["base"], tree)}))
        codes = [main(["compare", *sides, "-o", "compared"]) for sides in (("run", "other"), ("swept", "swept:1"))]
        codes += [main(["report", folder]) for folder in ("other", "swept")]
        assert not place.was_executed(), key
        assert codes == [0, 0, 0, 0], key
