"""The `cluster` section of a scenario: replicas, or pools of replicas that differ, behind a router."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Optional, Union

from pydantic import BeforeValidator, Field, field_validator, model_validator
from servesim.core import BadInput
from servesim.core.fields import check_fields
from servesim.core.limits import MAX_NUMBER, MAX_RANKS, MAX_SECONDS
from servesim.engine.changes import Changes, Fault, Scaling
from servesim.files.checked import ByteSize, Duration, Int, Keys, Number, reject_bool, to_whole
from servesim.files.read import did_you_mean, quote
from servesim.routers import ROUTERS, Router

from .layers import Tree
from .registry import build, class_from_file, convert_fields, is_class
from .user_code import load_file, names_file

Replicas = Annotated[int, Field(gt=0, le=MAX_RANKS), BeforeValidator(to_whole)]
Amount = Annotated[float, Field(ge=0, le=MAX_NUMBER), BeforeValidator(reject_bool)]
MIN_INTERVAL, MAX_START_UP = 0.1, 86_400.0  # seconds: more decisions than this would take long to simulate


class Transfer(Keys):
    """How KV comes from a prefill pool to a decode pool. The defaults were measured with Mooncake and 8 x CX7 RoCE."""

    latency: Duration = Field(0.00038, description="seconds of a copy beside its bytes")
    bandwidth: ByteSize = Field(146_000_000_000, description="bytes per second between two replicas, such as 25GB")
    token_bytes: Optional[ByteSize] = Field(None, description="bytes of the KV of a token (default: of the model)")
    link: Literal["none", "shared", "per_pair"] = Field(
        "none", description="copies that wait for each other: none, all (shared), those of a pair of replicas"
    )
    layerwise: bool = Field(False, description="copy each layer as soon as it is computed")
    choose: Optional[Literal["prefill_first", "decode_first"]] = Field(
        None, description="decode replica chosen after the prefill, or at arrival (default: as the engine)"
    )
    min_uncached_tokens: Optional[Int] = Field(
        None, ge=0, description="fewer uncached prompt tokens are computed by the decode replica; 0: always"
    )
    timeout: Optional[Number] = Field(
        None, gt=0, le=MAX_SECONDS, description="seconds until a side that waits gives up (default: never)"
    )
    on_timeout: Literal["fail", "recompute"] = Field(
        "fail", description="what happens to such a request, and to one whose prefill replica crashed before the copy"
    )


class AutoscaleConfig(Keys):
    """A rule that adds a replica if many requests wait, and removes one if none waits."""

    min: Replicas = Field(1, description="fewest replicas, with which the run starts")
    max: Replicas = Field(description="most replicas")
    target_queue: Amount = Field(4.0, description="waiting requests per replica above which one is added")
    interval: Number = Field(10.0, ge=MIN_INTERVAL, le=MAX_SECONDS, description="seconds between two decisions")
    start_up: Number = Field(60.0, ge=0, le=MAX_START_UP, description="seconds until a new replica serves")

    @model_validator(mode="after")
    def _range(self) -> AutoscaleConfig:
        if self.min > self.max:
            raise ValueError("min of at most max")
        return self


class Pool(Keys):
    """Replicas that are equal. What a pool does not set is that of the scenario."""

    name: str = Field(description="name of the pool in results")
    replicas: Replicas = Field(1, description="number of replicas")
    profile: Optional[Union[str, Tree]] = Field(None, description="step costs of these replicas")
    policy: Optional[Union[str, Tree]] = Field(None, description="policy, or fields of it, of these replicas")
    engine: Tree = Field({}, description="keys of the engine section that differ")
    price_per_hour: Optional[Amount] = Field(None, description="price of one of its devices (default: cluster's)")
    role: Literal["both", "prefill", "decode"] = Field("both", description="what these replicas compute")
    autoscale: Optional[AutoscaleConfig] = Field(None, description="adds and removes replicas, instead of `replicas`")

    @model_validator(mode="after")
    def _one_form(self) -> Pool:
        if self.autoscale is not None and "replicas" in self.model_fields_set:
            raise ValueError("one of replicas and autoscale")
        return self

    @property
    def size(self) -> int:
        """The number of replicas; with autoscale the most."""
        return self.replicas if self.autoscale is None else self.autoscale.max

    @property
    def changes(self) -> Tree:
        """What differs from the scenario, as sections of it."""
        sections = {"profile": self.profile, "policy": self.policy, "engine": self.engine or None}
        return {key: value for key, value in sections.items() if value is not None}


class FaultConfig(Keys):
    """What happens to a replica at a time."""

    at: Duration = Field(description="time in seconds")
    replica: Int = Field(ge=0, lt=MAX_RANKS, description="number of the replica, from 0, in the order of the pools")
    kind: Literal["crash", "restart", "slow"] = Field(
        "crash", description="crash: loses its requests; restart: finishes them first; slow: longer steps"
    )
    recover: Optional[Duration] = Field(None, description="seconds until it is as before (default: never)")
    factor: Number = Field(2.0, gt=0, le=MAX_NUMBER, description="step times of a slow replica / usual ones")


class Cluster(Keys):
    """Replicas of the server behind a router."""

    replicas: Optional[Replicas] = Field(None, description="number of equal replicas (default: 1)")
    pools: list[Pool] = Field([], description="pools of replicas that differ, instead of `replicas`")
    router: Tree = Field({"name": "round-robin"}, description="name of the router, or name and fields")
    decode_router: Tree = Field({"name": "round-robin"}, description="router of the decode pools, if there are some")
    transfer: Transfer = Field(Transfer(), description="copies of KV from prefill to decode pools")
    staleness: Optional[Duration] = Field(
        None, description="seconds between two reports of replicas (default: as the real router)"
    )
    price_per_hour: Optional[Amount] = Field(None, description="price of one device, in any currency")

    faults: list[FaultConfig] = Field([], description="crashes, restarts and slow replicas")
    retry: bool = Field(True, description="requests of a crashed replica without a token are sent again, not lost")
    detect: Duration = Field(0.0, description="seconds until others notice that a replica is gone or back")
    autoscale: Optional[AutoscaleConfig] = Field(None, description="adds and removes replicas, instead of `replicas`")

    @field_validator("router", "decode_router", mode="before")
    @classmethod
    def _named(cls, router: Any) -> Any:
        if isinstance(router, str):
            return {"name": router}
        return {"name": "round-robin", **router} if isinstance(router, dict) else router

    @model_validator(mode="after")
    def _one_form(self) -> Cluster:
        if self.pools and self.replicas is not None:
            raise ValueError("one of replicas and pools")
        names = [pool.name for pool in self.pools]
        if len(set(names)) < len(names):
            raise ValueError("pools with different names")
        roles = {pool.role for pool in self.pools}
        if roles - {"both"} and roles != {"prefill", "decode"}:
            raise ValueError("pools of role prefill and of role decode, or no roles")
        if self.autoscale is not None and (self.pools or self.replicas is not None):
            raise ValueError("autoscale without replicas and pools")
        for fault in self.faults:
            if fault.replica >= self.size:
                raise ValueError(f"faults of replicas 0 to {self.size - 1} only")
        return self

    @property
    def all_pools(self) -> list[Pool]:
        """The pools; equal replicas are one pool."""
        if self.autoscale is not None:
            return [Pool(name="replica", autoscale=self.autoscale)]
        return self.pools or [Pool(name="replica", replicas=self.replicas or 1)]

    @property
    def size(self) -> int:
        """The number of replicas."""
        return sum(pool.size for pool in self.all_pools)

    @property
    def names(self) -> list[str]:
        """The names of the replicas, POOL/NUMBER; none if there is only one, which is a server as any other."""
        names = [f"{pool.name}/{number}" for pool in self.all_pools for number in range(pool.size)]
        return names if len(names) > 1 else []

    @property
    def is_apart(self) -> bool:
        """Whether prefill and decode run on different replicas."""
        return any(pool.role == "decode" for pool in self.pools)

    @property
    def decodes(self) -> list[int]:
        """The numbers of the replicas that only decode."""
        roles = [pool.role for pool in self.all_pools for _ in range(pool.size)]
        return [number for number, role in enumerate(roles) if role == "decode"]

    def changes(self) -> Optional[Changes]:
        """Return what changes while the fleet runs; None: nothing."""
        scaling, first = [], 0
        for pool in self.all_pools:
            if pool.autoscale is not None:
                scaling.append(Scaling(range(first, first + pool.size), **pool.autoscale.model_dump()))
            first += pool.size
        faults = [Fault(fault.at, fault.replica, fault.kind, fault.recover, fault.factor) for fault in self.faults]
        return Changes(faults, self.retry, self.detect, scaling) if faults or scaling else None

    def make_router(self) -> Router:
        """Return the router object."""
        return make_router(self.router, "cluster.router")

    def make_decode_router(self) -> Router:
        """Return the router object of the decode pools."""
        return make_router(self.decode_router, "cluster.decode_router")


def make_router(settings: Tree, key: str) -> Router:
    """Build a router from its name and fields; check types and ranges."""
    name, kind = settings.get("name"), router_class(settings.get("name"), key)
    fields = {field: value for field, value in settings.items() if field != "name"}
    return build(kind, convert_fields(kind, fields, key, name), key, name, check_fields)


def router_class(name: Any, key: str) -> type[Router]:
    """Return a router by its name in ROUTERS, or as FILE.py:NAME."""
    if isinstance(name, str) and name in ROUTERS:
        return ROUTERS[name]
    if names_file(name):
        return class_from_file(name, Router, key, "choices", "route")
    hint = did_you_mean(name, ROUTERS) if isinstance(name, str) else ""
    raise BadInput(f"{key}.name: no router {quote(name)}; known: {', '.join(ROUTERS)}, or path/to/file.py:Name{hint}")


def names_router(name: Any) -> bool:
    """Whether a name is that of a router, or of a Router class in a user file, which is loaded."""
    if not names_file(name):
        return name in ROUTERS
    path, _, attribute = name.rpartition(":")
    return ".py:" in name and is_class(getattr(load_file(path, name), attribute, None), Router)
