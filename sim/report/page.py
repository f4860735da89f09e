"""Report pages: one HTML file with its style, scripts and charts inside; and the parts of a page, cards and tables."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Optional

from markupsafe import Markup, escape
from servesim.config.export import TARGETS, export_scenario
from servesim.config.exported import Exported
from servesim.config.layers import Tree
from servesim.config.scenario import scenario_from
from servesim.core import BadInput
from servesim.files.chart_style import DARK, FONT, LIGHT
from servesim.files.write import open_text
from servesim.runs.metric_table import LATENCIES, METRICS, is_metric, metric_title, title_inside
from servesim.statistics.number_format import format_metric
from servesim.study.columns import Column, columns_in
from servesim.study.experiment import format_value, short_key

from .plots import Chart

TEMPLATES = Path(__file__).with_name("templates")
MAX_TABLE_ROWS = 1000  # keeps a page below 6 MB; summary.csv has all rows


def write_page(path: Path, template: str, **content: Any) -> None:
    """Write a page from a template; values of `content` that are charts, or lists of charts, are drawn in it.

    `names` of the content are put before the hover texts of points whose trace has the meta text `named`.
    """
    charts = [chart for value in content.values() for chart in charts_in(value)]
    drawn = {"names": content.get("names", {}), "charts": {chart.id: chart.as_json() for chart in charts}}
    figures = json.dumps(finite(drawn), separators=(",", ":"))
    script = plotly_script() if charts else ""
    text = render(template, **content, figures=figures.replace("<", "\\u003c"), plotly=script)
    with open_text(path) as file:
        file.write(text)


def render(template: str, folder: Path = TEMPLATES, **content: Any) -> str:
    """Return a template with its content and the colours of the charts; the templates of reports are parts of it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["metrics"] = name_metrics
    style = {"light": LIGHT, "dark": DARK, "font": FONT}
    return environment.get_template(template).render(**content, style=style)


def charts_in(value: Any) -> list[Chart]:
    """Return the charts of a value."""
    if isinstance(value, Chart):
        return [value]
    return [item for item in value if isinstance(item, Chart)] if isinstance(value, (list, tuple)) else []


def finite(value: Any) -> Any:
    """Return chart data with null instead of NaN and infinity, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


@lru_cache(maxsize=1)
def plotly_script() -> str:
    """Return plotly.js from the package `plotly`, which is not imported: that takes longer than a page."""
    spec = find_spec("plotly")
    file = Path(spec.origin).parent / "package_data" / "plotly.min.js" if spec and spec.origin else None
    if file is None or not file.is_file():
        raise BadInput("report.html: the package plotly is missing; install it with `pip install plotly`")
    return file.read_text(encoding="utf-8").replace("</script", "<\\/script")


class MetricFact(NamedTuple):
    """A further metric of the result."""

    name: str
    value: str
    change: str = ""  # from the baseline


@dataclass(frozen=True)
class ResultCard:
    """The content of the card."""

    title: str
    verdict: str
    won: bool = False
    big: str = ""  # the main number
    change: str = ""  # how it compares with the baseline
    facts: Sequence[MetricFact] = ()
    settings: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    times: str = ""  # where the time of a request goes
    limit: str = ""  # what limits the run
    server: Optional[Exported] = None  # how to start the real server with these settings


def exported_server(tree: Tree) -> Optional[Exported]:
    """Return the command or the configuration of the server of a scenario; None for policies without a server."""
    try:
        scenario = scenario_from(tree)
        target = next((name for name, exporters in TARGETS.items() if scenario.policy["name"] in exporters), None)
        return None if target is None else export_scenario(scenario, target)
    except BadInput:  # the server does not start with it, or the profile is gone
        return None


METRIC_KEY = re.compile(
    rf"(?<![\w.])(p[\d.]+_(?:{'|'.join(LATENCIES)})_ms|makespan|mfu|mbu|"
    rf"(?:{'|'.join(sorted((name for name in METRICS if '_' in name), key=len, reverse=True))})(?!\w))"
    r"(\[\w+=[^\[\]]+\])?(?: (<=|>=) (\d+(?:\.\d+)?)(?! *\*|[\w.]*\w))?"
)


def name_metrics(text: str) -> Markup:
    """Return a text as HTML: metrics as people call them with their keys in tooltips, and bounds with units."""
    if is_metric(text):
        return Markup('<abbr title="{}">{}</abbr>').format(text, metric_title(text))
    parts, end = [], 0
    for match in METRIC_KEY.finditer(text):
        name, before = match[1] + (match[2] or ""), text[: match.start()]
        title = metric_title(name) if not before or before.endswith(". ") else title_inside(name)
        bound = f" {match[3]} {format_metric(float(match[4]), name)}" if match[3] else ""
        parts += [escape(text[end : match.start()]), Markup('<abbr title="{}">{}</abbr>{}').format(name, title, bound)]
        end = match.end()
    return Markup("").join([*parts, escape(text[end:])])


def setting_chips(assignment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return settings as (short name, value)."""
    return [(short_key(key), format_value(value)) for key, value in assignment.items()]


class Head(NamedTuple):
    """The head of a column; its key is the name in filters such as decode_batch=32."""

    name: str
    key: str
    numeric: bool
    wrap: bool = False  # long texts in several lines


class Tag(NamedTuple):
    """A label of a configuration."""

    text: str
    tone: str = ""


class Cell(NamedTuple):
    """A cell; `value` is what it sorts by, if not by its text."""

    text: str
    value: Optional[str] = None
    numeric: bool = False
    tags: Sequence[Tag] = ()


class RowStyle(NamedTuple):
    """How a row is shown; `config` links it to the points of this configuration in the charts."""

    config: Optional[int] = None
    kind: str = ""  # class of the style sheet
    tags: Sequence[Tag] = ()  # in the last column, labels


class TableRow(NamedTuple):
    """A row."""

    cells: Sequence[Cell]
    style: RowStyle = RowStyle()


class Table(NamedTuple):
    """The content of a table."""

    columns: Sequence[Head]
    rows: Sequence[TableRow]


def page_table(
    columns: Sequence[Column], rows: Sequence[Any], style: Optional[Callable[[Any], RowStyle]] = None
) -> Table:
    """Return the table of a result; with `style`, its last column has labels."""
    chosen = columns_in(columns, "page")
    lines = [[page_cell(column, row) for column in chosen] for row in rows]
    numeric = [any(cell.numeric for cell in cells) for cells in zip(*lines)]
    heads = [
        Head(column.page_title or column.head, column.name, is_numeric, column.wrap)
        for column, is_numeric in zip(chosen, numeric)
    ]
    if style is None:
        return Table(heads, [TableRow(line) for line in lines])
    styles = map(style, rows)
    styled = [TableRow([*line, Cell("", tags=style.tags)], style) for line, style in zip(lines, styles)]
    return Table([*heads, Head("labels", "labels", False, True)], styled)


def page_cell(column: Column, row: Any) -> Cell:
    """Return the cell of a row: a number sorts by its value, a missing one has an empty sort key."""
    value = column.value(row)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return Cell(column.print(row))
    return Cell("–", "", True) if math.isnan(value) else Cell(column.print(row), f"{value:.9g}", True)
