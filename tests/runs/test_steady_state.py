"""Saturation: a backlog that swings without a trend is not saturated."""

from __future__ import annotations

from servesim.core import Request
from servesim.runs.steady_state import MIN_GROWTH, MIN_R2, backlog_growth, is_saturated


def test_a_backlog_that_only_swings_is_not_saturated() -> None:
    """Ten requests finish at once, every ten seconds: a line through the backlog rises, but explains little of it."""
    requests = []
    for k in range(40):
        request = Request(k, float(k), 1, 1)
        request.client_end = (k // 10 + 1) * 10 + 0.5
        requests.append(request)
    growth, explained = backlog_growth(requests)
    assert growth > 2 * MIN_GROWTH
    assert explained < MIN_R2 / 2
    assert not is_saturated(requests)
