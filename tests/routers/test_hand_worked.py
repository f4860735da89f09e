"""Rules of routers without recordings, against tables that were worked out by hand from the rule."""

from __future__ import annotations

import pytest
from servesim.routers import Fleet
from servesim.routers.aibrix import AibrixPrefixCache
from servesim.routers.blake3 import blake3
from servesim.routers.conductor import Conductor
from servesim.routers.production_stack import follows_cache
from servesim.routers.sglang import bounded_choice


@pytest.mark.parametrize(
    ("text", "beginning"),
    [(b"", "af1349b9f5f9a1a6a0404dea36dcc949"), (b"abc", "6437b3ac38465133ffb63b75273a8db5")],
)
def test_blake3(text: bytes, beginning: str) -> None:
    """The values of the empty text and of `abc` are those of the authors of BLAKE3."""
    assert blake3(text).hex().startswith(beginning)


@pytest.mark.parametrize(
    ("loads", "hashed", "goes_to"),
    [
        ((0, 0, 0), 1, 1), ((1, 0, 0), 0, 1), ((2, 0, 0), 0, 1), ((3, 3, 3), 2, 2), ((4, 3, 3), 0, 0),
        ((5, 3, 3), 0, 0), ((5, 3, 2), 0, 2), ((10, 10, 13), 2, 2), ((10, 10, 14), 2, 2), ((0, 1), 1, 1),
        ((7, 7, 7, 9), 3, 3), ((7, 7, 7, 10), 3, 3),
    ],
)  # fmt: skip
def test_bounded_load_of_prefix_hash(loads: tuple[int, ...], hashed: int, goes_to: int) -> None:
    assert bounded_choice(loads, hashed) == goes_to


@pytest.mark.parametrize(
    ("tokens", "matched", "follows"),
    [
        (500, 256, True), (2000, 0, True), (2001, 1, True), (5000, 2999, False), (5000, 3000, True), (5000, 4864, True),
        (2001, 0, False), (9000, 6999, False),
    ],
)  # fmt: skip
def test_kvaware(tokens: int, matched: int, follows: bool) -> None:
    assert follows_cache(tokens, matched) == follows


@pytest.mark.parametrize(
    ("loads", "matches", "allowed"),
    [
        ((0, 0, 0), (), {0, 1, 2}), ((3, 2, 2), (), {1, 2}), ((1, 1, 1), (0, 50, 0), {1}),
        ((1, 4, 1), (0, 100, 50), {2}),
        ((2, 3, 2), (100, 100, 50), {0}), ((0, 8, 0), (0, 100, 0), {0, 2}), ((0, 9, 0), (0, 100, 0), {0, 2}),
        ((0, 9, 0), (20, 100, 0), {0}), ((5, 1, 1), (100, 0, 0), {1, 2}), ((5, 1, 1), (100, 40, 60), {2}),
        ((4, 4, 4), (25, 25, 25), {0, 1, 2}), ((2, 2, 7, 2), (0, 10, 90, 0), {1}),
        ((6, 6, 0, 7), (100, 0, 0, 100), {0}),
        ((10, 10, 1, 10), (100, 0, 0, 0), {2}),
    ],
)  # fmt: skip
def test_prefix_cache_of_aibrix(loads: tuple[int, ...], matches: tuple[int, ...], allowed: set[int]) -> None:
    router = AibrixPrefixCache()
    memory = router.memory(len(loads))
    memory.in_flight = list(loads)
    fleet = Fleet(0.0, range(len(loads)), memory)
    assert set(router.matched_choices(dict(enumerate(matches)), fleet)) == allowed


@pytest.mark.parametrize(
    ("tokens", "prefixes", "queues", "ttfts", "goes_to", "copies"),
    [
        (4000, (0, 0, 0), (0, 0, 0), (400, 400, 400), 0, False),
        (4000, (2000, 0, 0), (0, 0, 0), (200, 220, 220), 0, False),
        (4000, (2000, 0, 0), (15, 0, 0), (215, 220, 220), 0, False),
        (4000, (2000, 0, 0), (150, 0, 0), (350, 220, 220), 1, True),
        (4000, (2000, 1200, 0), (150, 0, 0), (350, 280, 220), 2, True),
        (4000, (2000, 1200, 0), (300, 0, 90), (500, 280, 310), 1, False),
        (4000, (4000, 0, 0), (50, 0, 0), (50, 40, 40), 1, True),
        (4000, (4000, 3000, 0), (90, 0, 40), (90, 100, 80), 2, True),
        (8000, (512, 256, 0), (400, 100, 0), (1148.8, 874.4, 753.92), 2, True),
        (8000, (512, 256, 255), (60, 0, 30), (808.8, 774.4, 781.37), 1, False),
        (2000, (0, 0, 0), (250, 250, 190), (450, 450, 390), 2, False),
    ],
)
def test_predicted_ttft_of_conductor(
    tokens: int,
    prefixes: tuple[int, ...],
    queues: tuple[float, ...],
    ttfts: tuple[float, ...],
    goes_to: int,
    copies: bool,
) -> None:
    offers = Conductor().offers(tokens, prefixes, [1e-3 * queue for queue in queues])
    assert [1e3 * offer.ttft for offer in offers] == pytest.approx(list(ttfts))
    best = min(range(3), key=lambda place: offers[place].ttft)
    assert (best, offers[best].copies) == (goes_to, copies)


@pytest.mark.parametrize(("queue", "goes_to"), [(1900, [2]), (2100, [])])
def test_conductor_refuses_above_its_limit(queue: int, goes_to: list[int]) -> None:
    """0.1 ms a token: 390 ms are within the limit of 400 ms, 410 ms are not."""
    from servesim.routers import Asked

    router = Conductor(ttft_limit=0.4)
    memory = router.memory(3)
    memory.prefill_tokens = [2500, 2500, queue]
    assert router.choices(Asked("a", "x" * 8000, 2000), Fleet(0.0, range(3), memory)) == goes_to
