"""A scenario: workload, policy, engine, profile and seed, read from YAML and checked at the edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Optional, Union

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from servesim.core import BadInput, Policy, traits_of
from servesim.files.checked import complaint, path
from servesim.files.suggestions import meant
from servesim.policies import POLICIES

from .overrides import Tree
from .registry import hints_of, make_policy


class Section(BaseModel):
    """A mapping whose unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class FrontEnd(Section):
    """How an engine's HTTP side lags behind its scheduler."""

    lag: int = Field(1, ge=1, description="model calls that end before a request sent during the first one is seen")
    end_lag: bool = Field(False, description="clients see the end of a stream one model call late")
    seconds: Optional[float] = Field(
        None, ge=0, description="from sending to the scheduler, at the least; instead of the profile's"
    )


class ColdStart(Section):
    """Seconds the first calls take longer."""

    prefill: float = Field(0.0, ge=0, description="of the first prefill, seconds")
    decode: float = Field(0.0, ge=0, description="of the first decode, seconds")


class EngineConfig(Section):
    """The engine around the policy: its memory, its limits, what it pads, its front end."""

    num_blocks: int = Field(1024, gt=0, description="KV blocks on the device")
    block_size: int = Field(16, gt=0, description="tokens a block")
    host_blocks: int = Field(0, ge=0, description="KV blocks on the host, for swapping")
    max_model_len: Optional[int] = Field(None, gt=0, description="longest prompt + output")
    max_generate_length: Optional[int] = Field(
        None, gt=0, description="paged llm-serving: stop silently at this length"
    )
    prefill_gears: list[int] = Field([], description="a prompt is padded to the first of these longer than itself")
    decode_gears: list[int] = Field([], description="a decode batch is padded to the first of these that holds it")
    refuse: Literal["auto", "always", "never"] = Field("auto", description="requests that can never fit")
    front_end: FrontEnd = Field(FrontEnd(), description="how late requests and ends are seen")
    lost_after: Optional[float] = Field(None, gt=0, description="seconds after which a client's stream breaks")
    cold_start: Optional[ColdStart] = Field(None, description="instead of the profile's")

    @field_validator("prefill_gears", "decode_gears")
    @classmethod
    def _positive(cls, gears: list[int]) -> list[int]:
        if any(gear <= 0 for gear in gears):
            raise ValueError("expected positive numbers")
        return sorted(gears)


class Slo(Section):
    """What a good answer is, in milliseconds."""

    ttft: Optional[float] = Field(None, gt=0, description="to the first token, at most; milliseconds")
    tpot: Optional[float] = Field(None, gt=0, description="for each further token, at most; milliseconds")
    e2el: Optional[float] = Field(None, gt=0, description="to the last token, at most; milliseconds")

    def seconds(self) -> dict[str, float]:
        """Return the bounds that are set, in seconds."""
        return {name: value / 1e3 for name, value in self.model_dump().items() if value is not None}


class TraceFile(Section):
    """A trace on disk."""

    path: str = Field(description="the file")
    format: Optional[str] = Field(None, description="if it is not to be recognised")
    limit: Optional[int] = Field(None, gt=0, description="only the first so many requests")
    columns: Optional[dict[str, str]] = Field(None, description="which column holds a field: {prompt: tokens_in}")
    unit: Optional[Literal["s", "ms", "us", "ns"]] = Field(None, description="of its times, if not the format's own")
    sort: bool = Field(False, description="put rows in order of arrival that are not")
    window: Optional[tuple[float, float]] = Field(None, description="from which second to which")
    tokenizer: Optional[str] = Field(None, description="tokenizer.model or .json, for formats that hold text")


def checked(workload: Any) -> Any:
    """Check a workload and return it as it was written: results keep it so."""
    from servesim.traces.make.workload import workload_from

    workload_from(workload)
    return workload


