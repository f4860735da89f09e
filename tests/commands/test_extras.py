"""A missing optional package is named with the extra that installs it, and a command that works in a clone."""

from __future__ import annotations

import configparser
import sys

import pytest
from packaging.requirements import Requirement
from servesim.core import BadInput
from servesim.core.errors import EXTRAS, missing_package
from servesim.study.executor import dask_pool
from servesim.study.search_file import import_optuna

from ..conftest import ROOT


@pytest.mark.parametrize("package", EXTRAS)
def test_every_package_is_in_its_extra(package: str) -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    extra = config["options.extras_require"][EXTRAS[package]]
    names = [Requirement(line).name.replace("-", "_") for line in extra.split("\n") if line]
    assert package in names or package == "distributed"  # dask[distributed]


def test_the_command_works_in_a_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("optuna", "distributed"):
        monkeypatch.setitem(sys.modules, package, None)
    expected = "needs optuna, the extra `search`: run pip install '.[search]' in the clone of servesim"
    assert missing_package("optuna") == expected
    with pytest.raises(BadInput) as search:
        import_optuna()
    assert str(search.value) == expected
    with pytest.raises(BadInput, match=r"^--executor dask: needs distributed, the extra `cluster`: run pip install"):
        dask_pool("127.0.0.1:1")
