"""The trust panel: where the step times come from, how wrong they are, and what else limits the result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from servesim.config.layers import Tree
from servesim.config.scenario import Scenario
from servesim.config.validation import describe_validation
from servesim.core import BadInput
from servesim.costs.device_profile import Profile, load_profile
from servesim.costs.model_config import model_name
from servesim.costs.profile_verdict import DO_NOT_USE, RANKING, USABLE, verdict_on
from servesim.runs.notes import LABEL_MEANINGS, sentence
from servesim.runs.request_rate import format_rate
from servesim.runs.run_warnings import source_notes
from servesim.study.ranking import Summary
from servesim.study.rate_summary import RateSummary, is_outside_profile
from servesim.study.table import format_count
from servesim.study.verdict import describe_ties

from .recorded_runs import RecordedRun, Roles

GOOD, CHECK, WARN = "good", "check", "warn"
TONES = {USABLE: GOOD, RANKING: CHECK, DO_NOT_USE: WARN}
MAX_OUTSIDE = 0.01  # of the model calls: more of them outside the measured range are a warning
MAX_GOOD_ERROR = 0.05  # a larger held-out error of a kind of step is marked


@dataclass(frozen=True)
class Fact:
    """One line of the panel; the tone is good, check (know this) or warn."""

    name: str
    text: str
    tone: str = GOOD


def facts_of_profiles(sources: Iterable[Any]) -> list[Fact]:
    """Return the facts about all profiles, each once."""
    return [fact for source in {str(source): source for source in sources}.values() for fact in profile_facts(source)]


def profile_facts(source: Any) -> list[Fact]:
    """Return the facts about a profile, loaded or not: source, method, date and held-out error."""
    try:
        profile = source if isinstance(source, Profile) else load_profile(source)
    except BadInput as bad:
        return [Fact("Profile", f"cannot be loaded now: {bad}", WARN)]
    if profile.path is None and not profile.about.get("derived"):
        return [Fact("Profile", "step costs are written in the scenario: not measured, no known error", WARN)]
    about = profile.about
    kind = ", ".join(str(about[key]) for key in ("device", "dtype") if about.get(key))
    model = model_name(about.get("model"))
    facts = [Fact("Profile", f"{profile.name}: {', '.join(part for part in (kind, model) if part)}")]
    how = [str(about[key]) for key in ("how", "framework") if about.get(key)]
    derived = bool(about.get("derived"))
    date = f" on {str(about['date'])[:10]}" if about.get("date") else ", date unknown"
    date = f", measured{date}" if derived else date
    tone = GOOD if how and about.get("date") and not derived else CHECK
    facts.append(Fact("Derived" if derived else "Measured", f"{'; '.join(how) or 'method unknown'}{date}", tone))
    if not derived:
        facts += [Fact("Backend", sentence(note.text), CHECK) for note in source_notes([profile])]
    return [*facts, error_fact(profile), verdict_fact(profile)]


def error_fact(profile: Profile) -> Fact:
    """Return the mean held-out error of each kind of step; of whole runs, also the largest one."""
    means = profile.mean_errors
    if not means:
        return Fact("Held-out error", "unknown: the profile has none", WARN)
    largest = {kind: error["max"] for kind, error in profile.error.items() if kind in means and error.get("max")}
    text = f"{list_errors(means)} (mean)" + (f"; largest: {list_errors(largest)}" if largest else "")
    return Fact("Held-out error", text, GOOD if max(means.values()) <= MAX_GOOD_ERROR else CHECK)


def list_errors(errors: Mapping[str, float]) -> str:
    """Return errors as text."""
    return ", ".join(f"{kind} {100 * error:.1f} %" for kind, error in errors.items())


def verdict_fact(profile: Profile) -> Fact:
    """Return what the profile can be used for."""
    verdict = verdict_on(profile)
    return Fact("Verdict on the profile", verdict.text, TONES[verdict.grade])


def policy_fact(scenarios: Iterable[Scenario]) -> Fact:
    """Return what the decisions of the policies were compared with."""
    texts = {str(scenario.policy["name"]): describe_validation(scenario) for scenario in scenarios}
    recorded = all(text.startswith("recordings") for text in texts.values())
    return Fact(
        "Policy validated", "; ".join(f"{name}: {text}" for name, text in texts.items()), GOOD if recorded else CHECK
    )


def policy_note(trees: Iterable[Tree]) -> str:
    """Return the same as one sentence, for scenarios as mappings; those that are not known are empty."""
    scenarios = [Scenario.model_validate(tree) for tree in trees if tree]
    return f"Policy validated: {policy_fact(scenarios).text}." if scenarios else ""


def sweep_facts(summary: Summary, runs: Sequence[RecordedRun], roles: Roles, ties: Fact | None = None) -> list[Fact]:
    """Return the panel of a sweep or a search; `ties` are those of a sweep over rates."""
    rows = roles.values()
    scenarios = [Scenario.model_validate(summary.experiment.tree(row.config)) for row in rows]
    sources: dict[str, Any] = {str(scenario.profile): scenario.profile for scenario in scenarios}
    loaded = {run.row.config: run.profile for run in runs}
    sources |= {str(s.profile): loaded[row.config] for row, s in zip(rows, scenarios) if row.config in loaded}
    facts = [fact for source in sources.values() for fact in profile_facts(source)]
    facts += [range_fact(summary, runs), saturation_fact(summary, roles), replication_fact(summary)]
    return [*facts, ties or tie_fact(summary), policy_fact(scenarios)]


def range_fact(summary: Summary, runs: Sequence[RecordedRun]) -> Fact:
    """Return how many steps are larger than the profile's measured range."""
    outside = sum("outside profile" in row.labels for row in summary.rows)
    shares = [(run.role, run.outside) for run in runs if run.outside is not None]
    rate = summary.experiment.rate
    at = "" if rate is None else f" at {format_rate(rate)}"
    text = ", ".join(f"{role} {format_share(share)} of the model calls{at}" for role, share in shares)
    count = f"{outside:,} of {format_count(len(summary.rows), 'configuration')} have steps outside" if outside else ""
    worst = max((share for _, share in shares), default=0.0)
    if not shares and not outside:
        return Fact("Outside the measured range", "unknown: the profile names no measured range", CHECK)
    tone = WARN if worst > MAX_OUTSIDE else CHECK if outside else GOOD
    return Fact("Outside the measured range", "; ".join(filter(None, (text, count))), tone)


