"""The bundled profiles: held-out errors are within the documented limits, and no file has private data."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from servesim.calibrate.probe.fitted_profile import fit_profile
from servesim.calibrate.probe.session import read_probe
from servesim.cli import main
from servesim.costs.device_profile import bundled_profiles, load_profile

MAX_ERROR = {
    "h200-llama2-7b": "3%",
    "h200-llama3.1-8b": "3%",
    "cpu-tiny-kbk": "10%",
}  # held-out error of every kind of step
TABLE_ERROR = {  # of the fits of version 0.1, with tables of 19 terms
    "h200-llama2-7b": {"prefill": 0.027407, "decode": 0.0153349, "mixed": 0.026271, "swap": 0.0220919},
    "cpu-tiny-kbk": {"prefill": 0.0838393, "decode": 0.0525027, "mixed": 0.0833115, "swap": 0.0804556},
}
KINDS = {"prefill", "decode", "mixed", "swap"}
PRIVATE = re.compile(r"/(home|root|tmp|work|Users)/|[\w.]+@[\w.]+|https?://")


def test_every_bundled_profile_is_measured_or_fitted_to_logs() -> None:
    assert set(bundled_profiles()) == {*MAX_ERROR, "ascend910b4-llama2-7b"}
    assert all(len(load_profile(name).uncertainty.draws) >= 20 for name in bundled_profiles())


@pytest.mark.parametrize("name", MAX_ERROR)
def test_held_out_errors_are_within_the_limit(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "check", name, "--tolerance", MAX_ERROR[name]]) == 0
    output = capsys.readouterr().out
    assert set(re.findall(r"^held-out error  (\w+)", output, re.MULTILINE)) == KINDS


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name.startswith("h200") else ()) for name in MAX_ERROR]
)
def test_the_fit_is_that_of_the_samples_and_not_worse_than_the_table_before(name: str) -> None:
    stored = load_profile(name)
    assert stored.path is not None
    probed = read_probe(stored.path)
    fitted = fit_profile(stored.path / "samples.csv", probed["about"])
    assert {kind: error for kind, error in fitted.about["total_error"].items() if abs(error) > 0.02} == {}
    errors = fitted.mean_errors
    largest = TABLE_ERROR.get(name, dict.fromkeys(KINDS, 0.03))
    assert {kind: error for kind, error in errors.items() if error > largest[kind]} == {}
    assert stored.mean_errors == pytest.approx(errors, rel=0.01)
    assert len(stored.uncertainty.draws) >= 20


@pytest.mark.parametrize("path", [path for folder in bundled_profiles().values() for path in sorted(folder.glob("*"))],
                         ids=lambda path: f"{path.parent.name}/{path.name}")  # fmt: skip
def test_no_file_of_a_profile_has_private_data(path: Path) -> None:
    assert PRIVATE.findall(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", MAX_ERROR)
def test_a_measured_profile_records_its_source(name: str) -> None:
    about = yaml.safe_load((bundled_profiles()[name] / "profile.yaml").read_text(encoding="utf-8"))
    assert {"device", "model", "dtype", "kernels", "versions", "date", "grid", "noise"} <= set(about)


def test_an_unknown_size_of_a_model_is_one_line_with_the_nearest_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 128, "vocab": 100, "head_dim": 16}
    (tmp_path / "profile.yaml").write_text(yaml.safe_dump({"model": sizes, "cost": {"base": 0.01}}), encoding="utf-8")
    assert main(["calibrate", "check", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "profile.yaml: model: head_dim: unknown key; known: name, layers" in error
    assert error.endswith("did you mean head?\n") and error.count("\n") == 1