class WorkloadSchema:
    """Describes a workload in the JSON schema; to build this takes long, so no run does it."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        from servesim.traces.make.workload import Workload

        return handler(TypeAdapter(Workload).core_schema)


class Scenario(Section):
    """All that a run depends on."""

    name: Optional[str] = Field(None, description="what to call it in results")
    trace: Optional[TraceFile] = Field(None, description="a file of requests, or its path alone")
    workload: Optional[Annotated[Tree, BeforeValidator(checked), WorkloadSchema()]] = Field(
        None, description="requests that are made up, instead of a trace"
    )
    policy: Tree = Field({"name": "llm-serving"}, description="name and fields; see `sim policies list`")
    engine: EngineConfig = Field(EngineConfig(), description="memory, limits, padding, front end")
    profile: Union[str, dict[str, Any]] = Field("ascend910b4-llama2-7b", description="bundled name, folder or costs")
    seed: int = Field(0, ge=0, description="of all that is drawn")
    slo: Slo = Field(Slo(), description="bounds of a good answer, in milliseconds")
    noise: bool = Field(False, description="draw step times from the profile's residuals")

    @model_validator(mode="before")
    @classmethod
    def _shorthands(cls, tree: Any) -> Any:
        if isinstance(tree, Mapping):
            tree = dict(tree)
            if isinstance(tree.get("trace"), str):
                tree["trace"] = {"path": tree["trace"]}
            if isinstance(tree.get("policy"), str):
                tree["policy"] = {"name": tree["policy"]}
            if isinstance(tree.get("policy"), Mapping):
                tree["policy"] = {"name": "llm-serving", **tree["policy"]}
        return tree

    @property
    def varies(self) -> bool:
        """Whether anything is random: a trace from a file runs the same every time."""
        return self.trace is None or self.noise

    def make_policy(self) -> Policy:
        """Return the policy object."""
        return make_policy(self.policy)

    def gears(self, policy: Policy) -> list[int]:
        """Return the decode gears; llm-serving always decodes as many rows as it has slots."""
        if self.engine.decode_gears:
            return self.engine.decode_gears
        slots = getattr(policy, "decode_batch", None)
        return [slots] if slots and traits_of(policy).running_order == "slot" else []


def scenario_from(tree: Mapping[str, Any], where: str = "scenario") -> Scenario:
    """Check a tree and return the scenario; errors are one line that names the key and what was expected."""
    try:
        scenario = Scenario.model_validate(tree)
    except ValidationError as error:
        raise BadInput(f"{where}: {first_error(error)}") from None
    if scenario.trace is not None and scenario.workload is not None:
        raise BadInput(f"{where}: expected one of trace and workload, got both")
    try:
        scenario.make_policy()
    except BadInput as bad:
        raise BadInput(f"{where}: {bad}") from None
    return scenario


def first_error(error: ValidationError) -> str:
    """Return pydantic's first complaint as one line."""
    fault = error.errors()[0]
    loc = [part for part in fault["loc"] if not str(part).startswith(("dict[", "str"))]
    key = path(loc) or "scenario"
    if fault["type"] != "extra_forbidden":
        return complaint(fault, key)
    place = [str(part) for part in loc]
    known = known_keys(place[:-1])
    return f"{key}: unknown key; known: {', '.join(known)}{meant(place[-1], known) or misplaced(place)}"


def misplaced(place: Sequence[str]) -> str:
    """Return where a key belongs that stands at the top by mistake, or what takes a file that has it."""
    if len(place) != 1:
        return ""
    if place[0] in ("base", "params", "objectives", "replications"):
        return "; this is a key of sweep files: `sim sweep FILE`"
    homes = [f"{section}.{place[0]}" for section in ("engine", "trace", "slo") if place[0] in known_keys([section])]
    homes += [f"policy.{place[0]}" for kind in POLICIES.values() if place[0] in hints_of(kind)]
    return f"; did you mean {homes[0]}?" if homes else ""


def known_keys(place: Sequence[str]) -> list[str]:
    """Return the keys of a section."""
    section: Any = Scenario
    for part in place:
        kinds = [section.model_fields[part].annotation] if part in section.model_fields else []
        kinds += list(getattr(kinds[0], "__args__", ())) if kinds else []
        section = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), section)
    return list(section.model_fields)
