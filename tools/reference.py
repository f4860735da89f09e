"""The parts of the pages that are written by the program: python tools/reference.py fills them in, in place.

A part stands between `<!-- from the program: NAME -->` and `<!-- end -->`; PARTS says what writes it. docs/commands.md
is written as a whole, by commands.py.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Optional

import yaml
from servesim.config.registry import about_preset, field_help, presets
from servesim.config.scenario import EngineConfig, Scenario, TraceFile
from servesim.core import Policy
from servesim.costs.device_profile import bundled
from servesim.policies import POLICIES
from servesim.study.experiment import SweepFile
from servesim.study.search import SearchFile
from servesim.traces.export import EXPORTS
from servesim.traces.make.arrivals import ARRIVAL_KINDS
from servesim.traces.make.lengths import PAIR_KINDS, SIDE_KINDS
from servesim.traces.read.formats import FORMATS

sys.path.insert(0, str(Path(__file__).parent))
from commands import reference
from pages import ROOT, pages

PART = re.compile(r"(<!-- from the program: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
RESULTS = ROOT / "benchmarks" / "results"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell(value) for value in line) + " |\n" for line in lines)


def cell(value: Any) -> str:
    """Return a value as a cell."""
    return " ".join(str(value).split()).replace("|", "\\|")


def policies() -> str:
    """Every policy: what it mirrors, what it was proven against, its fields."""
    parts = [table(
        ("policy", "mirrors", "proven against"),
        ([f"[`{name}`](#{name})", traits.engine or "no engine", traits.validated_against]
            for name, traits in ((name, kind().traits) for name, kind in POLICIES.items())),
    )]  # fmt: skip
    common = {field.name for field in fields(Policy)}
    for name, kind in POLICIES.items():
        doc = " ".join((kind.__doc__ or "").split())
        parts.append(f"### {name}\n\n{doc}\n\n{field_table(kind, lambda field: field not in common)}")
    return "\n".join(parts)


def common_fields() -> str:
    """The fields that every policy has."""
    return field_table(Policy, lambda field: True)


def field_table(kind: type[Policy], wanted: Callable[[str], bool]) -> str:
    """Return a policy's fields."""
    said = field_help(kind)
    rows = [[f"`{f.name}`", f"`{f.default}`", said.get(f.name, "")] for f in fields(kind) if wanted(f.name)]
    return table(("field", "default", "meaning"), rows)


def preset_table() -> str:
    """Every preset."""
    return table(("preset", "what it names"), ([f"`{name}`", about_preset(name) or ""] for name in presets()))


def keys(model: Any, prefix: str = "") -> Callable[[], str]:
    """Return a writer of a model's keys."""

    def write() -> str:
        rows = []
        for name, field in model.model_fields.items():
            given = field.get_default(call_default_factory=True)
            default = "" if field.is_required() else plain(given)
            rows.append([f"`{prefix}{name}`", default, field.description or ""])
        return table(("key", "default", "meaning"), rows)

    return write


def plain(value: Any) -> str:
    """Return a default value as YAML would have it."""
    if hasattr(value, "model_dump") and len(value.model_dump()) > 4:
        return "see below"
    if hasattr(value, "model_dump"):
        return ", ".join(f"`{key}: {plain(inner).strip('`')}`" for key, inner in value.model_dump().items())
    text = yaml.safe_dump(value, default_flow_style=True).strip().removesuffix("...").strip()
    return f"`{text}`"


def formats() -> str:
    """The trace formats that are read and written."""
    read = ([f"`{name}`", entry.about, "yes" if name in EXPORTS else ""] for name, entry in FORMATS.items())
    return table(("format", "what it is", "can be written"), read)


def arrivals() -> str:
    """The arrival processes that a workload can name."""
    return kinds(ARRIVAL_KINDS)


def lengths() -> str:
    """The distributions of lengths that a workload can name."""
    return kinds({**SIDE_KINDS, **PAIR_KINDS})


def kinds(models: Mapping[str, Any]) -> str:
    """Return kinds with their own keys and the first paragraph of what they are."""
    rows = []
    for name, model in models.items():
        own = [f"`{key}`" for key in model.model_fields if key not in ("kind", "min", "max")]
        rows.append([f"`{name}`", ", ".join(own), model.__doc__.split("\n\n")[0]])
    return table(("kind", "keys", "what it is"), rows)


