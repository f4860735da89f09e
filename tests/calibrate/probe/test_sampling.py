"""The probe of the selection of tokens: measured apart from the model call, fitted, stored and shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from servesim.calibrate.device.backend import MODELS, Row
from servesim.calibrate.device.fake import FakeBackend
from servesim.calibrate.probe.token_selection import fit_term, measure_sampling, sampling_keys
from servesim.cli import main
from servesim.costs.device_profile import load_profile

from ..conftest import VirtualTime

TERMS = {"host": {"step": 2e-3, "row": 1e-3}, "ops": {"step": 1e-3, "row": 0.0}}


def device(**options: Any) -> FakeBackend:
    backend = FakeBackend({"base": 5e-3}, sampling_terms=TERMS, **options)
    backend.load(MODELS["tiny"], 64, 16)
    return backend


def test_the_times_of_a_device_are_found(virtual_time: VirtualTime) -> None:
    medians = measure_sampling(device(), 8)
    assert [rows for rows, _ in medians["host"]] == [rows for rows, _ in medians["ops"]] == [1, 2, 4, 8]
    keys = sampling_keys("host", medians)
    assert keys["used"] == "host"
    for name, term in TERMS.items():
        for rows in (1, 8):
            found = keys["terms"][name]["step"] + rows * keys["terms"][name]["row"]
            assert found == pytest.approx(term["step"] + rows * term["row"], rel=0.01), name


def test_each_selection_follows_a_model_call_and_the_variants_alternate() -> None:
    calls: list[Any] = []

    class Recorded(FakeBackend):
        def compute(self, rows: Any) -> None:
            calls.append(len(rows))
            super().compute(rows)

        def select_tokens(self, sampling: str) -> list[int]:
            calls.append(sampling)
            return super().select_tokens(sampling)

    backend = Recorded({}, sampling_terms=TERMS)
    backend.load(MODELS["tiny"], 64, 16)
    measure_sampling(backend, 2, budget=0.0)
    once = [1, "host", 1, "ops", 2, "host", 2, "ops"]
    assert calls == 4 * once  # a warm-up and three rounds


def test_a_variant_or_a_size_that_fails_is_left_out() -> None:
    class Partial(FakeBackend):
        def select_tokens(self, sampling: str) -> list[int]:
            if sampling == "ops":
                raise RuntimeError("no kernel")
            return super().select_tokens(sampling)

    backend = Partial({}, limit=3, sampling_terms=TERMS)
    backend.load(MODELS["tiny"], 64, 16)
    medians = measure_sampling(backend, 8, budget=0.0)
    assert {name: [rows for rows, _ in points] for name, points in medians.items()} == {"host": [1, 2]}


@pytest.mark.parametrize(("step", "row"), [(3e-4, 2e-6), (0.0, 1e-5), (5e-4, 0.0)])
def test_the_fit_finds_the_terms(step: float, row: float) -> None:
    term = fit_term([[rows, step + row * rows] for rows in (1, 2, 4, 8, 32, 128)])
    assert term == pytest.approx({"step": step, "row": row}, rel=1e-6, abs=1e-12)


def test_no_fitted_term_is_negative() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        term = fit_term([[rows, 1e-4 * rng.random()] for rows in (1, 2, 4, 8)])
        assert min(term.values()) >= 0


def test_a_fake_device_takes_the_time_of_its_variant() -> None:
    rows = [Row([1], 1, [1])] * 4
    tokens = {}
    for name in TERMS:
        backend = device(sampling=name)
        tokens[name] = backend.step(rows)
        backend.compute(rows)
        assert backend.select_tokens("host") == backend.select_tokens("ops") == tokens[name]
    assert tokens["host"] == tokens["ops"]


@pytest.mark.usefixtures("device_here")
def test_a_probed_profile_has_the_terms_and_check_shows_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = ["calibrate", "probe", "--backend", "fake", "--max-rows", "8", "--max-tokens", "64", "--max-seq-len", "160"]
    probe += ["--budget", "0.5", "--precision", "50%", "--option", f"sampling_terms={TERMS}", "--quiet"]
    assert main([*probe, "-o", str(tmp_path)]) == 0
    stored = yaml.safe_load((tmp_path / "probe.yaml").read_text(encoding="utf-8"))
    assert stored["about"]["sampling"] == "host"
    assert [rows for rows, _ in stored["sampling"]["ops"]] == [1, 2, 4, 8]
    profile = load_profile(tmp_path)
    assert profile.sampling_used == "host"
    assert set(profile.sampling) == {"host", "ops"}
    assert profile.sampling["host"].seconds(8) > 2 * profile.sampling["ops"].seconds(8)
    capsys.readouterr()
    assert main(["calibrate", "check", str(tmp_path)]) == 0
    assert "host (in the measured steps)" in capsys.readouterr().out
    assert main(["calibrate", "fit", str(tmp_path)]) == 0  # a new fit of the samples keeps the terms
    assert load_profile(tmp_path).sampling == profile.sampling
    assert main([*probe, "--option", "sampling=ops", "-o", str(tmp_path)]) == 2
    assert "was probed with sampling host, now ops" in capsys.readouterr().err


def test_error_for_a_damaged_probe_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "samples.csv").write_text("kind\n", encoding="utf-8")
    for medians in ({"host": [[1]]}, {"host": []}, {"host": [[1, -1.0]]}, [1]):
        (tmp_path / "probe.yaml").write_text(yaml.safe_dump({"about": {}, "sampling": medians}), encoding="utf-8")
        assert main(["calibrate", "fit", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "sampling" in error
