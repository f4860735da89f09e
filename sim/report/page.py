"""report.html: the result of a sweep as one page that needs nothing else; no network, no library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from servesim.files.write import open_text
from servesim.runs.metrics import WHERE
from servesim.runs.text import PLACES
from servesim.study.experiment import shown
from servesim.study.files import MEANINGS, against, confirmation, count, counted, keys_of
from servesim.study.intervals import Interval
from servesim.study.number_format import number, spread
from servesim.study.ranking import Row, Summary

from . import charts
from .figures import knobs, reasons, stories

ROWS = 2000  # of the table; summary.csv has them all


class Part(NamedTuple):
    """A section of the page."""

    id: str
    title: str
    body: str


def write_report(summary: Summary, path: Path) -> None:
    """Write the page."""
    parts = [winner(summary), *why(summary), *trade_offs(summary), *curves(summary), *times(summary)]
    parts += [*timeline(summary), configurations(summary), method(summary)]
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    sections = "".join(f'<section id="{p.id}"><h2>{escape(p.title)}</h2>{p.body}</section>\n' for p in parts)
    links = "".join(f'<li><a href="#{p.id}">{escape(p.title)}</a></li>' for p in parts)
    for mark, value in (("title", escape(summary.experiment.name)), ("about", about(summary)), ("nav", links)):
        template = template.replace(f"<!--{mark}-->", value)
    with open_text(path) as file:
        file.write(template.replace("<!--sections-->", sections))


def about(summary: Summary) -> str:
    """Say what was run."""
    profile = summary.experiment.base.get("profile", "ascend910b4-llama2-7b")
    name = profile if isinstance(profile, str) else "costs of the scenario's own"
    return escape(
        f"{count(len(summary.rows), 'configuration')}, {count(summary.runs, 'simulated run')} on profile {name}. "
        f"Counted: {counted(summary.experiment)}."
    )


def winner(summary: Summary) -> Part:
    """Return the card of the winner."""
    row = summary.winner
    if row is None:
        return Part("winner", "No winner", "<p>No configuration served its requests; see the table for why.</p>")
    (metric, goal), *others = summary.experiment.objectives
    facts = "".join(
        f"<div><dt>{escape(metric.removesuffix('_ms'))}</dt><dd>{spread(row.found[metric], metric)}<br>"
        f'<span class="soft">{verdict(row, metric, goal)}</span></dd></div>'
        for metric, goal in others
    )
    chips = "".join(f"<li>{escape(key)} <b>{escape(shown(value))}</b></li>" for key, value in row.assignment.items())
    body = (
        f'<p class="big">{escape(metric.removesuffix("_ms"))} {spread(row.found[metric], metric)}</p>'
        f"<p>{verdict(row, metric, goal)}</p>"
        f'<ul class="settings">{chips or "<li>the base scenario</li>"}</ul>{tags(row)}'
    )
    card = f'<div class="card winner">{body}<dl class="facts">{facts}</dl></div>'
    fresh = "".join(f"<p>{escape(text.capitalize())}.</p>" for text in confirmation(summary))
    return Part("winner", "Winner", card + fresh + tie(summary))


def verdict(row: Row, metric: str, goal: str) -> str:
    """Say in words how a figure compares with the baseline."""
    found = row.change[metric]
    if row.labels[:1] == ["baseline"] or found.mean == 0:
        return "the same as the baseline"
    better = (found.mean < 0) == (goal == "min")
    sure = "" if found.half is None else ", certain" if found.certain else ", within chance"
    return f"{against(row, metric)}: {'better' if better else 'worse'} than the baseline{sure}"


def tie(summary: Summary) -> str:
    """Say how many are as good."""
    tied = [row for row in summary.rows if row.tied]
    metric = summary.experiment.objectives[0].metric
    if len(summary.rows) == 1:
        return ""
    if not tied:
        sure = "" if not summary.experiment.varies or summary.experiment.replications < 2 else ", beyond chance"
        return f'<p class="note">Every other configuration is worse by {escape(metric)}{sure}.</p>'
    return (
        f'<p class="note">{len(tied)} other{"s" if len(tied) > 1 else ""} cannot be told from it by '
        f'{escape(metric)}; they have an = in the <a href="#configurations">table</a>.</p>'
    )


def why(summary: Summary) -> list[Part]:
    """Return what the winner gains, and what each of its settings is worth."""
    row, base = summary.winner, summary.baseline
    if row is None:
        return []
    body = f"<p>{escape(gains(row.where(), base.where()))}</p>" if row is not base else ""
    found = reasons(summary)
    if found:
        metric, goal = summary.experiment.objectives[0]
        lines = "".join(reason(*item, metric, goal) for item in found)
        heads = f'<th>Change only</th><th>to</th><th class="n">{escape(metric)}</th><th>so it</th>'
        body += (
            "<p>What the winner would lose with one setting changed, replication by replication:</p>"
            f'<div class="scroll" tabindex="0" role="region" aria-label="Settings of the winner"><table>'
            f"<thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>"
        )
    return [Part("why", "Why it wins", body)] if body else []


def reason(knob: str, value: str, found: Interval, metric: str, goal: str) -> str:
    """Return a line of the table of single changes."""
    worse = (found.mean > 0) == (goal == "min")
    if found.mean == 0:
        word = "does not matter"
    elif found.half is None:
        word = "costs that much in one run" if worse else "would be better in one run"
    elif not found.certain:
        word = "cannot be told from chance"
    else:
        word = "matters" if worse else "would be better"
    cells = f"<td>{escape(knob)}</td><td>{escape(value)}</td>"
    return f'<tr>{cells}<td class="n">{spread(found, metric, True)}</td><td>{word}</td></tr>'


def gains(mine: dict[str, float], base: dict[str, float]) -> str:
    """Say where a request spends less time than under the baseline, and where more."""
    if not mine or not base:
        return "There is nothing to compare with: the baseline served no request."
    apart = sorted(((mine[name] - base[name], PLACES[name]) for name in WHERE), key=lambda item: item[0])
    total, before = sum(mine.values()), sum(base.values())
    less = [f"{number(-seconds)} s less {name}" for seconds, name in apart if seconds < -0.005 * before]
    more = [f"{number(seconds)} s more {name}" for seconds, name in reversed(apart) if seconds > 0.005 * before]
    text = f"A request takes {number(total)} s from end to end instead of {number(before)} s"
    return text + (": " + ", ".join(less + more) if less or more else "") + "."


def trade_offs(summary: Summary) -> list[Part]:
    """Return the Pareto front, the first objective against each other one."""
    first, *others = summary.experiment.objectives
    if not others or len(summary.rows) < 2:
        return []
    many = sum(row.front for row in summary.rows)
    figures = "".join(f"<figure>{charts.trade_off(summary, first, other)}</figure>" for other in others)
    names = ", ".join(one.metric for one in summary.experiment.objectives)
    key = legend(("--win", "winner"), ("--base", "baseline"), ("--mark", "on the front"), ("--point", "beaten"))
    text = f"<p>{many} configuration{'s are' if many != 1 else ' is'} not beaten in {escape(names)} at once.</p>"
    return [Part("pareto", "Pareto front", f'{text}{key}<div class="charts wide">{figures}</div>')]


def curves(summary: Summary) -> list[Part]:
    """Return a curve for each knob."""
    found = knobs(summary)
    if not found:
        return []
    key = legend(("--mark", "best with this value, other knobs free"), ("--win", "winner, only this knob changed"),
                 ("--base", "baseline"))  # fmt: skip
    figures = "".join(f"<figure><h3>{escape(k.name)}</h3>{charts.knob_chart(k)}</figure>" for k in found)
    level = spread(summary.baseline.found[found[0].metric], found[0].metric)
    text = (
        f"<p>{escape(found[0].metric)} by the value of each knob. Bars are intervals of the paired difference to the "
        f"winner: what they let reach its level cannot be told from it. The baseline has {level}.</p>"
    )
    return [Part("knobs", "Knobs", f'{text}{key}<div class="charts">{figures}</div>')]


def times(summary: Summary) -> list[Part]:
    """Return where requests' time went."""
    bars = [("baseline", summary.baseline.where())]
    if summary.winner is not None and summary.winner is not summary.baseline:
        bars.insert(0, ("winner", summary.winner.where()))
    bars = [(name, where) for name, where in bars if where]
    if not bars:
        return []
    key = legend(*((f"--w{place}", charts.STATES[name]) for place, name in enumerate(WHERE)))
    heads = "".join(f'<th class="n">{escape(name)}</th>' for name, _ in bars)
    lines = "".join(
        f"<tr><td>{charts.STATES[state]}</td>"
        + "".join(f'<td class="n">{number(round(where[state], 4))}</td>' for _, where in bars)
        + "</tr>"
        for state in WHERE
    )
    table = f"<table><thead><tr><th>seconds, mean</th>{heads}</tr></thead><tbody>{lines}</tbody></table>"
    body = f'<div class="charts wide"><figure>{charts.where_chart(bars)}{key}</figure><figure>{table}</figure></div>'
    return [Part("time", "Where requests' time went", body)]


