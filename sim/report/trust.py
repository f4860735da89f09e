"""The trust panel: where the step times come from, how wrong they are, and how the policies were validated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from servesim.config.layers import Tree
from servesim.config.scenario import Scenario
from servesim.config.validation import describe_validation
from servesim.core import BadInput
from servesim.costs.device_profile import Profile, load_profile
from servesim.costs.model_config import model_name
from servesim.costs.profile_verdict import DO_NOT_USE, RANKING, USABLE, verdict_on
from servesim.runs.notes import sentence
from servesim.runs.pools import scenarios_of
from servesim.runs.run_warnings import source_notes
from servesim.study.experiment import Experiment

GOOD, CHECK, WARN = "good", "check", "warn"
TONES = {USABLE: GOOD, RANKING: CHECK, DO_NOT_USE: WARN}
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


def facts_of_scenarios(scenarios: Iterable[Scenario]) -> list[Fact]:
    """Return the facts about the profiles of all servers of scenarios."""
    return facts_of_profiles(server.profile for scenario in scenarios for server in scenarios_of(scenario))


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
    verdict = verdict_on(profile)
    return [*facts, error_fact(profile), Fact("Verdict on the profile", verdict.text, TONES[verdict.grade])]


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


def policy_fact(scenarios: Iterable[Scenario]) -> Fact:
    """Return what the decisions of the policies were compared with."""
    servers = [server for scenario in scenarios for server in scenarios_of(scenario)]
    texts = {str(server.policy["name"]): describe_validation(server) for server in servers}
    recorded = all(text.startswith("recordings") for text in texts.values())
    return Fact(
        "Policy validated", "; ".join(f"{name}: {text}" for name, text in texts.items()), GOOD if recorded else CHECK
    )


def policy_note(trees: Iterable[Tree]) -> str:
    """Return the same as one sentence, for scenarios as mappings; those that are not known are empty."""
    scenarios = [Scenario.model_validate(tree) for tree in trees if tree]
    return f"Policy validated: {policy_fact(scenarios).text}." if scenarios else ""


def sweep_facts(experiment: Experiment, configs: Iterable[int]) -> list[Fact]:
    """Return the panel of a sweep or a search: the profiles and policies of the compared configurations."""
    scenarios = [Scenario.model_validate(experiment.tree(config)) for config in configs]
    return [*facts_of_scenarios(scenarios), policy_fact(scenarios)]
