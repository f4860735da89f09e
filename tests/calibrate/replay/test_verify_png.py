"""The chart of errors in verify.png: names of metrics and of scenarios do not overlap."""

from __future__ import annotations

from itertools import combinations

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from servesim.calibrate.replay.verify import METRICS, Comparison, MetricRow
from servesim.calibrate.replay.verify_report import plot_errors
from servesim.files.chart_style import matplotlib_style


def test_names_in_the_chart_of_errors_do_not_overlap() -> None:
    rows = [MetricRow(metric, 1.0, 1.1) for metric in METRICS]
    comparisons = [Comparison(f"a-long-name-of-a-scenario-{number}", rows, None, []) for number in range(5)]
    with matplotlib_style():
        figure = Figure(figsize=(4.3, 4.6))
        canvas = FigureCanvasAgg(figure)
        axes = figure.subplots()
        plot_errors(axes, comparisons)
        canvas.draw()
        boxes = [label.get_window_extent() for label in (*axes.get_yticklabels(), axes.title, axes.xaxis.label)]
    assert len(boxes) == 7 and not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)
