"""llm-serving's delay factor and hysteresis: when waiting requests may be admitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from servesim.core import Request, Stuck, View, just_after


@dataclass(frozen=True)
class Gate:
    """What the admission rules remember: the delay factor's clocks, and whether hysteresis is open."""

    admitted: Optional[float] = None  # when the last prompt was let in, until its latency is known
    latency: float = 0.0  # of the last prefill, as the variant measures it
    open: bool = True

    def hysteresis(self, free: int, threshold: int) -> Gate:
        """Open when more than the threshold are free."""
        return Gate(self.admitted, self.latency, True) if free > threshold and not self.open else self

    def shut(self) -> Gate:
        """Close until enough slots are free again."""
        return Gate(self.admitted, self.latency, False)


class Turnstile:
    """The delay factor inside one decision: lets waiting requests pass, and says when it opens otherwise."""

    def __init__(self, policy: Any, view: View, gate: Gate) -> None:
        self.policy = policy
        self.view = view
        self.gate = gate
        self.opens: Optional[float] = None
        self._passed: Optional[bool] = None  # of the whole queue, once it was tried
        self._in: set[Request] = set()
        variant = policy.delay_variant
        self.on = variant != "none" and policy.delay_factor > 0
        if self.on and variant == "contest-as-reported" and not policy.mend_delay and not view.waiting:
            why = "the delay gate took min() of an empty waiting queue; the serving loop is dead"
            raise Stuck(why, list(view.running), view.now)
        if variant in ("queue", "request"):  # vLLM reads the clock on every turn, the contest only when it tests
            self._read_latency()

    def lets(self, request: Request) -> bool:
        """Say whether the head of waiting may be admitted now."""
        if not self.on:
            return True
        if self._passed is None or self.policy.delay_variant in ("request", "contest"):
            self._passed = self._evaluate()
        return self._passed

    def _evaluate(self) -> bool:
        if self.policy.delay_variant.startswith("contest"):  # which so forgets the latency at a turn's second test
            self._read_latency()
        idle = not self.view.running and (self.policy.delay_variant != "request" or not self._in)
        if idle and (self.policy.delay_variant in ("queue", "request") or self.policy.mend_delay):
            return True
        if self._in and self.policy.delay_variant != "queue":
            oldest = min(request.arrival for request in self.view.waiting if request not in self._in)
        else:
            oldest = self.view.waiting.oldest()
        wait: float = self.policy.delay_factor * self.gate.latency
        self.opens = just_after(oldest, wait)
        return self.view.now - oldest > wait

    def _read_latency(self) -> None:
        if self.gate.admitted is not None:
            self.gate = Gate(None, self.view.now - self.gate.admitted, self.gate.open)

    def admitted(self, request: Request) -> None:
        """Note an admission: the latency of its prefill counts from now."""
        self._in.add(request)
        if self.on and request.place == "waiting":
            self.gate = Gate(self.view.now, self.gate.latency, self.gate.open)
