"""Names of servesim 0.1 that scripts and user policies may still use. Documents use the new names only."""

from __future__ import annotations

from typing import Any

from .native import keep_compiled_fields, mypyc_attr

# Methods and properties of a policy: the old name and the new one.
POLICY_METHODS = {
    "begin": "initial_state",
    "leap": "advance_state",
    "rank": "sort_key",
    "ranked": "is_sorted",
    "paged": "uses_block_pool",
}
# Class attributes by which a policy set its traits.
TRAITS = {
    "mirrors": "engine",
    "proof": "validated_against",
    "running_order": "running_order",
    "null_blocks": "reserved_blocks",
    "refuses": "rejects_oversized",
    "flushes": "frees_blocks_late",
    "last_token_decodes": "last_token_decodes",
}
PLAN_FIELDS = {
    "evict": "preempt",
    "waiting": "reorder_waiting",
    "fetch": "prefetch",
    "running": "reorder_running",
    "padding": "padding_rows",
    "wake": "wake_at",
    "spare": "keep_free",
    "lasts": "hold_past_finish",
    "memory": "state",
}
REQUEST_FIELDS = {"prefix": "prefix_hashes", "after": "follows", "delay": "think_time", "fails": "fails_at_token"}


def new_names(fields: dict[str, Any], names: dict[str, str], owner: str) -> dict[str, Any]:
    """Return keyword arguments with new names; raise the usual TypeError for an unknown one."""
    for name in fields:
        if name not in names:
            raise TypeError(f"{owner} got an unexpected keyword argument {name!r}")
    return {names[name]: value for name, value in fields.items()}


@mypyc_attr(allow_interpreted_subclasses=True)
class OldPolicyNames:
    """Lets a subclass of Policy override a method by its old name, and call either name."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        keep_compiled_fields(cls)
        for old, new in POLICY_METHODS.items():
            for name, other in ((old, new), (new, old)):
                if name in vars(cls) and other not in vars(cls):
                    setattr(cls, other, vars(cls)[name])

    def but(self: Any, **changes: Any) -> Any:
        return self.replace(**changes)


class OldRequestNames:
    """Old attributes of a request."""

    __slots__ = ()

    @property
    def after(self: Any) -> Any:
        return self.follows

    @property
    def delay(self: Any) -> Any:
        return self.think_time

    @property
    def fails(self: Any) -> Any:
        return self.fails_at_token

    @property
    def prefix(self: Any) -> Any:
        return self.prefix_hashes


class OldViewNames:
    """Old attributes of a view."""

    __slots__ = ()

    @property
    def memory(self: Any) -> Any:
        return self.state

    @property
    def need(self: Any) -> Any:
        return self.decode_block_need


class OldPoolNames:
    """Old attributes of a block pool."""

    __slots__ = ()

    @property
    def size(self: Any) -> Any:
        return self.block_size

    def blocks(self: Any, tokens: int) -> Any:
        return self.blocks_for(tokens)


class OldPlanNames:
    """Old attributes of a plan."""

    __slots__ = ()

    @property
    def evict(self: Any) -> Any:
        return self.preempt

    @property
    def waiting(self: Any) -> Any:
        return self.reorder_waiting

    @property
    def fetch(self: Any) -> Any:
        return self.prefetch

    @property
    def running(self: Any) -> Any:
        return self.reorder_running

    @property
    def padding(self: Any) -> Any:
        return self.padding_rows

    @property
    def wake(self: Any) -> Any:
        return self.wake_at

    @property
    def spare(self: Any) -> Any:
        return self.keep_free

    @property
    def lasts(self: Any) -> Any:
        return self.hold_past_finish

    @property
    def memory(self: Any) -> Any:
        return self.state
