"""SGLang with its radix cache on random scenarios: same decisions as a token-by-token reference implementation."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ..conftest import seeds
from ..engine.prefix_cache_reference import tokens_of
from . import test_engines_sglang  # noqa: F401  it maps the engine to its policy
from .recordings import Recording, compare, head_of, load, recording_names, reproduce
from .sglang_radix_reference import RadixEngine, RadixJob
from .test_sglang_reference import VERSIONS, scenario
from .test_vllm_reference import COST, outcome_of


def jobs_of(recording: Recording) -> list[RadixJob]:
    jobs = []
    for id, t, prompt, output, _ in recording.requests:
        jobs.append(RadixJob(id, t, prompt, output, recording.limits.get(id, output)))
        pieces = recording.pieces(id) if id in recording.content else [(f"prompt of {id}", prompt)]
        jobs[-1].tokens = tokens_of(pieces, recording.answer(id), output)
    return jobs


@pytest.mark.parametrize("name", [n for n in recording_names("sglang", folder="sglang") if "radix_cache" in head_of(n)])
def test_the_reference_repeats_the_recordings(name: str) -> None:
    recording = load(name)
    jobs = jobs_of(recording)
    reference = RadixEngine(recording.meta["version"], recording.knobs, list(jobs), COST)
    reference.run()
    for index, (ours, theirs) in enumerate(zip(reference.rows, recording.steps)):
        assert ours == theirs, f"step {index}"
    assert len(reference.rows) == len(recording.steps)
    assert [[job.id, job.first_token, job.finish, job.retractions] for job in jobs] == recording.per_request


def with_content(rng: random.Random) -> tuple[list[list[Any]], dict[str, int], dict[str, Any], dict[str, list[Any]]]:
    """Return random requests that share texts, their limits and settings."""
    requests, limits, knobs = scenario(rng)
    knobs["schedule_policy"] = rng.choice(["fcfs", "lof", "lpm", "lpm", "dfs-weight"])
    knobs["radix_cache"] = True
    content: dict[str, list[Any]] = {}
    texts, long = rng.randrange(1, 6), rng.random() < 0.4
    for index, (id, _, prompt, _, _) in enumerate(requests):
        if rng.random() < 0.2:
            continue  # it shares nothing
        pieces: list[list[Any]] = []
        earlier = [request for request in requests[:index] if request[0] in content]
        if rng.random() < 0.3 and earlier:  # the next turn of a conversation
            other = rng.choice(earlier)
            pieces = [*content[other[0]], [f"output:{other[0]}", rng.randint(1, other[3])]]
        while rng.random() < 0.7:
            pieces.append([f"sys{rng.randrange(texts)}", rng.randint(1, 50 if long else 15)])
        pieces.append([f"own:{id}", prompt])
        left, content[id] = prompt, []
        for name, tokens in pieces:
            if left > 0:
                content[id].append([name, min(tokens, left)])
                left -= tokens
    return requests, limits, knobs, content


@pytest.mark.parametrize("seed", seeds(20, 70))
@pytest.mark.parametrize("version", VERSIONS)
def test_policy_matches_reference_implementation(version: str, seed: int) -> None:
    check(version, *with_content(random.Random(seed)))


@pytest.mark.parametrize("version", VERSIONS)
def test_longest_prefix_first_is_first_come_first_served_while_more_than_128_wait(version: str) -> None:
    rng = random.Random(1)
    requests = [[f"r{index:03d}", 0, rng.randint(40, 60), rng.randint(1, 12), 0] for index in range(170)]
    content = {id: [[f"sys{rng.randrange(3)}", 36], [f"own:{id}", prompt - 36]] for id, _, prompt, _, _ in requests}
    knobs = {
        "max_total_num_tokens": 400, "context_len": 128, "chunked_prefill_size": 64, "schedule_policy": "lpm",
        "radix_cache": True,
    }  # fmt: skip
    check(version, requests, {}, knobs, content)


def check(version: str, requests: list[Any], limits: dict[str, int], knobs: dict[str, Any], content: Any) -> None:
    """Compare the policy with the reference, step by step and with held plans."""
    meta = {"engine": "sglang-scheduler", "version": version, "knobs": dict(knobs), "cost": COST}
    recording = Recording(meta, requests, [], limits=limits, content=content)
    jobs = jobs_of(recording)
    reference = RadixEngine(version, knobs, list(jobs), COST)
    reference.run()
    recording.steps = reference.rows
    played = reproduce(recording)
    played.rows = played.busy_steps
    compare(recording, played)
    assert (reference.error or "") in str(played.stuck).replace("no request runs and no request will", "stands still")
    assert (reference.error is None) == (played.stuck is None), (reference.error, played.stuck)
    if reference.error is None:
        times = [(job.first_token, job.finish, job.retractions) for job in jobs]
        assert [outcome_of(played, job.id) for job in jobs] == times
