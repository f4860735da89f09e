"""Update the generated tables of README and docs, and docs/commands.md: python tools/generate_tables.py

A generated section is between `<!-- generated: NAME -->` and `<!-- end -->`. SECTIONS has the writer of each name.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Optional

import yaml
from servesim.config.cluster import Cluster, Pool
from servesim.config.policy_list import RECORDINGS, VALIDATION, list_policies
from servesim.config.registry import SPECULATIVE, preset, presets
from servesim.config.scenario import EngineConfig, Scenario, TraceFile
from servesim.config.speculative import Speculative
from servesim.core import Policy
from servesim.core.class_source import docstring
from servesim.core.fields import policy_fields
from servesim.costs.device_profile import bundled_profiles
from servesim.engine.rules import rules_of
from servesim.policies import POLICIES
from servesim.routers import ROUTERS
from servesim.runs.metric_table import TABLE
from servesim.study.study_keys import SearchFile, SweepFile
from servesim.traces.make.arrivals import ARRIVAL_KINDS
from servesim.traces.make.lengths import DISTRIBUTION_KINDS, PAIR_KINDS
from servesim.traces.read.formats import FORMATS

sys.path.insert(0, str(Path(__file__).parent))
from commands import reference
from contest_table import HEAD as CONTEST_HEAD
from contest_table import contest_rows
from proof_table import (
    COVERAGE_HEAD,
    EXPECTED_HEAD,
    NOTE_HEAD,
    OTHERS_HEAD,
    SINGLE_HEAD,
    SUMMARY_HEAD,
    TARGET_HEAD,
    coverage_rows,
    expected_rows,
    note_rows,
    others_rows,
    single_rows,
    summary_rows,
    target_rows,
)
from run_doc_examples import ROOT, pages
from speed_table import speed_sentence

SECTION = re.compile(r"(<!-- generated: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
WITH_TABLE = ("vllm-v1", "sglang", "mindie", "llm-serving")  # policies whose fields docs/policy-settings.md has
RESULTS = ROOT / "benchmarks" / "results"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(escape_cell(value) for value in line) + " |\n" for line in lines)


def escape_cell(value: Any) -> str:
    """Return a value as the text of one Markdown cell."""
    return " ".join(str(value).split()).replace("|", "\\|")


def policy_table() -> str:
    """Return all policies by family: engine, and the number of recordings of each version."""
    rows = []
    for row in list_policies():
        counts = [f"{version} ({count})" for version, count in RECORDINGS[row.name].items() if count]
        engine = rules_of(POLICIES[row.name]()).engine
        rows.append([row.family, f"`{row.name}`", engine, ", ".join(counts) or f"none: {row.validated_against}"])
    return table(("family", "policy", "engine", "recordings by version"), rows)


def not_modelled_table() -> str:
    """Return what each family does not model."""
    return table(("family", "not modelled"), ([name, row.not_modelled] for name, row in VALIDATION.items()))


def setting_tables() -> str:
    """Return a table of the fields of each policy of WITH_TABLE."""
    common = {*policy_fields(Policy), *SPECULATIVE}
    kinds = [(name, POLICIES[name]) for name in WITH_TABLE]
    texts = [
        f"### {name}\n\n{' '.join(docstring(kind).split())}\n\n{field_table(kind, common)}" for name, kind in kinds
    ]
    return "\n".join(texts)


def other_policies() -> str:
    """Return the other policies, without their fields."""
    others = [(name, kind) for name, kind in POLICIES.items() if name not in WITH_TABLE]
    return "".join(f"- `{name}`: {' '.join(docstring(kind).split())}\n" for name, kind in others)


def common_field_table() -> str:
    """Return the fields that every policy has."""
    return field_table(Policy, set())


def field_table(kind: type[Policy], without: Set[str]) -> str:
    """Return the fields of a policy class except some, with their defaults and help texts."""
    known = policy_fields(kind).values()
    rows = [[setting(field), field.help] for field in known if field.name not in without]
    return table(("field and default", "meaning"), rows)


def setting(field: Any) -> str:
    """Return a field with its default, as a line of YAML."""
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{field.name}: {to_yaml(value).strip('`')}`"


def preset_table() -> str:
    """Return the names of the presets of each policy."""
    found: dict[str, list[str]] = {name: [] for name in POLICIES}
    for name in presets():
        found[preset(name)["policy"]["name"]].append(f"`{name}`")
    return "".join(f"- `{name}`: {', '.join(names)}\n" for name, names in found.items() if names)


def router_table() -> str:
    """Return every router: its rule, and what it knows."""
    rows = []
    for name, kind in ROUTERS.items():
        router = kind()
        known = ["ends"] if router.learns else []
        known += ["first tokens"] if router.reads_first_tokens else []
        known += ["caches"] if router.reads_caches else []
        known += [f"reports every {router.report_interval:g} s"] if router.report_interval else []
        rows.append([f"`{name}`", " ".join(docstring(kind).split()), ", ".join(known)])
    return table(("router", "rule", "learns"), rows)


def key_table(model: Any, prefix: str = "", beside: Any = None) -> Callable[[], str]:
    """Return a function that writes the keys of a pydantic model, without those that are the same in another one."""

    def write() -> str:
        rows = []
        for name, field in model.model_fields.items():
            other = beside.model_fields.get(name) if beside else None
            if other is not None and other.description == field.description:
                continue
            value = field.get_default(call_default_factory=True)
            default = "" if field.is_required() else to_yaml(value)
            default = f": {default.strip('`')}" if default else ""
            rows.append([f"`{prefix}{name}{default}`", field.description or ""])
        return table(("key and default", "meaning"), rows)

    return write


def to_yaml(value: Any) -> str:
    """Return a default value as YAML in code font; of a large section, nothing."""
    value = value.model_dump() if hasattr(value, "model_dump") else value
    if isinstance(value, dict) and len(value) > 5:
        return ""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False).strip().removesuffix("...").strip()
    return f"`{text}`"


def format_table() -> str:
    """Return the trace formats that servesim reads."""
    return ", ".join(f"`{name}`" for name in FORMATS) + "\n"


def arrival_table() -> str:
    """Return the arrival processes of synthetic workloads."""
    return kind_table(ARRIVAL_KINDS)


def length_table() -> str:
    """Return the length distributions of synthetic workloads."""
    return kind_table({**DISTRIBUTION_KINDS, **PAIR_KINDS})


def kind_table(models: Mapping[str, Any]) -> str:
    """Return each kind with its keys and the first paragraph of its docstring."""
    rows = []
    for name, model in models.items():
        model_keys = [f"`{key}`" for key in model.model_fields if key not in ("kind", "min", "max")]
        rows.append([f"`{name}`", ", ".join(model_keys), model.__doc__.split("\n\n")[0]])
    return table(("kind", "keys", "description"), rows)


def metric_table() -> str:
    """Return the metrics that sweeps maximise; they minimise the others."""
    names = ", ".join(f"`{metric.name}`" for metric in TABLE if metric.goal == "max")
    return f"Maximised: {names}. All other metrics are minimised.\n"


def profile_table() -> str:
    """Return the bundled profiles, with the mean held-out errors of their steps."""
    rows = []
    for name, folder in bundled_profiles().items():
        about = yaml.safe_load((folder / "profile.yaml").read_text(encoding="utf-8"))
        model, error = about.get("model", ""), about.get("error", {})
        known = [kind for kind in ("prefill", "decode", "mixed") if kind in error]
        errors = [f"{kind} {100 * error[kind]['mean']:.1f} %" for kind in known]
        rows.append([f"`{name}`", about.get("device", ""), model["name"] if isinstance(model, dict) else model,
                     about.get("how", ""), ", ".join(errors)])  # fmt: skip
    return table(("profile", "device", "model", "source of the step costs", "mean held-out error"), rows)


def ascend_table() -> str:
    """Return measured and simulated makespans of the Ascend runs, as profile.yaml records them."""
    folder = bundled_profiles()["ascend910b4-llama2-7b"]
    about, inputs = (
        yaml.safe_load((folder / name).read_text(encoding="utf-8")) for name in ("profile.yaml", "runs.yaml")
    )
    scenarios = {run["name"]: run["scenario"] for run in inputs["runs"]}
    rows = [
        [run["run"], scenarios[run["run"]]["policy"]["decode_batch"], scenarios[run["run"]]["workload"]["contest"]["X"],
         kind, f"{run['measured_s']:,.1f}", f"{run['predicted_s']:,.1f}", f"{100 * run['error']:+.2f} %",
         percent(run.get("ttft_error")), percent(run.get("e2e_error"))]
        for kind in ("fitted", "predicted")
        for run in about["fit"][kind]
    ]  # fmt: skip
    head = ("run", "slots", "X", "fitted or predicted", "measured (s)", "simulated (s)", "error", "TTFT error",
            "E2EL error")  # fmt: skip
    return table(head, rows)


def percent(value: Optional[float]) -> str:
    """Return an error as a percentage; empty if there is none."""
    return "" if value is None else f"{100 * value:.1f} %"


def benchmark_table(name: str, script: str, only: str = "|") -> Callable[[], str]:
    """Return a function that reads a result of a benchmark from benchmarks/results (Markdown or CSV).

    Of a Markdown table, it has the rows that contain `only`, without columns that are empty there.
    """

    def write() -> str:
        if (RESULTS / f"{name}.md").is_file():
            text = (RESULTS / f"{name}.md").read_text(encoding="utf-8").strip() + "\n"
            return chosen_rows(text, only)
        path = RESULTS / f"{name}.csv"
        if not path.is_file():
            return f"*Not measured for this version yet. Run {script}.*\n"
        lines = path.read_text(encoding="utf-8").splitlines()
        notes = [line.lstrip("# ") for line in lines if line.startswith("#")]
        rows = list(csv.reader(line for line in lines if not line.startswith("#")))
        return table(rows[0], rows[1:]) + "".join(f"\n{note}\n" for note in notes)

    return write


def chosen_rows(text: str, only: str) -> str:
    """Return a page with one table, which keeps the rows that contain `only` and the columns that they fill."""
    lines = text.splitlines(keepends=True)
    rows = [line for line in lines if line.startswith("|")]
    if only in rows[0]:
        return text
    cells = [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in rows[:1] + rows[2:]]
    kept = [row for row in cells[1:] if any(only in cell for cell in row)]
    filled = [column for column in range(len(cells[0])) if any(row[column] for row in kept)]
    chosen = [[row[column].replace("**", "") for column in filled] for row in (cells[0], *kept)]
    first = lines.index(rows[0])
    return "".join(lines[:first]) + table(chosen[0], chosen[1:]) + "".join(lines[first + len(rows) :])


SECTIONS: dict[str, Callable[[], str]] = {
    "policies": policy_table,
    "not-modelled": not_modelled_table,
    "settings": setting_tables,
    "other-policies": other_policies,
    "common-fields": common_field_table,
    "presets": preset_table,
    "scenario-keys": key_table(Scenario),
    "engine-keys": key_table(EngineConfig, "engine."),
    "cluster-keys": key_table(Cluster, "cluster."),
    "pool-keys": key_table(Pool),
    "speculative-keys": key_table(Speculative, "speculative."),
    "routers": router_table,
    "trace-keys": key_table(TraceFile, "trace."),
    "sweep-keys": key_table(SweepFile),
    "search-keys": key_table(SearchFile, beside=SweepFile),
    "formats": format_table,
    "arrivals": arrival_table,
    "lengths": length_table,
    "metrics": metric_table,
    "profiles": profile_table,
    "ascend": ascend_table,
    "contest": lambda: table(CONTEST_HEAD, contest_rows()),
    "h200": benchmark_table("h200", "`benchmarks/h200_replay.py`", "**"),
    "proof-expected": lambda: table(EXPECTED_HEAD, expected_rows()),
    "proof-others": lambda: table(OTHERS_HEAD, others_rows()),
    "proof-summary": lambda: table(SUMMARY_HEAD, summary_rows()),
    "proof-coverage": lambda: table(COVERAGE_HEAD, coverage_rows()),
    "proof-targets": lambda: table(TARGET_HEAD, target_rows()),
    "proof-notes": lambda: table(NOTE_HEAD, note_rows()),
    "proof-runs": lambda: table(SINGLE_HEAD, single_rows()),
    "speed": benchmark_table("speed", "`tools/speed_table.py`"),
    "speed-users": benchmark_table("speed_users", "`tools/speed_table.py`"),
    "speed-sweeps": benchmark_table("speed_sweeps", "`tools/speed_table.py`"),
    "speed-sentence": speed_sentence,
}


def table_pages() -> list[Path]:
    """Return the pages that may have generated tables."""
    return [*pages(), RESULTS / "contest.md", RESULTS / "proof.md"]


def fill_tables(text: str) -> str:
    """Return a page with its generated sections up to date."""
    return SECTION.sub(lambda match: f"{match[1]}\n{SECTIONS[match[2]]()}\n{match[4]}", text)


if __name__ == "__main__":
    (ROOT / "docs" / "commands.md").write_text(reference(), encoding="utf-8")
    for page in table_pages():
        text = page.read_text(encoding="utf-8")
        if fill_tables(text) != text:
            page.write_text(fill_tables(text), encoding="utf-8")
            print(page.relative_to(ROOT), "changed")
