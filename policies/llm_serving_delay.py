"""llm-serving's delay factor and hysteresis: when waiting requests may be admitted."""

from __future__ import annotations

from typing import NamedTuple, Optional

from servesim.core import Request, Stuck, View, just_after


class Gate(NamedTuple):
    """What the admission rules remember: the delay factor's clocks, and whether hysteresis is open."""

    admitted: Optional[float] = None  # when the last prompt was let in, until its latency is known
    latency: float = 0.0  # of the last prefill, as the variant measures it
    open: bool = True  # closed when no slot is left, until enough are free again


class Turnstile:
    """The delay factor inside one decision: lets waiting requests pass, and says when it opens otherwise."""

    def __init__(self, factor: float, variant: str, mend: bool, view: View, gate: Gate) -> None:
        self.factor = factor
        self.variant = variant
        self.mend = mend
        self.view = view
        self.gate = gate
        self.opens: Optional[float] = None
        self._passed: Optional[bool] = None  # of the whole queue, once it was tried
        self._in: set[Request] = set()
        self.on = variant != "none" and factor > 0
        if self.on and variant == "contest-as-reported" and not mend and not view.waiting:
            why = "the delay gate took min() of an empty waiting queue; the serving loop is dead"
            raise Stuck(why, list(view.running), view.now)
        if variant in ("queue", "request"):  # vLLM reads the clock on every turn, the contest only when it tests
            self._read_latency()

    def lets(self) -> bool:
        """Say whether the head of waiting may be admitted now."""
        if not self.on:
            return True
        if self._passed is None or self.variant in ("request", "contest"):
            self._passed = self._evaluate()
        return self._passed

    def _evaluate(self) -> bool:
        if self.variant.startswith("contest"):  # which so forgets the latency at a turn's second test
            self._read_latency()
        idle = not self.view.running and (self.variant != "request" or not self._in)
        if idle and (self.variant in ("queue", "request") or self.mend):
            return True
        if self._in and self.variant != "queue":
            oldest = min(request.arrival for request in self.view.waiting if request not in self._in)
        else:
            oldest = self.view.waiting.oldest()
        wait = self.factor * self.gate.latency
        self.opens = just_after(oldest, wait)
        return self.view.now - oldest > wait

    def _read_latency(self) -> None:
        if self.gate.admitted is not None:
            self.gate = self.gate._replace(admitted=None, latency=self.view.now - self.gate.admitted)

    def admitted(self, request: Request) -> None:
        """Note an admission: the latency of its prefill counts from now."""
        self._in.add(request)
        if self.on and request.place == "waiting":
            self.gate = self.gate._replace(admitted=self.view.now)
