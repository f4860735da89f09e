"""The section `speculative` of a scenario: how the server drafts tokens, and how many of them the model accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Optional, Union

from pydantic import BeforeValidator, Field, model_validator
from servesim.core import BadInput, Policy
from servesim.core.limits import MAX_DRAFTS, MAX_INT, is_number
from servesim.files.checked import Duration, Int, Keys, Number, error_at, expected_error

from .registry import SPECULATIVE, fields_of, make_policy, policy_class


def check_acceptance(value: Any) -> Any:
    """Raise an error for a value that is no rate, no list of rates and not `column`."""
    rates = value if isinstance(value, (list, tuple)) and value else [value]
    is_valid = all(is_number(rate, 0, 1) for rate in rates) and sorted(rates, reverse=True) == [*rates]
    if value is not None and value != "column" and not is_valid:
        raise expected_error("a rate from 0 to 1, a list of such rates that do not grow, or column")
    return value


class Speculative(Keys):
    """Speculative decoding: drafted tokens, and how many of them the model accepts."""

    method: Literal["ngram", "eagle", "eagle3", "mtp", "draft_model"] = Field(
        "eagle", description="what drafts tokens; n-gram drafts turn asynchronous scheduling off, as in vLLM"
    )
    tokens: Int = Field(ge=0, le=MAX_DRAFTS, description="drafts of a request per step; 0: no speculative decoding")
    acceptance: Annotated[
        Optional[Union[float, list[float], Literal["column"]]], BeforeValidator(check_acceptance)
    ] = Field(
        None,
        description="rate at which a draft is accepted if those before it are; or a list: rate at which all drafts up "
        "to each position are, as vLLM publishes them; or column: a rate per request, from that column of the trace",
    )  # fmt: skip
    modules: Int = Field(1, ge=1, le=MAX_INT, description="modules of mtp")
    proposals: Number = Field(1.0, ge=0, le=1, description="fraction of the steps in which ngram finds drafts")
    drafting: Optional[Duration] = Field(
        None, description="seconds per step that drafting takes (default: the profile's)"
    )
    model: Optional[str] = Field(None, description="name of the draft model, for its drafting time")

    @model_validator(mode="after")
    def _fits(self) -> Speculative:
        given = self.acceptance
        if self.tokens and (given is None or (isinstance(given, list) and len(given) < self.tokens)):
            many = "a rate" if given is None else f"a rate for each of {self.tokens} tokens"
            raise error_at("acceptance", expected_error(many), given)
        for key, method, unset in (("proposals", "ngram", 1), ("modules", "mtp", 1), ("model", "draft_model", None)):
            if getattr(self, key) != unset and self.method != method:
                raise error_at(key, expected_error(f"nothing unless method is {method}"), getattr(self, key))
        return self


def fields_that_draft(policy: Mapping[str, Any], section: Optional[Speculative]) -> Mapping[str, Any]:
    """Return the fields of a policy with those that the section sets; None: no speculative decoding."""
    for name, key in SPECULATIVE.items():
        if name in policy:
            raise BadInput(f"policy.{name}: expected speculative.{key}, which sets it")
    if section is None:
        return policy
    known = fields_of(policy_class(policy["name"]))
    if not known.keys() >= SPECULATIVE.keys() and "flags" not in known:  # an engine checks its flags itself
        raise BadInput(f"speculative: expected a policy with speculative decoding (vllm-v1), got {policy['name']}")
    overlaps = {"async_scheduling": False} if section.method == "ngram" and "async_scheduling" in known else {}
    return {**overlaps, **policy, **{name: getattr(section, key) for name, key in SPECULATIVE.items()}}


def policy_that_drafts(policy: Mapping[str, Any], section: Optional[Speculative]) -> Policy:
    """Return the policy of a scenario, with the fields that the section sets."""
    fields = fields_that_draft(policy, section)
    try:
        return make_policy(fields)
    except BadInput as bad:
        raise BadInput(str(bad).replace("policy.num_speculative_tokens", "speculative.tokens")) from None


def require_known_groups(section: Optional[Speculative], groups: Optional[Sequence[Optional[int]]]) -> None:
    """Raise BadInput for drafts whose cached blocks are not known with these KV cache groups."""
    if section is not None and section.method == "mtp" and groups is not None and len(groups) > 1:
        raise BadInput(
            f"speculative.method: expected another method than mtp with the KV cache groups {groups}: vLLM then drops "
            "cached blocks of one group only, which is not modelled"
        )
