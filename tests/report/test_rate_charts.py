"""Charts over the request rate."""

from __future__ import annotations

from servesim.report.rate_charts import MAX_NAMED, curve_styles, rate_charts
from servesim.study.ranking import Row
from servesim.study.rates import Curve, RatePoint


def curves(count: int) -> list[Curve]:
    points = []
    for rate in (1.0, 2.0):
        run = {"replication": 0, "metrics": {"p99_ttft_ms": 10 * rate, "output_throughput": rate}}
        points.append(RatePoint(rate, Row(0, {}, "", [run]), {}))
    outcomes = ["worse", "best", *["worse"] * count]
    return [Curve(number, {}, f"curve {number}", points, (), outcome) for number, outcome in enumerate(outcomes)]


def test_no_two_named_curves_look_the_same() -> None:
    styles = curve_styles(curves(MAX_NAMED))
    assert len(set(styles)) == MAX_NAMED + 2
    assert any(style.dashed for style in styles) and not styles[0].dashed
    lines = [trace["line"] for trace in rate_charts(curves(MAX_NAMED), [])[0].data]
    assert len({(line["color"], line["dash"]) for line in lines}) == MAX_NAMED + 2


def test_many_curves_are_grey_except_winner_and_baseline() -> None:
    styles = curve_styles(curves(MAX_NAMED + 1))
    assert [style.colour for style in styles[:3]] == ["@baseline", "@winner", "@point"]
    assert len(set(styles)) == 3
