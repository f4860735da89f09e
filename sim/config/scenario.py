"""Scenarios: workload, policy, engine, profile and seed, as pydantic models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Optional, Union

from pydantic import (
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    TypeAdapter,
    field_validator,
    model_validator,
)
from servesim.core import BadInput, Policy
from servesim.core.fields import policy_fields
from servesim.core.limits import MAX_BLOCK_SIZE, MAX_INT, MAX_RATE, MAX_SECONDS, MAX_SEED, MIN_RATE
from servesim.costs.named_profile import is_named
from servesim.engine.rules import rules_of
from servesim.files.checked import ByteSize, Duration, Int, Keys, Number, PositiveInt, reject_bool, validate
from servesim.files.read import did_you_mean
from servesim.policies import POLICIES

from .cluster import Cluster, Pool, Replicas
from .layers import Tree, as_section, merge
from .memory import DeviceMemory, ModelKey, about_profile, blocks_of, groups_of_model, host_copy_times
from .registry import ENGINE
from .speculative import Speculative, policy_that_drafts, require_known_groups
from .stages import STAGES, require_known_stages, with_stages
from .user_code import code_access, names_file

Milliseconds = Annotated[float, Field(gt=0, le=1e3 * MAX_SECONDS), BeforeValidator(reject_bool)]
CLIENT_DELAY_S = 3e-4  # measured: 0.06 ms with one, 0.28 ms with eight open streams; the rest is the front end


class FrontEnd(Keys):
    """Delay between the HTTP side of an engine and its scheduler."""

    lag: Int = Field(1, ge=1, le=MAX_INT, description="model calls until the scheduler sees a new request; 1 = no lag")
    end_lag: bool = Field(False, description="clients see the end of a stream one model call later")
    seconds: Optional[Duration] = Field(
        None, description="minimum seconds from sending to the scheduler (default: the profile's)"
    )
    per_request: Optional[Duration] = Field(
        None, description="seconds per request, one after the other (default: the profile's)"
    )
    per_token: Optional[Duration] = Field(
        None, description="seconds per prompt token, in addition (default: the profile's)"
    )


class ColdStart(Keys):
    """Extra seconds of the first model calls."""

    prefill: Duration = Field(0.0, description="extra seconds of the first prefill")
    decode: Duration = Field(0.0, description="extra seconds of the first decode")


class HostCache(Keys):
    """Host memory for blocks that leave the prefix cache on the device."""

    blocks: PositiveInt = Field(description="KV blocks in host memory")
    bandwidth: ByteSize = Field(description="bytes per second that are copied to the device, e.g. 25GB")
    latency: Duration = Field(0.0, description="seconds that a step with copies takes in addition")


class EngineConfig(Keys):
    """The engine: KV blocks, limits, padding and front end."""

    num_blocks: PositiveInt = Field(1024, description="KV blocks on the device")
    device_memory: Optional[DeviceMemory] = Field(
        None, description="memory of the device, its name or a size such as 80GB: computes num_blocks, as vLLM does"
    )
    gpu_memory_utilization: Optional[Number] = Field(
        None, gt=0, le=1, description="fraction of device_memory that the engine uses (default: 0.9)"
    )
    model: Optional[ModelKey] = Field(
        None, description="model for device_memory and host_cache: a name, or its sizes (default: the profile's model)"
    )
    reserve: Optional[ByteSize] = Field(
        None, description="memory for activations and buffers, with device_memory (default: 1.5GiB)"
    )
    block_size: Int = Field(16, gt=0, le=MAX_BLOCK_SIZE, description="tokens per KV block (default: 16; 1 for sglang)")
    kv_cache_groups: Optional[list[Optional[Int]]] = Field(
        None,
        min_length=1,
        description="windows of the KV cache groups in tokens, null for full attention: [128, null] (default: the "
        "profile's model)",
    )
    host_blocks: Int = Field(0, ge=0, le=MAX_INT, description="KV blocks in host memory, for swapping")
    host_cache: Optional[HostCache] = Field(
        None, description="host memory for evicted blocks of the prefix cache (default: none)"
    )
    max_model_len: Optional[PositiveInt] = Field(None, description="maximum tokens of prompt + output")
    max_generate_length: Optional[PositiveInt] = Field(
        None, description="paged llm-serving stops a request at this many tokens, without an error"
    )
    data_parallel_size: Replicas = Field(
        1,
        description="ranks in lock step, each with these blocks; sessions, and requests without one, take them in turn",
    )
    prefill_buckets: list[Int] = Field(
        [], description="padded prompt lengths: a prompt is padded to the next larger one (llm-serving: gears)"
    )
    decode_buckets: list[Int] = Field(
        [], description="padded decode batch sizes: a batch is padded to the next size that holds it"
    )
    reject_oversized: Literal["auto", "always", "never"] = Field(
        "auto", description="reject requests that can never fit: always, never, or as the policy's engine does (auto)"
    )
    front_end: FrontEnd = Field(FrontEnd(), description="front-end lag")
    empty_step: Optional[Duration] = Field(
        None, description="seconds of a step that runs no model (default: 0.001 for vllm-v1 and mindie, else 0)"
    )
    client_delay: Duration = Field(
        CLIENT_DELAY_S,
        description="seconds that a client needs after an answer before it sends the request that follows",
    )
    client_timeout: Optional[Number] = Field(
        None, gt=0, le=MAX_SECONDS, description="seconds after which a client gives up; most engines abort its request"
    )
    start: Optional[Literal["cold", "warm"]] = Field(
        None,
        description="cold: first calls take longer, as the profile says; warm: they do not (default: the profile's)",
    )
    cold_start: Optional[ColdStart] = Field(
        None, description="extra seconds of the first calls of a cold start (default: the profile's)"
    )

    sampling: Optional[Literal["host", "device", "top_p", "ops", "mint"]] = Field(
        None, description="how a step selects its next tokens, with the time of the profile (default: as it was probed)"
    )

    @model_validator(mode="after")
    def _one_start(self) -> EngineConfig:
        if self.start == "warm" and self.cold_start is not None:
            raise ValueError("no cold_start with start: warm")
        return self

    @field_validator("prefill_buckets", "decode_buckets")
    @classmethod
    def _positive(cls, sizes: list[int]) -> list[int]:
        if any(not 0 < size <= MAX_INT for size in sizes):
            raise ValueError(f"positive numbers up to {MAX_INT}")
        return sorted(sizes)

    @field_validator("kv_cache_groups")
    @classmethod
    def _windows(cls, windows: Optional[list[Optional[int]]]) -> Optional[list[Optional[int]]]:
        if any(window is not None and not 0 < window <= MAX_INT for window in windows or ()):
            raise ValueError(f"windows from 1 to {MAX_INT} tokens, or null")
        return windows


class Slo(Keys):
    """SLO: latency bounds of a good response, in milliseconds."""

    ttft: Optional[Milliseconds] = Field(None, description="maximum time to first token, milliseconds")
    tpot: Optional[Milliseconds] = Field(None, description="maximum mean time per further token, milliseconds")
    e2el: Optional[Milliseconds] = Field(None, description="maximum time to the last token, milliseconds")

    def seconds(self) -> dict[str, float]:
        """Return the bounds that are set, in seconds."""
        return {name: value / 1e3 for name, value in self.model_dump().items() if value is not None}


class TraceFile(Keys):
    """A trace file."""

    path: str = Field(description="trace file")
    format: Optional[str] = Field(None, description="trace format (default: detected from the content)")
    limit: Optional[PositiveInt] = Field(None, description="use only the first N requests")
    columns: Optional[dict[str, str]] = Field(None, description="column names of fields, e.g. {prompt: tokens_in}")
    unit: Optional[Literal["s", "ms", "us", "ns"]] = Field(
        None, description="unit of the times (default: the format's own)"
    )
    sort: bool = Field(False, description="sort rows by arrival time")
    window: Optional[tuple[Number, Number]] = Field(None, description="keep arrivals in [start, end), seconds")
    rate: Optional[Number] = Field(
        None, ge=MIN_RATE, le=MAX_RATE, description="scale the arrival times to this mean rate, requests per second"
    )
    repeat: PositiveInt = Field(
        1, description="number of copies of the trace, one after the other; prompts of copies differ"
    )
    tokenizer: Optional[str] = Field(None, description="tokenizer.model or .json, for formats that hold text")
    conversations: bool = Field(False, description="the prompts of a session contain its earlier turns and answers")


def check_workload(workload: Any) -> Any:
    """Check a workload and return it unchanged: results store it as written."""
    from servesim.traces.make.workload import workload_from

    workload_from(workload)
    return workload


class WorkloadSchema:
    """The JSON schema of a workload. Building it is slow, so it is built on demand."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        from servesim.traces.make.workload import Workload

        return handler(TypeAdapter(Workload).core_schema)


