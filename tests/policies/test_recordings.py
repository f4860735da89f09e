"""The recordings themselves: complete, unchanged, and each compared by a test."""

from __future__ import annotations

import hashlib
from pathlib import Path

from . import test_engines_other, test_engines_vllm, test_llm_serving
from .recordings import ENGINES, load, names


def checksums(recordings: Path) -> dict[str, str]:
    """Return the checksum of every recording, by its path."""
    lines = (recordings / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    return {name: checksum for checksum, name in (line.split("  ") for line in lines)}


def test_no_recording_is_missing_and_none_was_added_without_a_checksum(recordings: Path) -> None:
    found = {file.relative_to(recordings).as_posix() for file in recordings.glob("*/*")}
    assert found == set(checksums(recordings))
    assert sum(name.startswith("llm-serving/") for name in found) == 16
    assert sum(name.startswith("engines/") for name in found) == 34


def test_every_recording_is_unchanged(recordings: Path) -> None:
    found = {name: hashlib.sha256((recordings / name).read_bytes()).hexdigest() for name in checksums(recordings)}
    assert found == checksums(recordings)


def test_every_recording_of_an_engine_is_played_by_a_policy(recordings: Path) -> None:
    files = sorted(file.name for file in (recordings / "engines").iterdir())
    assert {load(name).meta["engine"] for name in files} == set(ENGINES)
    compared = [
        *of(test_engines_vllm.test_every_decision_of_v0_is_reproduced),
        *of(test_engines_vllm.test_every_decision_of_v1_is_reproduced),
        *of(test_engines_other.test_every_decision_of_sarathi_is_the_recorded_one),
        *of(test_engines_other.test_every_decision_of_lightllm_is_the_recorded_one),
        *of(test_engines_other.test_every_pass_of_mii_is_the_recorded_one),
    ]
    assert sorted(compared) == files == names("")


def of(test: object) -> list[str]:
    """Return the file names that a test is run with."""
    (mark,) = test.pytestmark  # type: ignore[attr-defined]
    return list(mark.args[1])


def test_every_case_of_llm_serving_is_compared() -> None:
    assert len(test_llm_serving.CASES) == 14
    assert len(test_llm_serving.vectors()) == 60
