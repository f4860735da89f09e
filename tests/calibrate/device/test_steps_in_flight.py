"""Steps in flight: a step launched before the tokens of the one before are known generates the same tokens."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from servesim.calibrate.device.backend import MODELS, Backend, Row
from servesim.calibrate.device.fake import FakeBackend

from ..conftest import VirtualTime

MICRO = MODELS["micro"]
BLOCKS = 24  # of one request


def make_backend(name: str, **options: Any) -> Backend:
    backend: Backend
    if name == "fake":
        backend = FakeBackend({}, **options)
    else:
        torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[torch]'")
        from servesim.calibrate.device.torch.backend import TorchBackend

        if name == "cuda" and not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        backend = TorchBackend(name, threads=None if name == "cuda" else 1, **options)
    backend.load(MICRO, 12 * BLOCKS, 16)
    return backend


class Requests:
    """The requests of drawn steps: their tokens, of which the last one may be unknown, and their blocks."""

    def __init__(self) -> None:
        rng = random.Random(1)
        self.prompts = [[rng.randrange(MICRO.vocab) for _ in range(70)] for _ in range(12)]
        self.tokens = [array("i") for _ in range(12)]
        self.cached = [0] * 12
        self.lengths = {request: draw_lengths(request) for request in range(12)}

    def rows(self, step: Sequence[tuple[int, int]], launched: Sequence[int]) -> list[Row]:
        rows = []
        for request, count in step:
            known = self.prompts[request][: self.lengths[request]] + list(self.tokens[request])
            start = self.cached[request]
            values = known[start : start + count] or [-1 - launched.index(request)]
            assert len(values) == count
            rows.append(Row(array("i", values), start, array("i", self.table(request))))
            self.cached[request] += count
        return rows

    def table(self, request: int) -> list[int]:
        return list(range(request * BLOCKS, (request + 1) * BLOCKS))

    def record(self, step: Sequence[tuple[int, int]], ends: Sequence[bool], tokens: Sequence[int]) -> None:
        for (request, _), end, token in zip(step, ends, tokens):
            if end:
                self.tokens[request].append(token)


def draw_lengths(request: int) -> int:
    return (1, 5, 16, 40, 70)[request % 5]


def generate(backend: Backend, in_flight: int, seed: int) -> tuple[list[list[int]], int]:
    """Run drawn steps; return the tokens of every request, and how many of their inputs were unknown."""
    rng = random.Random(seed)
    requests, unknown = Requests(), 0
    launched: list[tuple[list[tuple[int, int]], list[bool]]] = []

    def collect() -> None:
        step, ends = launched.pop(0)
        requests.record(step, ends, backend.collect())

    for index in range(60):
        started = range(min(12, 1 + index // 3))
        step = []
        for request in rng.sample(started, rng.randint(1, len(started))):
            left = requests.lengths[request] - requests.cached[request]
            step.append((request, rng.randint(1, left) if left > 1 else 1))
        rows = requests.rows(step, [request for request, _ in launched[-1][0]] if launched else [])
        unknown += sum(token < 0 for row in rows for token in row.tokens)
        ends = [requests.cached[request] >= requests.lengths[request] for request, _ in step]
        backend.launch(rows)
        launched.append((step, ends))
        if len(launched) == in_flight:
            collect()
    while launched:
        collect()
    return [list(tokens) for tokens in requests.tokens], unknown


@pytest.mark.parametrize("name", ["fake", "cpu", "cuda"])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_those_of_steps_that_run_one_by_one(name: str, seed: int) -> None:
    backend = make_backend(name)
    expected, known = generate(backend, 1, seed)
    overlapped, unknown = generate(backend, 2, seed)
    assert overlapped == expected
    assert known == 0
    assert unknown > 50


def test_a_wrong_row_of_the_step_before_changes_the_tokens() -> None:
    """The fake backend and the model both depend on every input, so the test above would see a wrong gather."""
    for name in ("fake", "cpu"):
        backend = make_backend(name)
        results = []
        for swapped in (False, True):
            backend.launch([Row([3, 5], 0, [1]), Row([9], 0, [2]), Row([4, 4, 4], 0, [3])])
            sources = [-1, -2, -3] if not swapped else [-2, -1, -3]
            backend.launch([Row([source], 3, [block]) for source, block in zip(sources, (1, 2, 3))])
            results.append((backend.collect(), backend.collect()))
        assert results[0][0] == results[1][0]
        assert results[0][1][:2] != results[1][1][:2]
        assert results[0][1][2] == results[1][1][2]


def test_error_for_a_row_that_the_step_before_did_not_have() -> None:
    backend = make_backend("cpu")
    with pytest.raises(ValueError, match=r"token ids -1..-1 outside 0..255"):
        backend.step([Row([-1], 3, [1])])
    backend.launch([Row([3, 5], 0, [1])])
    with pytest.raises(ValueError, match=r"token ids -2..-2 outside -1..255"):
        backend.launch([Row([-2], 2, [1])])
    assert len(backend.collect()) == 1  # the step in flight is not lost


def test_with_selection_on_the_host_only_one_step_is_in_flight() -> None:
    backend = make_backend("cpu", sampling="host")
    assert (make_backend("cpu").max_steps_in_flight, backend.max_steps_in_flight) == (2, 1)
    backend.launch([Row([3, 5], 0, [1])])
    with pytest.raises(AssertionError, match="1 steps are in flight"):
        backend.launch([Row([-1], 2, [1])])


def test_the_logits_are_those_of_the_collected_step() -> None:
    backend = make_backend("cpu")
    rows = [Row([3, 5, 7], 0, [1]), Row([9], 0, [2])]
    backend.step(rows)
    expected = backend.logits()
    backend.launch(rows)
    backend.launch([Row([-2], 1, [2]), Row([-1], 3, [1])])
    backend.collect()
    assert (backend.logits() == expected).all()


def test_a_fake_device_runs_launched_steps_one_after_another(virtual_time: VirtualTime) -> None:
    backend = FakeBackend({"base": 0.05})
    backend.load(MICRO, 8, 16)
    backend.launch([Row([3], 0, [1])])
    backend.launch([Row([-1], 1, [1])])
    assert virtual_time.now < 0.01  # the host is free
    backend.collect()
    assert 0.05 <= virtual_time.now < 0.06
    backend.collect()
    assert 0.1 <= virtual_time.now < 0.11