class Scenario(Keys):
    """All inputs of a run."""

    name: Optional[str] = Field(None, description="name of the scenario in results")
    trace: Optional[TraceFile] = Field(None, description="trace file: its path, or the keys below")
    workload: Optional[Annotated[Tree, BeforeValidator(check_workload), WorkloadSchema()]] = Field(
        None, description="synthetic workload, instead of a trace"
    )
    policy: Tree = Field({"name": "llm-serving"}, description="name and fields of the policy; see `sim policies list`")
    engine: EngineConfig = Field(EngineConfig(), description="KV blocks, limits, padding, front end")
    profile: Union[str, dict[str, Any]] = Field(
        "ascend910b4-llama2-7b",
        description="step costs: bundled profile, profile folder, {model, device, ...} by name, or a cost mapping",
    )
    speculative: Optional[Speculative] = Field(None, description="speculative decoding (default: none)")
    cluster: Optional[Cluster] = Field(None, description="replicas and their router (default: one server)")
    server_config: Optional[str] = Field(
        None, description="MindIE's config.json or llm-serving's YAML: policy and engine of the real server"
    )
    proof: Optional[str] = Field(None, description="stored result of `sim policies prove`, which reports show")
    seed: Int = Field(0, ge=0, le=MAX_SEED, description="random seed of the run")
    slo: Slo = Field(Slo(), description="SLO: latency bounds of a good response, milliseconds")
    noise: bool = Field(False, description="add random noise to step times, from the residuals of the profile")

    @model_validator(mode="before")
    @classmethod
    def _shorthands(cls, tree: Any) -> Any:
        if isinstance(tree, Mapping):
            tree = {key: as_section(key, value) for key, value in tree.items()}
            if isinstance(tree.get("policy"), Mapping):
                tree["policy"] = {"name": "llm-serving", **tree["policy"]}
        return tree

    @classmethod
    def suggest(cls, key: str, known: Sequence[str]) -> str:
        """Return the section of a key that is at the top level by mistake, or the command that reads such a file."""
        if key in ("base", "params", "objectives", "replications"):
            return "; this is a key of sweep files: `sim sweep FILE`"
        sections: dict[str, type[Keys]] = {
            "engine": EngineConfig, "trace": TraceFile, "slo": Slo, "cluster": Cluster, "speculative": Speculative,
        }  # fmt: skip
        matches = [f"{name}.{key}" for name, section in sections.items() if key in section.model_fields]
        matches += [f"policy.{key}" for kind in POLICIES.values() if key in policy_fields(kind)]
        return did_you_mean(key, known) or (f"; did you mean {matches[0]}?" if matches else "")

    @property
    def varies(self) -> bool:
        """Whether the run depends on the seed; a trace from a file without noise does not."""
        return self.trace is None or self.noise or self.drafts is not None

    @property
    def drafts(self) -> Optional[Speculative]:
        """The section of speculative decoding; None: it is off."""
        return self.speculative if self.speculative is not None and self.speculative.tokens else None

    def make_policy(self) -> Policy:
        """Return the policy object."""
        return policy_that_drafts(self.policy, self.drafts)

    @property
    def policy_is_loadable(self) -> bool:
        """Whether this command may load the policy: a built-in one, or a file or an engine if it may run code now."""
        return code_access() is not None or not (names_file(self.policy["name"]) or self.policy["name"] == ENGINE)

    @property
    def fleet(self) -> Optional[Cluster]:
        """The servers and their router: a cluster, or the ranks in lock step of one server. None: one server."""
        cluster, ranks = self.cluster, self.engine.data_parallel_size
        if ranks == 1:
            return cluster
        return (cluster or Cluster(router={"name": "ranks in turn"})).model_copy(update={"replicas": ranks})

    def decode_buckets(self, policy: Policy) -> list[int]:
        """Return the padded decode batch sizes; llm-serving always decodes all of its slots."""
        if self.engine.decode_buckets:
            return self.engine.decode_buckets
        slots = getattr(policy, "decode_batch", None)
        return [slots] if slots and rules_of(policy).running_order == "slot" else []


