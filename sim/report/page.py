"""report.html: the result of a sweep as one self-contained page; it needs no network and no library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from servesim.files.write import open_text
from servesim.runs.request_rows import STATES
from servesim.runs.text import STATE_LABELS
from servesim.study import files
from servesim.study.experiment import format_value
from servesim.study.files import format_count, format_difference, printed_label
from servesim.study.intervals import Interval
from servesim.study.number_format import format_mean, format_number
from servesim.study.objective import Objective
from servesim.study.ranking import Row, Summary

from . import charts
from .cells import header_cell, label_tags, number_cell
from .figures import knobs, record_queues, single_change_costs

MAX_TABLE_ROWS = 2000  # summary.csv has all rows


class Section(NamedTuple):
    """A section of the page."""

    id: str
    title: str
    body: str


def write_report(summary: Summary, path: Path) -> None:
    """Write the page."""
    content = [winner_section(summary), *why_section(summary), *pareto_section(summary), *knobs_section(summary)]
    content += [*time_section(summary), *queues_section(summary), table_section(summary), method_section(summary)]
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    sections = "".join(f'<section id="{s.id}"><h2>{escape(s.title)}</h2>{s.body}</section>\n' for s in content)
    links = "".join(f'<li><a href="#{s.id}">{escape(s.title)}</a></li>' for s in content)
    title = f"Sweep report: {summary.experiment.name}"
    for slot, value in (("title", escape(title)), ("about", describe_runs(summary)), ("nav", links)):
        template = template.replace(f"<!--{slot}-->", value)
    with open_text(path) as file:
        file.write(template.replace("<!--sections-->", sections))


def describe_runs(summary: Summary) -> str:
    """Return the line below the title: runs, profile, and the requests that count."""
    profile = summary.experiment.base.get("profile", "ascend910b4-llama2-7b")
    name = profile if isinstance(profile, str) else "written in the scenario"
    return escape(
        f"{format_count(len(summary.rows), 'configuration')}, {format_count(summary.run_count, 'simulated run')}. "
        f"Step costs: profile {name}. Metrics: {files.describe_window(summary.experiment)}."
    )


def winner_section(summary: Summary) -> Section:
    """Return the winner with its metrics and settings."""
    row = summary.winner
    if row is None:
        text = "<p>No configuration is eligible to win; the labels in the table below say why.</p>"
        return Section("winner", "No winner", text)
    first, *others = summary.experiment.objectives
    facts = "".join(
        f"<div><dt>{escape(o.metric.removesuffix('_ms'))}</dt><dd>{format_mean(row.means[o.metric], o.metric)}<br>"
        f'<span class="soft">{compare_with_baseline(row, o)}</span></dd></div>'
        for o in others
    )
    chips = "".join(f"<li>{escape(k)} <b>{escape(format_value(v))}</b></li>" for k, v in row.assignment.items())
    name, value = first.metric.removesuffix("_ms"), format_mean(row.means[first.metric], first.metric)
    body = (
        f'<p class="big">{escape(name)} {value}</p>'
        f"<p>{compare_with_baseline(row, first)}</p>"
        f'<ul class="settings">{chips or "<li>the base scenario</li>"}</ul>{label_tags(row)}'
    )
    card = f'<div class="card winner">{body}<dl class="facts">{facts}</dl></div>'
    notes = [*files.describe_draws(summary), *files.describe_confirmation(summary)]
    paragraphs = "".join(f"<p>{escape(text.capitalize())}.</p>" for text in notes)
    return Section("winner", "Winner", card + paragraphs + describe_ties(summary))


def compare_with_baseline(row: Row, objective: Objective) -> str:
    """Return the difference from the baseline in words."""
    change = row.differences[objective.metric]
    if row.labels[:1] == ["baseline"] or change.mean == 0:
        return "the same as the baseline"
    word = "better" if objective.better(change.mean) else "worse"
    note = "" if change.half_width is None else ", significant" if change.excludes_zero else ", not significant"
    return f"{format_difference(row, objective.metric)}: {word} than the baseline{note}"


def describe_ties(summary: Summary) -> str:
    """Return how many configurations do not differ significantly from the winner."""
    tied = [row for row in summary.rows if row.not_significant]
    metric = summary.experiment.objectives[0].metric
    if len(summary.rows) == 1:
        return ""
    if not tied:
        repeated = summary.experiment.is_random and summary.experiment.replications > 1
        word = "significantly worse" if repeated else "worse"
        return f'<p class="note">Every other eligible configuration is {word} in {escape(metric)}.</p>'
    return (
        f'<p class="note">{format_count(len(tied), "other configuration")}: {escape(metric)} not significantly '
        f'different from the winner (marked with = in the <a href="#configurations">table</a>).</p>'
    )


def why_section(summary: Summary) -> list[Section]:
    """Return the time that the winner saves, and the cost of changing each of its settings."""
    row, base = summary.winner, summary.baseline
    if row is None:
        return []
    body = f"<p>{escape(describe_gains(row.time_breakdown(), base.time_breakdown()))}</p>" if row is not base else ""
    costs = single_change_costs(summary)
    if costs:
        objective = summary.experiment.objectives[0]
        lines = "".join(single_change_row(*item, objective) for item in costs)
        change = f"change of {escape(objective.metric)}"
        heads = f'<th>setting</th><th>changed to</th><th class="n">{change}</th><th>effect</th>'
        body += (
            "<p>Effect of changing one setting of the winner (mean of the paired differences over replications):</p>"
            f'<div class="scroll" tabindex="0" role="region" aria-label="Settings of the winner"><table>'
            f"<thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>"
        )
    return [Section("why", "Why it wins", body)] if body else []


def single_change_row(knob: str, value: str, change: Interval, objective: Objective) -> str:
    """Return a row of the table of single changes."""
    if change.mean == 0:
        effect = "none"
    elif change.half_width is not None and not change.excludes_zero:
        effect = "not significant"
    else:
        effect = "better" if objective.better(change.mean) else "worse"
        effect += " (one run)" if change.half_width is None else ""
    cells = f"<td>{escape(knob)}</td><td>{escape(value)}</td>"
    return f'<tr>{cells}<td class="n">{format_mean(change, objective.metric, True)}</td><td>{effect}</td></tr>'


def describe_gains(winner: dict[str, float], base: dict[str, float]) -> str:
    """Return the states in which a request spends less or more time than with the baseline."""
    if not winner or not base:
        return "No comparison of times: the winner or the baseline served no request."
    changes = sorted(((winner[name] - base[name], STATE_LABELS[name]) for name in STATES), key=lambda item: item[0])
    total, before = sum(winner.values()), sum(base.values())
    less = [f"{name} -{format_number(-seconds)} s" for seconds, name in changes if seconds < -0.005 * before]
    more = [f"{name} +{format_number(seconds)} s" for seconds, name in changes[::-1] if seconds > 0.005 * before]
    text = f"A request takes {format_number(total)} s on average (baseline: {format_number(before)} s)"
    return text + (": " + ", ".join(less + more) if less or more else "") + "."


def pareto_section(summary: Summary) -> list[Section]:
    """Return the Pareto front: one chart per pair of the first objective and another one."""
    first, *others = summary.experiment.objectives
    if not others or len(summary.rows) < 2:
        return []
    count = sum(row.on_pareto_front for row in summary.rows)
    figures = "".join(f"<figure>{charts.trade_off(summary, first.metric, other.metric)}</figure>" for other in others)
    names = ", ".join(objective.metric for objective in summary.experiment.objectives)
    key = charts.legend(
        ("--win", "winner"), ("--base", "baseline"), ("--mark", "on the Pareto front"), ("--point", "other")
    )
    text = (
        f"<p>{format_count(count, 'configuration')} on the Pareto front of {escape(names)}: no other configuration is "
        "better in one of these metrics without being worse in another.</p>"
    )
    return [Section("pareto", "Pareto front", f'{text}{key}<div class="charts wide">{figures}</div>')]


def knobs_section(summary: Summary) -> list[Section]:
    """Return one chart per parameter."""
    curves = knobs(summary)
    if not curves:
        return []
    marks = (("--mark", "best configuration with this value"), ("--win", "winner, only this setting changed"))
    key = charts.legend(*marks, ("--base", "baseline"))
    figures = "".join(f"<figure><h3>{escape(k.name)}</h3>{charts.knob_chart(k)}</figure>" for k in curves)
    metric = curves[0].metric
    text = (
        f"<p>{escape(metric)} for each value of each setting. Bars are confidence intervals of the paired difference "
        "from the winner. A bar that reaches the winner's level is not significantly different from it. "
        f"The baseline has {format_mean(summary.baseline.means[metric], metric)}.</p>"
    )
    return [Section("knobs", "Effect of each setting", f'{text}{key}<div class="charts">{figures}</div>')]


def time_section(summary: Summary) -> list[Section]:
    """Return the time breakdown of the winner and the baseline."""
    bars = [("baseline", summary.baseline.time_breakdown())]
    if summary.winner is not None and summary.winner is not summary.baseline:
        bars.insert(0, ("winner", summary.winner.time_breakdown()))
    bars = [(name, seconds) for name, seconds in bars if seconds]
    if not bars:
        return []
    key = charts.legend(*((f"--w{index}", charts.STATE_LEGEND[name]) for index, name in enumerate(STATES)))
    heads = "".join(f'<th class="n">{escape(name)}</th>' for name, _ in bars)
    lines = "".join(
        f"<tr><td>{charts.STATE_LEGEND[state]}</td>"
        + "".join(f'<td class="n">{format_number(round(seconds[state], 4))}</td>' for _, seconds in bars)
        + "</tr>"
        for state in STATES
    )
    table = f"<table><thead><tr><th>mean seconds per request</th>{heads}</tr></thead><tbody>{lines}</tbody></table>"
    body = f'<div class="charts wide"><figure>{charts.time_chart(bars)}{key}</figure><figure>{table}</figure></div>'
    return [Section("time", "Time breakdown of a request", body)]


def queues_section(summary: Summary) -> list[Section]:
    """Return the queues of the winner and the baseline over time."""
    timelines = record_queues(summary)
    if not timelines:
        return []
    last = max(timeline.log.times[-1] for timeline in timelines if timeline.log.times)
    queues = [queue for timeline in timelines for queue in timeline.log.queues]
    max_requests = max(max((q.waiting, q.running, q.swapped) for q in queues))
    max_blocks = max(q.blocks_used for q in queues)
    figures = ""
    for timeline in timelines:
        name = "baseline" if "baseline" in timeline.row.labels else "winner"
        blocks = charts.block_chart(timeline, last, max_blocks) if max_blocks else ""
        caption = escape(f"{name}: {timeline.row.label}")
        figures += f"<figure><h3>{caption}</h3>{charts.queue_chart(timeline, last, max_requests)}{blocks}</figure>"
    key = charts.legend(
        ("--w1", "waiting"), ("--w4", "running"), ("--w5", "swapped out"), ("--mark", "KV blocks in use")
    )
    text = f"<p>Requests per queue in the first replication ({timelines[0].requests:,} requests).</p>"
    return [Section("queues", "Queues over time", f'{text}{key}<div class="charts wide">{figures}</div>')]


def table_section(summary: Summary) -> Section:
    """Return the table of all configurations."""
    keys = [key for key in files.parameter_keys(summary.rows) if key in summary.experiment.knobs]
    metrics = [objective.metric for objective in summary.experiment.objectives]
    heads = [header_cell("rank", True), *(header_cell(key.removeprefix("policy.")) for key in keys)]
    for metric in metrics:
        heads += [header_cell(metric, True), header_cell("vs. baseline", True)]
    heads += [header_cell(name, True) for name in files.utilisation_columns(summary)]
    heads += [header_cell("draws won", True)] if summary.draw_count else []
    heads += [header_cell("preemptions", True), header_cell("labels")]
    lines = "".join(table_row(row, summary, keys, metrics) for row in summary.rows[:MAX_TABLE_ROWS])
    is_cut = len(summary.rows) > MAX_TABLE_ROWS
    more = f"<p>The best {MAX_TABLE_ROWS:,} configurations; summary.csv lists all.</p>" if is_cut else ""
    body = (
        '<label for="filter">Show only rows that contain all of these words</label>'
        '<input id="filter" type="search" autocomplete="off" placeholder="e.g. decode_batch 32 swapped">'
        f' <span id="shown" class="soft" role="status">{min(len(summary.rows), MAX_TABLE_ROWS)} shown</span>{more}'
        '<div class="scroll" tabindex="0" role="region" aria-label="All configurations">'
        f'<table class="sortable"><thead><tr>{"".join(heads)}</tr></thead><tbody>{lines}</tbody></table></div>'
    )
    return Section("configurations", "All configurations", body)


def table_row(row: Row, summary: Summary, keys: Sequence[str], metrics: Sequence[str]) -> str:
    """Return a row of the table; cells sort by data-v."""
    cells = [number_cell(row.rank, f"{row.rank}{' =' if row.not_significant else ''}")]
    cells += [f"<td>{escape(format_value(row.assignment.get(key, '')))}</td>" for key in keys]
    for metric in metrics:
        mean, change = row.means[metric], row.differences[metric]
        cells.append(number_cell(mean.mean, format_mean(mean, metric)))
        cells.append(number_cell(change.mean, format_difference(row, metric)))
    for name in files.utilisation_columns(summary):
        cells.append(number_cell(row.mean(name), format_mean(Interval(row.mean(name), None, 0), name)))
    cells += [number_cell(row.draws_won if row.draws else math.nan)] if summary.draw_count else []
    kind = ' class="is-win"' if row is summary.winner else ' class="is-base"' if row is summary.baseline else ""
    return f"<tr{kind}>{''.join(cells)}{number_cell(row.mean('evictions'))}<td>{label_tags(row)}</td></tr>\n"


def method_section(summary: Summary) -> Section:
    """Return how to read the page and how to run the winner."""
    confidence = f"{100 * summary.experiment.confidence:g} %"
    meanings = "".join(f"<li><b>{printed_label(name)}</b>: {text}</li>" for name, text in files.LABEL_MEANINGS.items())
    draws = (
        f"<p>Every configuration also ran with {summary.draw_count} random cost models that agree with the calibration "
        "(draws); a draw is the same cost model for all configurations. ± includes their spread. A configuration wins "
        "a draw if it is the best one with this cost model.</p>"
    )
    text = [
        "<p>In each replication, every configuration serves the same requests (common random numbers). "
        f"± is the half-width of a {confidence} Student t interval over replications. Differences are paired by "
        "replication. The confidence level holds for each interval alone. With many configurations, the best one "
        "looks better than it is (selection bias); the key `confirm` tests it on new replications.</p>",
        f"<p>Metrics: {escape(files.describe_window(summary.experiment))}. "
        "= marks configurations that are not significantly different from the winner. Labels:</p>",
        f"<ul>{meanings}</ul>",
        *([draws] if summary.draw_count else []),
        "<pre>sim run best.yaml             # run the winner's first replication, print all metrics\n"
        "sim replay best.yaml ...      # run the same policy on a device or server, print the error</pre>",
    ]
    return Section("method", "How to read this page", "".join(text))