def timeline(summary: Summary) -> list[Part]:
    """Return the queues over time."""
    watched = stories(summary)
    if not watched:
        return []
    last = max(story.log.times[-1] for story in watched if story.log.times)
    most = max((q.waiting, q.running, q.swapped) for story in watched for q in story.log.queues)
    held = max(q.held for story in watched for q in story.log.queues)
    figures = ""
    for story in watched:
        name = "baseline" if "baseline" in story.row.labels else "winner"
        blocks = charts.block_chart(story, last, held) if held else ""
        caption = f"{name}: {story.row.label}"
        figures += f"<figure><h3>{escape(caption)}</h3>{charts.queue_chart(story, last, max(most))}{blocks}</figure>"
    key = legend(("--w1", "waiting"), ("--w4", "running"), ("--w5", "swapped out"), ("--mark", "blocks in use"))
    text = f"<p>First replication, {watched[0].requests:,} requests.</p>"
    return [Part("queues", "Queues over time", f'{text}{key}<div class="charts wide">{figures}</div>')]


def legend(*items: tuple[str, str]) -> str:
    """Return a key of colours."""
    entries = "".join(f'<li><i style="background:var({colour})"></i>{escape(name)}</li>' for colour, name in items)
    return f'<ul class="key">{entries}</ul>'


