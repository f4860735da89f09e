"""Charts of pages on matplotlib axes: the same points, axes and limits."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest
from servesim.files.chart_style import LIGHT
from servesim.report.figures import draw
from servesim.report.plots import Chart, Limit, line, points, value_axis, with_limits


def test_a_chart_has_the_same_points_axes_and_limits_as_on_a_page() -> None:
    xy = [(1.0, 5.0), (10.0, 50.0), (200.0, 7.0)]
    dots = points("a <b> & c", xy, ["", "", ""], "@winner", size=8)
    dots["name"], dots["marker"]["symbol"] = "a &lt;b&gt;<br>&amp; c", ["circle", "circle-open", "circle"]
    dots["error_y"] = {"array": [1.0, 2.0, 3.0]}
    layout = {"xaxis": value_axis("rate", [x for x, _ in xy]), "yaxis": {"title": {"text": "level"}, "range": [0, 60]}}
    limits = [Limit("y", 40.0, "limit"), Limit("x", 20.0, "capacity")]
    axes = plt.figure().subplots()
    empty = points("none", [], [], "@baseline")
    draw(axes, Chart("id", "title", [line("line", xy, "@front", "dot"), dots, empty], with_limits(layout, limits)))
    scatter = axes.collections[0]
    assert scatter.get_offsets().tolist() == [[x, y] for x, y in xy]
    assert [tuple(colour[:3]) == (1.0, 1.0, 1.0) for colour in scatter.get_facecolors()] == [False, True, False]
    assert axes.get_legend_handles_labels()[1] == ["a <b> & c"]  # no entry without points
    assert axes.lines[0].get_xydata().tolist() == [[x, y] for x, y in xy]
    assert axes.lines[0].get_color() == LIGHT["front"] and axes.lines[0].get_linestyle() == ":"
    assert {tuple(set(axes.lines[k].get_ydata())) for k in (-2, -1)} >= {(40.0,)}
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")
    assert axes.get_xlabel() == "rate" and axes.get_ylim() == pytest.approx((0, 60))
    low, high = axes.get_xlim()
    assert low <= 1 and high >= 200 and {"1", "10", "100"} <= {tick.get_text() for tick in axes.get_xticklabels()}
    plt.close("all")