def profiles() -> str:
    """The profiles that come with the package."""
    rows = []
    for name, folder in bundled().items():
        about = yaml.safe_load((folder / "profile.yaml").read_text(encoding="utf-8"))
        rows.append([f"`{name}`", about.get("device", ""), about.get("model", ""), about.get("date", ""),
                     about.get("how", "")])  # fmt: skip
    return table(("profile", "device", "model", "date", "how its costs were found"), rows)


def ascend() -> str:
    """What the bundled Ascend profile says of real runs, as its own record has it."""
    about = yaml.safe_load((bundled()["ascend910b4-llama2-7b"] / "profile.yaml").read_text(encoding="utf-8"))
    rows = [
        [run["run"], kind, f"{run['measured_s']:,.1f}", f"{run['predicted_s']:,.1f}", f"{run['error']:+.2%}",
         part(run.get("ttft_error")), part(run.get("e2e_error"))]
        for kind in ("fitted", "predicted")
        for run in about["fit"][kind]
    ]  # fmt: skip
    head = ("run", "used", "measured (s)", "simulated (s)", "makespan", "ttft, median", "e2e, median")
    return table(head, rows)


def part(value: Optional[float]) -> str:
    """Return an error as a percentage, nothing where there is none."""
    return "" if value is None else f"{value:.1%}"


def measured(name: str, how: str) -> Callable[[], str]:
    """Return a writer of a table that a benchmark left in benchmarks/results, as Markdown or CSV."""

    def write() -> str:
        if (RESULTS / f"{name}.md").is_file():
            return (RESULTS / f"{name}.md").read_text(encoding="utf-8").strip() + "\n"
        path = RESULTS / f"{name}.csv"
        if not path.is_file():
            return f"*Not measured for this version yet; {how} measures it.*\n"
        lines = path.read_text(encoding="utf-8").splitlines()
        notes = [line.lstrip("# ") for line in lines if line.startswith("#")]
        rows = list(csv.reader(line for line in lines if not line.startswith("#")))
        return table(rows[0], rows[1:]) + "".join(f"\n{note}\n" for note in notes)

    return write


def in_short(text: str) -> str:
    """Return a table with only those of its rows that sum up, which are the ones in bold, and what they say."""
    lines = text.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    kept = [row for row in rows[2:] if any("**" in cell for cell in row)]
    told = [place for place in range(len(rows[0])) if any(row[place] for row in kept)] if rows else []
    before = "".join(f"{line}\n" for line in lines if not line.startswith("|"))
    return before + (table([rows[0][p] for p in told], [[row[p] for p in told] for row in kept]) if kept else "")


PARTS: dict[str, Callable[[], str]] = {
    "policies": policies,
    "common-fields": common_fields,
    "presets": preset_table,
    "scenario-keys": keys(Scenario),
    "engine-keys": keys(EngineConfig, "engine."),
    "trace-keys": keys(TraceFile, "trace."),
    "sweep-keys": keys(SweepFile),
    "search-keys": keys(SearchFile),
    "formats": formats,
    "arrivals": arrivals,
    "lengths": lengths,
    "profiles": profiles,
    "ascend": ascend,
    "h200": measured("h200", "`benchmarks/h200_replay.py`"),
    "h200-in-short": lambda: in_short(measured("h200", "`benchmarks/h200_replay.py`")()),
    "h200-before": measured("h200_before", "`benchmarks/h200_replay.py`"),
    "kbk": measured("kbk", "`benchmarks/kbk_replay.py`"),
    "kbk-in-short": lambda: in_short(measured("kbk", "`benchmarks/kbk_replay.py`")()),
    "speed": measured("speed", "`benchmarks/speed.py`"),
}


def filled(text: str) -> str:
    """Return a page with the program's parts as the program writes them now."""
    return PART.sub(lambda match: f"{match[1]}\n{PARTS[match[2]]()}\n{match[4]}", text)


if __name__ == "__main__":
    (ROOT / "docs" / "commands.md").write_text(reference(), encoding="utf-8")
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if filled(text) != text:
            page.write_text(filled(text), encoding="utf-8")
            print(page.relative_to(ROOT), "changed")
