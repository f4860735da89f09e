"""What every adapter keeps between two steps of a server: the policy, its state, and its requests.

A server's own request is an entry here. A request of servesim belongs to each entry, for as long as the entry exists.
"""

from __future__ import annotations

import json
from typing import Any
from weakref import WeakKeyDictionary

from servesim.core import BadInput, Plan, Policy, Request, View
from servesim.engine.queues import FifoQueue, RequestQueue, SortedQueue
from servesim.engine.rules import rules_of
from servesim.policies import POLICIES

POLICY_VARIABLE = "SERVESIM_POLICY"  # environment: {"name": ..., fields...}


class PolicyState:
    """A policy and its state between two steps of the server."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.state: Any = policy.initial_state()
        self._promoted: list[Request] = []  # requests moved to the front after `max_wait`, in this order
        self._requests: WeakKeyDictionary[Any, Request] = WeakKeyDictionary()
        self._serial = 0

    def decide(self, view: View) -> Plan:
        """Return the policy's plan, and keep what the policy reads in the next step."""
        view.state = self.state
        plan = self.policy.decide(view)
        self.state = plan.state
        return plan

    def request_of(self, entry: Any, now: float) -> Request:
        """Return the request of an entry."""
        request = self._requests.get(entry)
        if request is None:
            request = self._requests[entry] = self.make_request(entry, now)
            request.serial, self._serial = self._serial, self._serial + 1
        return request

    def make_request(self, entry: Any, now: float) -> Request:
        """Return a new request for an entry that the adapter sees for the first time."""
        raise NotImplementedError

    def waiting_queue(self) -> RequestQueue:
        """Return an empty waiting queue, in the policy's order."""
        return SortedQueue(rules_of(self.policy).waiting_key(self.policy)) if self.policy.is_sorted else FifoQueue()

    def promote(self, waiting: Any, now: float) -> None:
        """Move requests that have waited longer than `max_wait` to the front, after those moved earlier."""
        max_wait = self.policy.max_wait
        if max_wait is None or not isinstance(waiting, SortedQueue):
            return
        queued = set(waiting)
        earlier = [request for request in self._promoted if request in queued]
        late = [request for request in queued.difference(earlier) if request.arrival + max_wait <= now]
        self._promoted = earlier + sorted(late, key=lambda request: (request.arrival, request.serial))
        for request in self._promoted:
            waiting.move_to_front(request)

    def forget_promotion(self, request: Request) -> None:
        """A preempted request waits for `max_wait` again."""
        if request in self._promoted:
            self._promoted.remove(request)


def fields_from(text: str, default: str) -> tuple[type[Policy], dict[str, Any]]:
    """Parse {"name": ..., fields...}: return the class of the policy and the fields."""
    try:
        fields = dict(json.loads(text))
    except (ValueError, TypeError):
        raise BadInput(
            f'{POLICY_VARIABLE}: expected a JSON object such as {{"name": "{default}"}}, got {text!r}'
        ) from None
    name = fields.pop("name", default)
    if name not in POLICIES:
        raise BadInput(f"{POLICY_VARIABLE}: no policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name], fields


def make_policy(kind: type[Policy], fields: dict[str, Any]) -> Policy:
    """Return a policy; a wrong field is one line that names the environment variable."""
    try:
        return kind(**fields)
    except (TypeError, ValueError) as error:
        raise BadInput(f"{POLICY_VARIABLE}: {error}") from None
