"""The versions in constraints.txt: they cover every direct dependency and satisfy its lower bound."""

from __future__ import annotations

import configparser

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .conftest import ROOT

OWN_VERSIONS = ("ascend",)  # extras with exact versions, for another environment


def direct_dependencies() -> list[str]:
    """Return the requirements of setup.cfg, with those of the extras."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    extras = dict(config["options.extras_require"])
    texts = [config["options"]["install_requires"], *(extras[name] for name in extras if name not in OWN_VERSIONS)]
    return [line for text in texts for line in text.split("\n") if line]


def versions() -> dict[str, str]:
    """Return the tested version of every package."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.partition("==")[::2] for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize("requirement", direct_dependencies())
def test_a_direct_dependency_has_a_tested_version_within_its_bounds(requirement: str) -> None:
    needed = Requirement(requirement)
    version = versions()[canonicalize_name(needed.name)]
    assert needed.specifier.contains(version)


def test_constraints_name_versions_only() -> None:
    """No local path and no address: they would hold on one machine only."""
    for name, version in versions().items():
        assert version and not set("@/ +") & set(name + version), f"{name} {version}"
