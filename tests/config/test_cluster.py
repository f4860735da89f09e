"""The section `cluster`: short forms, settings of routers, errors, and the schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.config.layers import read_scenario_file
from servesim.config.scenario import scenario_from
from servesim.config.schema import scenario_schema
from servesim.core import BadInput
from servesim.core.fields import policy_fields
from servesim.routers import ROUTERS

from ..study import sweeps


def cluster_of(section: Any, *settings: str, folder: Path) -> Any:
    (folder / "scenario.yaml").write_text(yaml.safe_dump({**sweeps.base(), "cluster": section}))
    return scenario_from(read_scenario_file(folder / "scenario.yaml", settings)).cluster


def test_the_name_of_a_router_may_stand_for_it(tmp_path: Path) -> None:
    short = cluster_of({"router": "llm-d"}, "cluster.router.prefix=1", folder=tmp_path)
    assert short.router == {"name": "llm-d", "prefix": 1}
    assert short.make_router().prefix == 1 and short.size == 1
    other = cluster_of({"router": {"name": "llm-d", "prefix": 1}}, "cluster.router=random", folder=tmp_path)
    assert other.router == {"name": "random"}


def test_replicas_have_names_if_there_are_several(tmp_path: Path) -> None:
    assert cluster_of({"replicas": 3}, folder=tmp_path).names == ["replica/0", "replica/1", "replica/2"]
    assert cluster_of({"replicas": 1}, folder=tmp_path).names == []
    pools = [{"name": "a", "replicas": 2}, {"name": "b"}]
    assert cluster_of({"pools": pools}, folder=tmp_path).names == ["a/0", "a/1", "b/0"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"router": {"prefix": 1}}, "cluster.router.prefix: unknown key of round-robin"),
        ({"router": "least-request"}, "did you mean least-requests"),
        ({"router": {"name": "llm-d", "kv": "much"}}, "cluster.router.kv: expected"),
        ({"replicas": 0}, "cluster.replicas: expected"),
        ({"replicas": 2, "pools": [{"name": "a"}]}, "one of replicas and pools"),
    ],
)
def test_a_wrong_section_is_one_line(tmp_path: Path, section: Any, message: str) -> None:
    with pytest.raises(BadInput) as bad:
        cluster_of(section, folder=tmp_path)
    assert message in str(bad.value) and "\n" not in str(bad.value)


def test_the_schema_has_every_router_with_its_fields() -> None:
    router = scenario_schema()["$defs"]["Cluster"]["properties"]["router"]
    assert router["properties"]["name"]["examples"] == list(ROUTERS)
    fields = {rule["if"]["properties"]["name"]["const"]: set(rule["then"]["properties"]) for rule in router["allOf"]}
    assert fields == {name: {"name", *policy_fields(kind)} for name, kind in ROUTERS.items()}


def test_config_validate_checks_the_router(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "scenario.yaml").write_text(yaml.safe_dump({**sweeps.base(), "cluster": {"router": "no-such"}}))
    assert sweeps.sim("config", "validate", tmp_path / "scenario.yaml") == 2
    assert "cluster.router.name: no router 'no-such'; known: round-robin, random" in capsys.readouterr().err