def scenario_from(tree: Mapping[str, Any], where: str = "scenario") -> Scenario:
    """Check a tree and return the scenario; an error is one line with the key and the expected value."""
    scenario = validate(Scenario, tree, where)
    if scenario.trace is not None and scenario.workload is not None:
        raise BadInput(f"{where}: expected one of trace and workload, got both")
    try:
        if scenario.policy_is_loadable:
            policy_tree, profile = with_stages(scenario.policy, scenario.profile, scenario.engine.device_memory)
            if profile is not scenario.profile or policy_tree is not scenario.policy:
                scenario = scenario.model_copy(update={"policy": policy_tree, "profile": profile})
            policy = scenario.make_policy()
            scenario = with_groups(with_block_size(scenario, rules_of(policy).block_size), policy)
            require_known_groups(scenario.drafts, scenario.engine.kv_cache_groups)
            require_known_stages(rules_of(policy).stages, scenario.engine)
            if scenario.engine.host_cache is not None:
                check_host_cache(scenario, policy)
            if scenario.engine.data_parallel_size > 1 and rules_of(policy).steps_in_flight > 1:
                raise BadInput("engine.data_parallel_size: expected 1, or a policy with async_scheduling: false")
        scenario = with_blocks(scenario)
        if scenario.cluster is not None:
            check_cluster(scenario, scenario.cluster)
        return scenario
    except BadInput as bad:
        raise BadInput(f"{where}: {bad}") from None


