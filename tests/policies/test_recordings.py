"""The recordings: complete, unchanged, and each one used by a test."""

from __future__ import annotations

import hashlib
from pathlib import Path

from . import test_engines_other, test_engines_vllm, test_llm_serving
from .recordings import ENGINES, load, recording_names


def checksums(recordings: Path) -> dict[str, str]:
    """Return path -> checksum of every recording."""
    lines = (recordings / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    return {name: checksum for checksum, name in (line.split("  ") for line in lines)}


def test_the_checksums_list_exactly_the_recordings(recordings: Path) -> None:
    files = {file.relative_to(recordings).as_posix() for file in recordings.glob("*/**/*") if file.is_file()}
    assert files == set(checksums(recordings))
    assert sum(name.startswith("llm-serving/") for name in files) == 16
    assert sum(name.startswith("engines/") for name in files) == 34 + 25 + 9
    assert sum(name.startswith("engines/prefix/") for name in files) == 25
    assert sum(name.startswith("engines/groups/") for name in files) == 9


def test_every_recording_is_unchanged(recordings: Path) -> None:
    actual = {name: hashlib.sha256((recordings / name).read_bytes()).hexdigest() for name in checksums(recordings)}
    assert actual == checksums(recordings)


def test_every_recording_of_an_engine_is_compared_with_a_policy(recordings: Path) -> None:
    files = [name for folder in ("", "prefix", "groups") for name in recording_names("", folder=folder)]
    assert {load(name).meta["engine"] for name in files} == set(ENGINES)
    compared = [
        *files_of(test_engines_vllm.test_every_decision_of_v0_is_reproduced),
        *files_of(test_engines_vllm.test_every_decision_of_v1_is_reproduced),
        *files_of(test_engines_vllm.test_every_decision_of_v1_with_its_prefix_cache_is_reproduced),
        *files_of(test_engines_vllm.test_every_decision_of_parallel_sampling_and_beam_search_is_reproduced),
        *files_of(test_engines_other.test_every_decision_of_sarathi_is_reproduced),
        *files_of(test_engines_other.test_every_decision_of_lightllm_is_reproduced),
        *files_of(test_engines_other.test_every_step_of_mii_is_reproduced),
    ]
    assert sorted(compared) == sorted(files)


def files_of(test: object) -> list[str]:
    """Return the file names in the parameters of a test."""
    (mark,) = test.pytestmark  # type: ignore[attr-defined]
    return list(mark.args[1])


def test_every_case_of_llm_serving_is_compared() -> None:
    assert len(test_llm_serving.CASES) == 14
    assert len(test_llm_serving.vectors()) == 60
