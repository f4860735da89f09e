"""The verdict on a profile: usable, for ranking only, or do not use, with the reasons and what to measure.

It follows from the keys of the profile, so every way to calibrate gets the same verdict. It is computed when it is
shown, and not stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from servesim.core import Shape

from .device_profile import Profile
from .parts import PartsCost

USABLE, RANKING, DO_NOT_USE = "usable", "for ranking only", "do not use"
GRADES = (USABLE, RANKING, DO_NOT_USE)  # from best to worst
MEANINGS = {
    USABLE: "",
    RANKING: "compare configurations with it, but do not rely on its times",
    DO_NOT_USE: "its results can be wrong in any direction",
}
MAX_USABLE = 0.10  # mean held-out error of a usable profile
MAX_RANKING = 0.30  # above it, errors are as large as the differences between most configurations
MAX_TOTAL_ERROR = 0.02  # of the total time of the fitted samples, per kind of step
FLAT_TOKENS = 512  # no device computes this many tokens in the time of a quarter of them
MIN_GROWTH = 1.02  # of the time of a prompt, from the shortest to the longest measured one
REQUEST_TIMES = ("ttft", "e2e")  # median errors of single requests
SCATTER = 2.0  # single requests and steps, and percentiles, scatter more than means: their limits are this much higher
PERCENTILE = re.compile(r"p\d")
RARE_KINDS = ("swap",)  # few steps have them, so their error alone does not make a profile useless


class Finding(NamedTuple):
    """Something that is wrong with a profile."""

    grade: str
    text: str
    advice: str  # what to measure, or how to calibrate instead


class Verdict(NamedTuple):
    """What a profile can be used for."""

    findings: list[Finding]

    @property
    def grade(self) -> str:
        return max((finding.grade for finding in self.findings), key=GRADES.index, default=USABLE)

    @property
    def text(self) -> str:
        """The grade and the findings that decide it, as one line."""
        reasons = "; ".join(finding.text for finding in self.findings if finding.grade == self.grade)
        return f"{self.grade}: {reasons}" if reasons else self.grade

    def lines(self) -> list[str]:
        """Return the verdict, every finding, and what to do."""
        meaning = MEANINGS[self.grade]
        lines = [f"verdict: {self.grade}" + (f" ({meaning})" if meaning else "")]
        lines += [f"  {finding.text}" for finding in self.findings]
        advice = dict.fromkeys(finding.advice for finding in self.findings)
        return lines + (["what to do:", *(f"  {text}" for text in advice)] if advice else [])


def verdict_on(profile: Profile) -> Verdict:
    """Return the verdict on a profile."""
    return Verdict(
        [
            *error_findings(profile),
            *check_findings(profile),
            *draft_findings(profile),
            *prompt_findings(profile),
            *gaps(profile),
            *together(profile),
        ]
    )


def error_findings(profile: Profile) -> Iterator[Finding]:
    """Yield the kinds of steps, or the times of runs, whose held-out error is large."""
    errors = profile.mean_errors
    if profile.about.get("derived"):
        yield Finding(
            RANKING, f"{profile.about.get('how')}: no step was measured",
            "measure: sim calibrate endpoint or probe; or compare a simulated with a measured run: sim verify",
        )  # fmt: skip
    elif not errors:
        yield Finding(
            RANKING, "its error is unknown: no step and no run was predicted",
            "measure more step shapes or runs, or compare a simulated with a measured run: sim verify",
        )  # fmt: skip
    checked = bool((profile.about.get("check") or {}).get("errors"))  # then whole loads count, not single steps
    for kind, error in errors.items():
        factor = SCATTER if kind in REQUEST_TIMES or checked else 1.0
        if error > factor * MAX_USABLE:
            grade = DO_NOT_USE if error > factor * MAX_RANKING and kind not in RARE_KINDS else RANKING
            text = f"held-out error of {kind}: {error:.0%} (mean), above {factor * MAX_USABLE:.0%}"
            yield Finding(grade, text, error_advice(profile))


def check_findings(profile: Profile) -> Iterator[Finding]:
    """Yield the errors of a load on the server that was no part of the fit, and that the machine was busy."""
    check = profile.about.get("check") or {}
    large: dict[str, list[str]] = {RANKING: [], DO_NOT_USE: []}
    for metric, error in (check.get("errors") or {}).items():
        factor = SCATTER if PERCENTILE.match(metric) else 1.0
        if abs(error) > factor * MAX_USABLE:
            large[DO_NOT_USE if abs(error) > factor * MAX_RANKING else RANKING].append(f"{metric} {error:+.0%}")
    for grade, texts in large.items():
        if texts:
            yield Finding(grade, f"errors of the check on the server: {', '.join(texts)}", error_advice(profile))
    noise = check.get("noise")
    if noise is not None and noise > MAX_USABLE:
        text = f"the machine was busy: equal requests differed by +-{noise:.0%}"
        yield Finding(RANKING, text, "stop other programs, and measure again")


def draft_findings(profile: Profile) -> Iterator[Finding]:
    """Yield the kinds of steps that a fit with drafts does not reproduce. A fit without drafts is not written then."""
    if not isinstance(profile.cost, PartsCost) or profile.cost.decodes.draft is None:
        return
    for kind, error in profile.section("total_error").items():
        if abs(error) > MAX_TOTAL_ERROR:
            grade = RANKING if abs(error) > MAX_USABLE else USABLE
            text = f"the total time of the fitted {kind} steps differs by {error:+.1%} from the measured one"
            yield Finding(grade, f"{text}, expected at most {MAX_TOTAL_ERROR:.0%}", error_advice(profile))


def error_advice(profile: Profile) -> str:
    """Return how to get a smaller error."""
    if "loads" in profile.about:
        return "measure again on an idle machine, with more --rounds and --output-tokens, near the server"
    if "check" in profile.about:
        return "measure again on an idle machine, with more --seconds; the dominant cause names what differed"
    if "fit" in profile.about:
        return "add runs with other loads to the file of runs, or free other parameters"
    return "measure more of these steps on an idle machine, with other shapes and more repeats"


def prompt_findings(profile: Profile) -> Iterator[Finding]:
    """Yield that long prompts take no longer than short ones: the samples do not show the time of a token."""
    low, high = profile.section("grid").get("prefill_tokens") or (0, 0)
    if high < FLAT_TOKENS or low > high / 4:
        return
    short, long = (profile.cost.seconds(Shape(1, n, n, n * n)) for n in (max(1, int(low)), int(high)))
    if long < MIN_GROWTH * short:
        yield Finding(
            DO_NOT_USE, f"a prompt of {high:g} tokens takes no longer than one of {low:g}",
            "measure prompts of more lengths, without a prefix cache that knows them",
        )  # fmt: skip


def gaps(profile: Profile) -> Iterator[Finding]:
    """Yield the sizes of calibration loads that are above every measured step."""
    missed = profile.section("loads").get("missed") or {}
    grid = profile.section("grid")
    for name, size in missed.items():
        measured = (grid.get(name) or (0, 0))[1]
        if measured < size:
            yield Finding(
                RANKING, f"{name} measured up to {measured:g} only: the loads with {size:g} show no steady steps",
                "repeat these loads with more --output-tokens, or simulate only settings with smaller steps",
            )  # fmt: skip


def together(profile: Profile) -> Iterator[Finding]:
    """Yield that rows and context grew together in a step log: the split of their time is not known."""
    correlation, contexts = profile.about.get("rows_with_context"), profile.section("grid").get("context_per_row")
    if correlation and contexts:
        yield Finding(
            USABLE, f"rows and context grow together in the log (correlation {correlation:.2f}): their times cannot be "
            f"told apart; it holds for {contexts[0]:.0f} to {contexts[1]:.0f} cached tokens per row",
            "for other contexts, log a second load with longer or shorter prompts",
        )  # fmt: skip
