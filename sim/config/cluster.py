"""The `cluster` section of a scenario: replicas, or pools of replicas that differ, behind a router."""

from __future__ import annotations

from typing import Any, Literal, Optional, Union

from pydantic import Field, field_validator, model_validator
from servesim.core import BadInput
from servesim.core.fields import check_fields, policy_fields
from servesim.core.limits import MAX_NUMBER, MAX_RANKS, MAX_SECONDS
from servesim.engine.changes import Changes, Fault, Scaling
from servesim.files.checked import Int, Keys, Number
from servesim.files.read import did_you_mean, quote, show_path
from servesim.routers import ROUTERS, Router

from .layers import Tree
from .registry import convert
from .user_code import class_line, error_text, is_user_class, load_file, names_file, user_line


class Pool(Keys):
    """Replicas that are equal. What a pool does not set is that of the scenario."""

    name: str = Field(description="name of the pool in results")
    replicas: Int = Field(1, gt=0, le=MAX_RANKS, description="number of replicas")
    profile: Optional[Union[str, Tree]] = Field(None, description="step costs of these replicas")
    policy: Optional[Union[str, Tree]] = Field(None, description="policy, or fields of it, of these replicas")
    engine: Tree = Field({}, description="keys of the engine section that differ")

    @property
    def changes(self) -> Tree:
        """What differs from the scenario, as sections of it."""
        sections = {"profile": self.profile, "policy": self.policy, "engine": self.engine or None}
        return {key: value for key, value in sections.items() if value is not None}


class FaultConfig(Keys):
    """What happens to a replica at a time."""

    at: Number = Field(ge=0, le=MAX_SECONDS, description="time in seconds")
    replica: Int = Field(ge=0, lt=MAX_RANKS, description="number of the replica, from 0, in the order of the pools")
    kind: Literal["crash", "restart", "slow"] = Field(
        "crash", description="crash: loses its requests; restart: finishes them first; slow: longer steps"
    )
    recover: Optional[Number] = Field(
        None, ge=0, le=MAX_SECONDS, description="seconds until it is as before (default: never)"
    )
    factor: Number = Field(2.0, gt=0, le=MAX_NUMBER, description="step times of a slow replica / usual ones")


class AutoscaleConfig(Keys):
    """A rule that adds a replica if many requests wait, and removes one if none waits."""

    min: Int = Field(1, gt=0, le=MAX_RANKS, description="fewest replicas, with which the run starts")
    max: Int = Field(gt=0, le=MAX_RANKS, description="most replicas")
    target_queue: Number = Field(
        4.0, ge=0, le=MAX_NUMBER, description="waiting requests per replica above which one is added"
    )
    interval: Number = Field(10.0, gt=0, le=MAX_SECONDS, description="seconds between two decisions")
    start_up: Number = Field(60.0, ge=0, le=MAX_SECONDS, description="seconds until a new replica serves")

    @model_validator(mode="after")
    def _range(self) -> AutoscaleConfig:
        if self.min > self.max:
            raise ValueError("min of at most max")
        return self


class Cluster(Keys):
    """Replicas of the server behind a router."""

    replicas: Optional[Int] = Field(None, gt=0, le=MAX_RANKS, description="number of equal replicas (default: 1)")
    pools: list[Pool] = Field([], description="pools of replicas that differ, instead of `replicas`")
    router: Tree = Field({"name": "round-robin"}, description="name and fields of the router; see `sim policies list`")
    staleness: Optional[Number] = Field(
        None, ge=0, le=MAX_SECONDS, description="seconds between two reports of replicas (default: as the real router)"
    )

    faults: list[FaultConfig] = Field([], description="crashes, restarts and slow replicas")
    retry: bool = Field(True, description="requests of a crashed replica without a token are sent again, not lost")
    detect: Number = Field(
        0.0, ge=0, le=MAX_SECONDS, description="seconds until the router notices that a replica is gone or back"
    )
    autoscale: Optional[AutoscaleConfig] = Field(None, description="adds and removes replicas, instead of `replicas`")

    @field_validator("router", mode="before")
    @classmethod
    def _named(cls, router: Any) -> Any:
        return {"name": router} if isinstance(router, str) else router

    @model_validator(mode="after")
    def _one_form(self) -> Cluster:
        if self.pools and self.replicas is not None:
            raise ValueError("one of replicas and pools")
        names = [pool.name for pool in self.pools]
        if len(set(names)) < len(names):
            raise ValueError("pools with different names")
        if self.autoscale is not None and (self.pools or self.replicas is not None):
            raise ValueError("autoscale without replicas and pools")
        for fault in self.faults:
            if fault.replica >= self.size:
                raise ValueError(f"faults of replicas 0 to {self.size - 1}, got replica {fault.replica}")
        return self

    @property
    def all_pools(self) -> list[Pool]:
        """The pools; equal replicas are one pool."""
        most = (self.replicas or 1) if self.autoscale is None else self.autoscale.max
        return self.pools or [Pool(name="replica", replicas=most)]

    @property
    def size(self) -> int:
        """The number of replicas."""
        return sum(pool.replicas for pool in self.all_pools)

    def changes(self) -> Optional[Changes]:
        """Return what changes while the fleet runs; None: nothing."""
        if not self.faults and self.autoscale is None:
            return None
        faults = [Fault(fault.at, fault.replica, fault.kind, fault.recover, fault.factor) for fault in self.faults]
        scaling = None if self.autoscale is None else Scaling(**self.autoscale.model_dump())
        return Changes(faults, self.retry, self.detect, scaling)

    def make_router(self) -> Router:
        """Return the router object."""
        return make_router(self.router, "cluster.router")


def make_router(settings: Tree, key: str) -> Router:
    """Build a router from its name and fields; check types and ranges."""
    name = settings.get("name")
    kind = router_class(name, key)
    try:
        known = policy_fields(kind)
    except Exception as error:  # an annotation may be any expression
        raise BadInput(f"{key}: {class_line(kind)}: the type of a field is not valid: {error_text(error)}") from None
    fields = {}
    for field, value in settings.items():
        if field == "name":
            continue
        if field not in known:
            hint = did_you_mean(field, known)
            raise BadInput(f"{key}.{field}: unknown key of {name}; known: {', '.join(known) or 'none'}{hint}")
        fields[field] = convert(f"{key}.{field}", value, known[field].types)
    try:
        router = kind(**fields)
        check_fields(router)
    except (Exception, SystemExit) as error:
        if not is_user_class(kind) or isinstance(error, ValueError):
            raise BadInput(f"{key}.{error}") from None
        raise BadInput(f"{key} {show_path(str(name))}: {user_line(error)}: {error_text(error)}") from None
    return router


def router_class(name: Any, key: str) -> type[Router]:
    """Return a router by its name in ROUTERS, or as FILE.py:NAME."""
    if isinstance(name, str) and name in ROUTERS:
        return ROUTERS[name]
    if not names_file(name):
        hint = did_you_mean(name, ROUTERS) if isinstance(name, str) else ""
        known = ", ".join(ROUTERS)
        raise BadInput(f"{key}.name: no router {quote(name)}; known: {known}, or path/to/file.py:Name{hint}")
    path, _, attribute = (name if ".py:" in name else f"{name}:").rpartition(":")
    module = load_file(path, name)
    kind = getattr(module, attribute, None)
    if not (isinstance(kind, type) and issubclass(kind, Router)):
        found = [
            k for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, Router) and v is not Router
        ]
        hint = f", e.g. {path}:{found[0]}" if found else f"; {path} has none"
        raise BadInput(f"{key} {show_path(name)}: expected a Router class{hint}")
    return kind
