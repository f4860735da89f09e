"""The files and the printed table of a sweep over loads: summary.csv, pareto.csv, capacity.csv, best.yaml."""

from __future__ import annotations

from pathlib import Path

from servesim.config.old_keys import OLD, rename_keys, rename_path
from servesim.config.paths import relative_paths
from servesim.files.terminal import PLAIN, Screen, align_columns
from servesim.files.write import comment, csv_writer, open_text, write_yaml
from servesim.runs.request_rate import format_rate, scenario_at_rate
from servesim.statistics.intervals import Interval
from servesim.statistics.number_format import format_mean

from .curves import Curve
from .files import parameter_keys, setting_cells, write_rows
from .load_summary import LoadSummary, join_loads
from .table import (
    LABEL_MEANINGS,
    TEXT_COLUMNS,
    describe_window,
    format_count,
    meaning,
    profile_notes,
    table_lines,
    table_notes,
)
from .verdict import verdict_of


def write_load_summary(result: LoadSummary, folder: Path) -> None:
    """Write the tables of all loads, the capacities, and the winner."""
    summaries = list(result.by_load.values())
    write_rows(folder / "summary.csv", [(summary, summary.rows) for summary in summaries])
    fronts = [(summary, [row for row in summary.rows if row.on_pareto_front]) for summary in summaries]
    write_rows(folder / "pareto.csv", fronts)
    if result.experiment.subject_to:
        write_capacities(result, folder / "capacity.csv")
    if result.winner is not None and result.winner.capacity is not None:
        write_winner(folder / "best.yaml", result, result.winner.config, result.winner.capacity.rate)
    for load, summary in result.by_load.items() if not result.experiment.subject_to else ():
        if summary.winner is not None:
            write_winner(folder / f"best-at-{load:.10g}.yaml", result, summary.winner.config, load)


def write_capacities(result: LoadSummary, path: Path) -> None:
    """Write one line per configuration, the highest capacity first."""
    rows = result.by_load[result.loads[0]].rows
    keys, by_config = parameter_keys(rows), {row.config: row for row in rows}
    with open_text(path) as file:
        writer = csv_writer(file)
        names = ["rank", "config", "relation", "capacity", "capacity_estimate", "missed_at", "reason", "rates_tested"]
        writer.writerow([*names, *(rename_path(key, OLD)[0] for key in keys)])
        for curve in result.curves:
            capacity = curve.capacity
            assert capacity is not None
            limit = "" if capacity.missed_at is None else capacity.missed_at
            cells = [curve.rank, curve.config, curve.outcome, capacity.rate, capacity.estimate, limit, capacity.reason]
            writer.writerow([*cells, len(curve.points), *setting_cells(by_config[curve.config], keys)])


def write_winner(path: Path, result: LoadSummary, config: int, load: float) -> None:
    """Write the scenario of a winner at its load."""
    experiment = result.experiment
    tree = experiment.tree(config)
    scaled = scenario_at_rate(tree, load, load / experiment.rate(config))
    label = experiment.label(config)
    text = comment(f"The best of {len(experiment.configs)} configurations of {experiment.name}: {label}")
    text += comment(f"at {format_rate(load)}" + ("" if scaled else "; the workload has no key for its rate"))
    write_yaml(path, rename_keys(relative_paths(scaled or tree, path.parent), OLD), text)


def format_load_table(result: LoadSummary, top: int = 10, screen: Screen = PLAIN) -> str:
    """Return the capacities and the metrics over the load, or the table of each load without constraints."""
    if not result.experiment.subject_to:
        return format_tables(result, top, screen)
    lines, meanings = capacity_cells(result, top)
    notes = capacity_notes(result, result.experiment.subject_to[0].metric)
    return "\n".join([*align_columns(lines, screen, TEXT_COLUMNS, meanings), *notes])


def format_tables(result: LoadSummary, top: int, screen: Screen) -> str:
    """Return the table of each load; notes that are the same at all loads are below the last one."""
    notes = {load: table_notes(summary) for load, summary in result.by_load.items()}
    common = [note for note in notes[result.loads[0]] if all(note in others for others in notes.values())]
    tables = []
    for load, summary in result.by_load.items():
        own = [note for note in notes[load] if note not in common]
        tables.append("\n".join([f"at {format_rate(load)}", *table_lines(summary, top, screen), *own]))
    if len(tables) == 1:
        return "\n".join([*tables, *common])
    return "\n\n".join([*tables, "\n".join(["at each load", *common])])


def capacity_cells(result: LoadSummary, top: int) -> tuple[list[list[str]], dict[int, str]]:
    """Return the cells of the table of capacities, the first line is its head, and the meanings of its lines."""
    metric = result.experiment.subject_to[0].metric
    curves = result.curves[:top]
    curves += [] if result.baseline in curves else [result.baseline]
    heads = [f"{load:.6g} req/s" for load in result.loads]
    lines = [["rank", "capacity", *heads, "changed settings", "labels"]]
    meanings = {}
    for number, curve in enumerate(curves, 1):
        assert curve.capacity is not None
        meanings[number] = meaning(curve is result.winner, curve.is_baseline, curve.outcome == "cannot win")
        names = {"baseline": curve.is_baseline, "outside profile": is_outside_profile(curve)}
        label = ", ".join(name for name, applies in names.items() if applies)
        rank = f"{'= ' * (curve.outcome == 'equal')}{curve.rank}"
        lines.append([rank, curve.capacity.text, *level_cells(curve, result, metric), result.settings(curve), label])
    return lines, meanings


def level_cells(curve: Curve, result: LoadSummary, metric: str) -> list[str]:
    """Return a metric at every load of the sweep; ! marks a load that misses a constraint."""
    points = {point.load: point for point in curve.points}
    cells = []
    for load in result.loads:
        point = points.get(load)
        text = "" if point is None else format_mean(Interval(point.row.mean(metric), None, 1), metric)
        cells.append(f"{text}{'' if point is None or point.good else ' !'}")
    return cells


def capacity_notes(result: LoadSummary, metric: str) -> list[str]:
    """Return the lines below the table of capacities."""
    experiment = result.experiment
    size = f"{format_count(len(experiment.configs), 'configuration')}, {format_count(len(result.loads), 'load')}"
    notes = [f"{size}, {format_count(result.run_count, 'run')}; {describe_window(experiment)}; common random numbers"]
    method = "the highest tested rate below all rates that miss a constraint, by the mean of the replications"
    notes.append(f"capacity: {method}; columns: {metric} at each load, ! misses a constraint")
    if experiment.precision is None:
        notes.append("find the capacities more precisely with `precision: 2%`")
    if outside := sum(map(is_outside_profile, result.curves)):
        notes.append(
            f"outside profile: {outside} ({LABEL_MEANINGS['outside profile']}, at a rate that meets the constraints)"
        )
    notes += profile_notes(experiment)
    verdicts = [(load, verdict_of(summary).text) for load, summary in result.by_load.items()]
    notes += [f"at {rates}: {text}" for rates, text in join_loads(verdicts)]
    return notes + [f"failed: configuration {run['config']}: {run['error']}" for run in result.failures[:3]]


def is_outside_profile(curve: Curve) -> bool:
    """Whether the profile does not cover the steps of a configuration at a rate that meets the constraints."""
    return any(run.get("outside") for point in curve.points if point.good for run in point.row.runs)
