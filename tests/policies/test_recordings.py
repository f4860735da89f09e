"""The recordings: complete, unchanged, and each one used by a test."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from servesim.config.policy_list import RECORDINGS, list_policies
from servesim.policies import POLICIES

from . import (
    test_engines_ascend,
    test_engines_mindie,
    test_engines_other,
    test_engines_sglang,
    test_engines_vllm,
    test_llm_serving,
)
from .recordings import ENGINES, FOLDER, engine_of, head_of, load, recording_names


@pytest.fixture(scope="module")
def metas() -> dict[str, dict[str, Any]]:
    """Return path -> meta of every recording of an engine."""
    return {name: load(name).meta for name in sorted(p.relative_to(FOLDER).as_posix() for p in FOLDER.glob("**/*.gz"))}


def checksums(recordings: Path) -> dict[str, str]:
    """Return path -> checksum of every recording."""
    lines = (recordings / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    return {name: checksum for checksum, name in (line.split("  ") for line in lines)}


def test_the_checksums_list_exactly_the_recordings(recordings: Path) -> None:
    files = {file.relative_to(recordings).as_posix() for file in recordings.glob("*/**/*") if file.is_file()}
    assert files == set(checksums(recordings))
    assert sum(name.startswith("llm-serving/") for name in files) == 16
    assert sum(name.startswith("engines/") for name in files) == 34 + 43 + 23 + 10 + 9 + 32 + 56 + 76
    assert sum(name.startswith("routers/") for name in files) == 30
    assert sum(name.startswith("engines/ascend/") for name in files) == 76
    assert sum(name.startswith("engines/prefix/") for name in files) == 43
    assert sum(name.startswith("engines/spec/") for name in files) == 23
    assert sum(name.startswith("engines/hybrid/") for name in files) == 10
    assert sum(name.startswith("engines/groups/") for name in files) == 9
    assert sum(name.startswith("engines/sglang/") for name in files) == 56
    assert sum(name.startswith("engines/versions/") for name in files) == 32
    assert sum(name.endswith("__mindie-3.0.0.json.gz") for name in files) == 35


def test_every_recording_is_unchanged(recordings: Path) -> None:
    actual = {name: hashlib.sha256((recordings / name).read_bytes()).hexdigest() for name in checksums(recordings)}
    assert actual == checksums(recordings)


def test_the_head_of_a_recording_says_its_engine_and_if_it_has_a_radix_cache(metas: dict[str, dict[str, Any]]) -> None:
    assert {name: engine_of(name) for name in metas} == {name: meta["engine"] for name, meta in metas.items()}
    with_cache = {name for name in recording_names("sglang", folder="sglang") if "radix_cache" in head_of(name)}
    assert with_cache == {name for name in recording_names("sglang", folder="sglang") if load(name).content}


def test_every_recording_of_an_engine_is_compared_with_a_policy(metas: dict[str, dict[str, Any]]) -> None:
    folders = ("", "prefix", "spec", "hybrid", "groups", "versions", "sglang", "ascend")
    files = [name for folder in folders for name in recording_names("", folder=folder)]
    assert {meta["engine"] for meta in metas.values()} == set(ENGINES)
    compared = [
        *files_of(test_engines_vllm.test_every_decision_of_v0_is_reproduced),
        *files_of(test_engines_vllm.test_every_decision_of_v1_is_reproduced),
        *files_of(test_engines_vllm.test_every_decision_of_v1_with_its_prefix_cache_is_reproduced),
        *files_of(test_engines_vllm.test_every_decision_of_v1_with_speculation_is_reproduced),
        *files_of(test_engines_vllm.test_every_decision_of_v1_with_kv_cache_groups_is_reproduced),
        *files_of(test_engines_vllm.test_every_decision_of_other_versions_of_v1_is_reproduced),
        *files_of(test_engines_vllm.test_every_decision_of_parallel_sampling_and_beam_search_is_reproduced),
        *files_of(test_engines_other.test_every_decision_of_sarathi_is_reproduced),
        *files_of(test_engines_other.test_every_decision_of_lightllm_is_reproduced),
        *files_of(test_engines_other.test_every_step_of_mii_is_reproduced),
        *files_of(test_engines_ascend.test_every_decision_of_ascend_is_reproduced),
        *files_of(test_engines_sglang.test_every_decision_of_sglang_is_reproduced),
        *files_of(test_engines_mindie.test_every_round_of_mindie_is_reproduced),
    ]
    assert sorted(compared) == sorted(files)


def files_of(test: object) -> list[str]:
    """Return the file names in the parameters of a test."""
    (mark,) = test.pytestmark  # type: ignore[attr-defined]
    return list(mark.args[1])


def test_the_library_states_the_number_of_recordings(metas: dict[str, dict[str, Any]]) -> None:
    """`sim policies list` and the documents show this table: its numbers must be those of the folder."""
    names = {kind: name for name, kind in POLICIES.items()}
    counts: dict[str, Counter[str]] = {name: Counter() for name in POLICIES}
    for meta in metas.values():
        counts[names[type(ENGINES[meta["engine"]](meta))]][meta["version"].removeprefix("v")] += 1
    counts["llm-serving"]["7342f33"] = len(test_llm_serving.CASES) + len(test_llm_serving.vectors())
    stated = {name: {version: count for version, count in row.items() if count} for name, row in RECORDINGS.items()}
    assert stated == counts


def test_every_policy_has_a_family_and_its_recordings_agree_with_its_validation() -> None:
    assert sorted(RECORDINGS) == sorted(POLICIES)
    for entry in list_policies():
        assert entry.validated_against.startswith("recordings") == bool(entry.recordings), entry


def test_every_case_of_llm_serving_is_compared() -> None:
    assert len(test_llm_serving.CASES) == 14
    assert len(test_llm_serving.vectors()) == 60
