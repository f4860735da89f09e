"""The delay factor and the hysteresis of llm-serving: when waiting requests may be admitted."""

from __future__ import annotations

from typing import NamedTuple, Optional

from servesim.core import Request, Stuck, View, first_time_after


class AdmissionState(NamedTuple):
    """Policy state of the delay factor and of the hysteresis."""

    last_admission: Optional[float] = None  # time of the last admission, until the latency of its prefill is known
    latency: float = 0.0  # seconds of the last prefill, as the variant measures it
    may_admit: bool = True  # hysteresis: False after all slots are used, until enough slots are free


class AdmissionDelay:
    """Applies the delay factor during one call of `decide`."""

    def __init__(self, factor: float, variant: str, fix_bugs: bool, view: View, state: AdmissionState) -> None:
        self.factor = factor
        self.variant = variant
        self.fix_bugs = fix_bugs
        self.view = view
        self.state = state
        self.wake_at: Optional[float] = None  # time at which the delayed request may be admitted
        self._allowed: Optional[bool] = None  # last result, for variants with one test per step
        self._admitted_now: set[Request] = set()
        self.active = factor > 0
        if self.active and variant == "contest-as-reported" and not fix_bugs and not view.waiting:
            why = (
                "llm-serving's delay code calls min() on an empty waiting queue, and its serving loop ends; "
                "set fix_delay_bugs: true to avoid this"
            )
            raise Stuck(why, list(view.running), view.now)
        if variant in ("queue", "request"):  # measured in every step; the contest code measures only when it tests
            self._measure_latency()

    def allows(self) -> bool:
        """Return whether the head of the waiting queue may be admitted now."""
        if not self.active:
            return True
        if self._allowed is None or self.variant in ("request", "contest"):
            self._allowed = self._delay_has_passed()
        return self._allowed

    def _delay_has_passed(self) -> bool:
        if self.variant.startswith("contest"):  # after an admission in the same step, this sets the latency to 0
            self._measure_latency()
        idle = not self.view.running and (self.variant != "request" or not self._admitted_now)
        if idle and (self.variant in ("queue", "request") or self.fix_bugs):
            return True
        if self._admitted_now and self.variant != "queue":
            oldest = min(request.arrival for request in self.view.waiting if request not in self._admitted_now)
        else:
            oldest = self.view.waiting.oldest()
        wait = self.factor * self.state.latency
        self.wake_at = first_time_after(oldest, wait)
        return self.view.now - oldest > wait

    def _measure_latency(self) -> None:
        if self.state.last_admission is not None:
            self.state = AdmissionState(None, self.view.now - self.state.last_admission, self.state.may_admit)

    def record_admission(self, request: Request) -> None:
        """Record an admission. The latency of its prefill counts from now."""
        self._admitted_now.add(request)
        if self.active and request.status == "waiting":
            self.state = AdmissionState(self.view.now, self.state.latency, self.state.may_admit)