def tags(row: Row) -> str:
    bad = ("stuck", "failed", "serves fewer")
    return "".join(f'<span class="tag{" bad" if name in bad else ""}">{escape(name)}</span>' for name in row.labels)


def configurations(summary: Summary) -> Part:
    """Return the table of all configurations."""
    keys = [key for key in keys_of(summary.rows) if key in summary.experiment.knobs]
    metrics = [one.metric for one in summary.experiment.objectives]
    heads = [head("rank", True), *(head(key.removeprefix("policy.")) for key in keys)]
    for metric in metrics:
        heads += [head(metric, True), head("against baseline", True)]
    heads += [head("evictions", True), head("labels")]
    lines = "".join(line(row, summary, keys, metrics) for row in summary.rows[:ROWS])
    more = f"<p>The first {ROWS:,}; summary.csv has all.</p>" if len(summary.rows) > ROWS else ""
    body = (
        '<label for="filter">Show only rows with these words</label>'
        '<input id="filter" type="search" autocomplete="off" placeholder="e.g. decode_batch 32 swapped">'
        f' <span id="shown" class="soft" role="status">{min(len(summary.rows), ROWS)} shown</span>{more}'
        '<div class="scroll" tabindex="0" role="region" aria-label="All configurations">'
        f'<table class="sortable"><thead><tr>{"".join(heads)}</tr></thead><tbody>{lines}</tbody></table></div>'
    )
    return Part("configurations", "All configurations", body)


def head(name: str, numeric: bool = False) -> str:
    """Return a column's head, a button that sorts."""
    return f'<th scope="col"{" class=n" if numeric else ""}><button type="button">{escape(name)}</button></th>'


def line(row: Row, summary: Summary, keys: Sequence[str], metrics: Sequence[str]) -> str:
    """Return a row of the table; data-v is what it sorts by."""
    cells = [cell(row.rank, f"{row.rank}{' =' if row.tied else ''}")]
    cells += [f"<td>{escape(shown(row.assignment.get(key, '')))}</td>" for key in keys]
    for metric in metrics:
        found, apart = row.found[metric], row.change[metric]
        cells += [cell(found.mean, spread(found, metric)), cell(apart.mean, against(row, metric))]
    kind = ' class="is-win"' if row is summary.winner else ' class="is-base"' if row is summary.baseline else ""
    return f"<tr{kind}>{''.join(cells)}{cell(row.mean('evictions'))}<td>{tags(row)}</td></tr>\n"


def cell(value: float, text: str | None = None) -> str:
    if math.isnan(value):
        return '<td class="n" data-v="">–</td>'
    return f'<td class="n" data-v="{value!r}">{number(value) if text is None else text}</td>'


def method(summary: Summary) -> Part:
    """Return how to read the page, and how to run its winner."""
    experiment = summary.experiment
    confidence = f"{100 * experiment.confidence:g} %"
    meanings = "".join(f"<li><b>{name}</b>: {text}</li>" for name, text in MEANINGS.items())
    text = [
        "<p>Every configuration met the same requests in each replication (common random numbers). ± is the "
        f"half-width of a {confidence} Student t interval over replications; differences are taken pair by pair. Each "
        "interval holds by itself, not all at once: of many configurations the luckiest looks better than it is.</p>",
        f"<p>Counted: {escape(counted(experiment))}. = marks what cannot be told from the winner.</p>",
        f"<ul>{meanings}</ul>",
        "<pre>sim run best.yaml             # the winner's first replication, figure by figure\n"
        "sim replay best.yaml ...      # the same policy on the live engine</pre>",
    ]
    return Part("method", "How to read this", "".join(text))
