"""Write a report page: one HTML file with its style, scripts and charts inside; it needs no network."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from servesim.core import BadInput
from servesim.files.chart_style import DARK, FONT, LIGHT
from servesim.files.write import open_text

from .plots import Chart

TEMPLATES = Path(__file__).with_name("templates")


def write_page(path: Path, template: str, **content: Any) -> None:
    """Write a page from a template; values of `content` that are charts, or lists of charts, are drawn in it.

    `names` of the content are put before the hover texts of points whose trace has the meta text `named`.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    charts = [chart for value in content.values() for chart in charts_in(value)]
    drawn = {"names": content.get("names", {}), "charts": {chart.id: chart.as_json() for chart in charts}}
    figures = json.dumps(finite(drawn), separators=(",", ":"))
    style = {"light": LIGHT, "dark": DARK, "font": FONT}
    text = environment.get_template(template).render(
        **content, figures=figures.replace("<", "\\u003c"), style=style, plotly=plotly_script() if charts else ""
    )
    with open_text(path) as file:
        file.write(text)


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
