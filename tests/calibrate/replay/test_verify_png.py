"""The chart of errors in verify.png: names of metrics and of scenarios do not overlap."""

from __future__ import annotations

from itertools import combinations

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from servesim.calibrate.replay.verify import CHECKED_METRICS, METRICS, Comparison, MetricRow
from servesim.files.chart_style import matplotlib_style
from servesim.report.figures import plot_errors
from servesim.report.verify_page import VerifiedRun


def test_names_in_the_chart_of_errors_do_not_overlap() -> None:
    rows = [MetricRow(metric, 1.0, 1.1) for metric in METRICS]
    names = [f"a-long-name-of-a-scenario-{number}" for number in range(5)]
    runs = [VerifiedRun(name, Comparison(name, rows, None, []).as_dict(), {}, None) for name in names]
    with matplotlib_style():
        figure = Figure(figsize=(4.3, 4.6))
        canvas = FigureCanvasAgg(figure)
        axes = figure.subplots()
        plot_errors(axes, runs, CHECKED_METRICS)
        canvas.draw()
        boxes = [label.get_window_extent() for label in (*axes.get_yticklabels(), axes.title, axes.xaxis.label)]
    assert len(boxes) == 7 and not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)