def format_share(share: float) -> str:
    """Return a fraction in percent; a small one is not 0."""
    return f"{100 * share:.1f} %" if not 0 < share < 0.0005 else "less than 0.1 %"


def saturation_fact(summary: Summary, roles: Roles) -> Fact:
    """Return whether the backlog grows in the configurations that count."""
    names = [role for role, row in roles.items() if "saturated" in row.labels]
    count = sum("saturated" in row.labels for row in summary.rows)
    rate = summary.experiment.rate
    at = "" if rate is None else f" at {format_rate(rate)}"
    if not count:
        return Fact("Saturation", f"no configuration is saturated{at}")
    text = f"{count:,} of {format_count(len(summary.rows), 'configuration')}{at}"
    note = f", also the {' and the '.join(names)}: {LABEL_MEANINGS['saturated']}"
    return Fact(
        "Saturation", text + (note if names else f", not the {' and the '.join(roles)}"), CHECK if names else GOOD
    )


def replication_fact(summary: Summary) -> Fact:
    """Return how many runs each configuration has, and the kind of intervals."""
    experiment = summary.experiment
    counts = sorted({len(row.runs) for row in summary.rows})
    if not experiment.is_random:
        return Fact("Replications", "1: nothing is random in this scenario, so there are no intervals")
    span = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    if counts[-1] < 2:
        return Fact("Replications", "1: differences have no confidence interval", WARN)
    draws = f", {summary.draw_count} draws of the cost model" if summary.draw_count else ""
    text = f"{span} per configuration on common random numbers, {100 * experiment.confidence:g} % intervals{draws}"
    return Fact("Replications", text)


def capacity_fact(result: RateSummary) -> Fact:
    """Return how exactly the capacities are known, and which ones are equal; without constraints, the ties per rate."""
    if not result.experiment.subject_to:
        open_rates = [rate for rate, s in result.by_rate.items() if any(row.relation.tied for row in s.rows)]
        text = f"at {', '.join(map(format_rate, open_rates))}" if open_rates else "none"
        return Fact("Ties", text, CHECK if open_rates else GOOD)
    outside = sum(map(is_outside_profile, result.curves))
    precision = result.experiment.precision
    notes = [text] if (text := result.describe_equal()) else []
    notes += [f"{format_count(outside, 'configuration')} with steps outside the measured range"] if outside else []
    known = "only the rates of the sweep were tested (see precision)"
    if precision is not None:
        known = f"known to {100 * precision:g} %"
    return Fact("Capacity", "; ".join([*notes, known]), GOOD if precision is not None and not notes else CHECK)


def tie_fact(summary: Summary) -> Fact:
    """Return which configurations are tied with the winner, and how many runs would decide."""
    if summary.winner is None:
        return Fact("Ties", "no winner", CHECK)
    notes = [note[3:] for note in describe_ties(summary)]  # without the mark of the table
    undecided = any(row.relation.outcome == "undecided" for row in summary.rows)
    return Fact("Ties", "; ".join(notes) or "none", CHECK if undecided else GOOD)