def check_cluster(scenario: Scenario, cluster: Cluster) -> None:
    """Raise BadInput if the router or a pool is not valid."""
    for router, make in ((cluster.router, cluster.make_router), (cluster.decode_router, cluster.make_decode_router)):
        if code_access() is not None or not names_file(router["name"]):
            make()
    is_one = cluster.replicas is None and not cluster.pools and cluster.changes() is None
    for pool in cluster.all_pools:
        server = scenario_of_pool(scenario, pool)
        engine = server.engine
        if engine.data_parallel_size > 1 and not is_one:
            raise BadInput("engine.data_parallel_size: expected 1 in a cluster with replicas: these are the ranks")
        if cluster.is_apart and server.policy.get(STAGES, 1) != 1:
            raise BadInput(f"policy.{STAGES}: expected 1 with pools of role prefill and decode")
        if cluster.is_apart and engine.kv_cache_groups not in (None, [None]):
            raise BadInput("engine.kv_cache_groups: expected [null], one group, with pools of role prefill and decode")


def scenario_of_pool(scenario: Scenario, pool: Pool) -> Scenario:
    """Return the scenario of one server of a pool."""
    if not pool.changes:
        return scenario.model_copy(update={"cluster": None})
    tree = scenario.model_dump(exclude_unset=True, exclude={"cluster"})
    return scenario_from(merge(tree, pool.changes), f"cluster.pools: {pool.name}")


def with_block_size(scenario: Scenario, size: int) -> Scenario:
    """Return the scenario with the block size of the policy's engine, if it sets none; the default memory is equal."""
    engine = scenario.engine
    if "block_size" in engine.model_fields_set or engine.block_size == size:
        return scenario
    given = "num_blocks" in engine.model_fields_set
    blocks = engine.num_blocks if given else engine.num_blocks * engine.block_size // size
    changed = engine.model_copy(update={"block_size": size, "num_blocks": blocks})
    if not given:
        changed.model_fields_set.discard("num_blocks")  # still a default
    return scenario.model_copy(update={"engine": changed})


def with_groups(scenario: Scenario, policy: Policy) -> Scenario:
    """Return the scenario with the KV cache groups of its model, if the policy has them and the scenario does not."""
    engine, has_groups = scenario.engine, rules_of(policy).may_have_cache_groups
    if engine.kv_cache_groups is None:
        groups = groups_of_model(engine, scenario.profile) if has_groups and engine.host_cache is None else None
        if groups is None:
            return scenario
        engine = engine.model_copy(update={"kv_cache_groups": groups})
        engine.model_fields_set.discard("kv_cache_groups")  # still a default
        return scenario.model_copy(update={"engine": engine})
    if not has_groups or engine.host_cache is not None:
        found = f"policy {scenario.policy['name']} has one group" if not has_groups else "host_cache too"
        raise BadInput(f"engine.kv_cache_groups: expected vllm-v1 without host_cache, {found}")
    return scenario


def check_host_cache(scenario: Scenario, policy: Policy) -> None:
    """Raise BadInput if the policy has no prefix cache with a host tier, or the size of a block is not known."""
    if not rules_of(policy).may_have_host_cache:
        name = scenario.policy["name"]
        raise BadInput(
            f"engine.host_cache: expected vllm-v1 with enable_prefix_caching: true, policy {name} has no such cache"
        )
    host_copy_times(scenario.engine, scenario.profile)


def with_blocks(scenario: Scenario) -> Scenario:
    """Return the scenario with the number of KV blocks that fits into `engine.device_memory`.

    With a profile by name, it is by default the memory of that device.
    """
    engine = scenario.engine
    if is_named(scenario.profile) and engine.device_memory is None and "num_blocks" not in engine.model_fields_set:
        engine = engine.model_copy(update={"device_memory": about_profile(scenario.profile).get("device_memory")})
    if engine.device_memory is None:
        check_memory_keys(engine)
        return scenario
    blocks = blocks_of(engine, scenario.profile)
    return scenario.model_copy(update={"engine": engine.model_copy(update={"num_blocks": blocks})})


def check_memory_keys(engine: EngineConfig) -> None:
    """Raise BadInput for a key that has no effect, because the memory of the device is not known."""
    for name in ("gpu_memory_utilization", "model", "reserve"):
        if getattr(engine, name) is not None and not (name == "model" and engine.host_cache):
            raise BadInput(f"engine: {name} has no effect without device_memory")
