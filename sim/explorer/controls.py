"""The controls of the page, from the schema of the scenario and the fields of its policy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Optional

from pydantic import BaseModel
from servesim.config.cluster import router_class
from servesim.config.families import tunings
from servesim.config.first_scenario import flow
from servesim.config.layers import Tree, as_section, value_at
from servesim.config.memory import about_profile
from servesim.config.registry import own_fields_first, policy_class, preset, presets
from servesim.config.scenario import Scenario, TraceFile
from servesim.config.user_code import use_access
from servesim.core import AtLeast, BadInput, Policy
from servesim.core.fields import PolicyField, policy_fields
from servesim.core.limits import is_number
from servesim.costs.device_profile import bundled_profiles
from servesim.costs.model_arithmetic import model_of
from servesim.costs.named_profile import MEASURED, NAMES, NamedProfile, is_named
from servesim.costs.public_devices import DEVICES, device_of
from servesim.costs.public_models import PUBLIC_MODELS
from servesim.policies import POLICIES
from servesim.routers import ROUTERS
from servesim.runs.request_rate import RATE_KEYS
from servesim.traces.make.workload import workload_model

from .named_code import ROUTER, scenario_policy
from .state import DEVICE, PREFIX_TOKENS, WORKLOADS, Choice, Origin, block_defaults

BLOCKS = "engine.num_blocks"
SHOWN_FIELDS = 6  # of a policy; further ones show by search, or if the scenario sets them
MODEL, REPLICAS = "profile.model", "cluster.replicas"
DRAFTS, ACCEPTANCE = "speculative.tokens", "speculative.acceptance"
SHOWN = ("trace.path", PREFIX_TOKENS, "policy.enable_prefix_caching", "policy.disable_radix_cache", MODEL, DEVICE,
         REPLICAS, ROUTER, "engine.block_size", "engine.max_model_len", "slo.ttft", "slo.tpot", "slo.e2el")  # fmt: skip
GROUPS = {
    "workload": "requests", "trace": "requests", "policy": "policy", "engine": "KV blocks and engine",
    "slo": "SLO (milliseconds)", "cluster": "replicas", "profile": "server", "server": "server", "start": "server",
    "speculative": "speculative decoding",
}  # fmt: skip
LABELS = {
    "server": "engine", "start": "preset or file", MODEL: "model", DEVICE: "device", PREFIX_TOKENS: "system prompt",
    **dict.fromkeys(RATE_KEYS, "request rate"),
}  # fmt: skip
PROMPTS = (0, 128, 256, 512, 1000, 1500, 2000, 4000, 8000)  # tokens of a system prompt
DRAFT_COUNTS = (0, 1, 2, 3, 4, 5, 6, 7, 8)
REPLICA_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
HALF_STEPS = (1, 1.5, 2, 3, 4, 6, 8)  # of a slider, per factor of 8
WHOLE_CHOICES = ("server", MODEL, DEVICE, "start", "policy", "workload", ROUTER)  # each changes several settings
KINDS = {"boolean": "switch", "integer": "number", "number": "number"}


@dataclass
class Control:
    """A control: `text` is its value as in `--set`; `ticks` are the values of its slider."""

    key: str
    kind: str  # number | choice | switch | text | combo (a text with suggestions)
    help: str = ""
    text: str = ""
    default: str = ""  # shown while the text is empty
    choices: Sequence[str] = ()
    ticks: Sequence[float] = ()
    rare: bool = False
    range: Optional[AtLeast] = None  # of a number; all ticks are in it

    def as_json(self) -> dict[str, Any]:
        section, _, rest = self.key.partition(".")
        label = LABELS.get(self.key) or rest or section
        group = "server" if self.key == "policy" else GROUPS.get(section, "run")
        shown = {name: value for name, value in asdict(self).items() if name != "range"}
        return {**shown, "label": label, "group": group}


def controls_of(origin: Origin, choice: Choice) -> list[Control]:
    """Return all controls of a scenario."""
    tree, base = origin.tree(choice), origin.base(choice)
    if scenario_policy(base) != scenario_policy(tree):
        base = {key: value for key, value in base.items() if key != "policy"}
    found = [*profile_controls(origin, choice, tree), *main_choices(origin, choice, tree), *request_controls(tree)]
    with use_access(origin.access):
        found += policy_controls(scenario_policy(tree))
        found += [*draft_controls(tree), *cluster_controls(tree)]
        sizes = block_defaults(tree)
    found += section_controls(
        Scenario, tree, names=("engine", "slo", "seed", "noise", "name", "server_config", "proof")
    )
    for control in found:
        control.default = sizes.get(control.key, control.default)
        value, start = value_at(tree, control.key), value_at(base, control.key)
        if control.key not in WHOLE_CHOICES and not (control.key == "profile" and is_named(value)):
            control.text = "" if value is None else flow(value)
        set_range(control, start if start is not None else value)
        control.rare = control.rare and (value is None or isinstance(value, Mapping)) and control.key not in SHOWN
        if control.key == BLOCKS:
            from_memory = value_at(tree, "engine.device_memory") or is_named(tree.get("profile"))
            control.rare, control.default = bool(from_memory), "from the memory" if from_memory else control.default
    return found


def profile_controls(origin: Origin, choice: Choice, tree: Tree) -> list[Control]:
    """Return the engine, and the model and the device on which it runs."""
    profile, known = tree.get("profile"), tunings()
    policies = {str(preset(tuning.preset)["policy"]["name"]): name for name, tuning in known.items()}
    server = policies.get(str(scenario_policy(tree)), str(scenario_policy(tree)))
    engines = [*known, *([] if server in known else [server])]
    names = [*NAMES, *(["front_end"] if is_named(profile) else [])]
    found = section_controls(NamedProfile, as_mapping(profile), "profile.", names)
    measured = origin.base(choice, {key: text for key, text in choice.settings.items() if key not in (MODEL, DEVICE)})
    defaults: dict[str, str] = {}
    with suppress(BadInput):  # reported at its control
        about = about_profile(measured.get("profile", Scenario.model_fields["profile"].default))
        model, device = model_of(about), device_of(about)
        defaults |= {MODEL: model.name} if model else {}
        defaults |= {DEVICE: device.shown} if device else {}
    for control in found:
        if control.key in (MODEL, DEVICE):
            control.kind, control.text = "choice", choice.settings.get(control.key, "")
            public = [*PUBLIC_MODELS] if control.key == MODEL else [*DEVICES]
            control.choices = ["", *dict.fromkeys([*public, *filter(None, [control.text])])]
            control.default = defaults.get(control.key, "that")
            control.help = f"step times are derived for this {LABELS[control.key]}"
    about_choice = "a choice starts its newest version with its defaults"
    return [Control("server", "choice", about_choice, server, choices=engines), *found]


def main_choices(origin: Origin, choice: Choice, tree: Tree) -> list[Control]:
    """Return the choices that replace a whole section: profile, start, policy, workload."""
    own = [origin.own_policy] if origin.own_policy and origin.own_policy not in POLICIES else []
    starts = ([""] if origin.file else []) + list(presets())
    form = "trace" if tree.get("trace") is not None else "as it is"
    profile = tree.get("profile", Scenario.model_fields["profile"].default)
    stored = profile.get("measured", MEASURED) if is_named(profile) else profile if isinstance(profile, str) else None
    known = list(dict.fromkeys([*bundled_profiles(), *([stored] if stored else [])]))
    about = "scenario file or preset; requests, profile and memory stay"
    return [
        Control("profile", "combo", "measured step times: a bundled profile, or a profile folder",
                text=str(stored or ""), choices=known, default=flow(profile)),
        Control("start", "choice", about, choice.start, choices=starts),
        Control("policy", "choice", "scheduling policy", str(scenario_policy(tree)), choices=[*POLICIES, *own]),
        Control("workload", "choice", "kind of requests; `trace` reads a file", form,
                choices=["as it is", *WORKLOADS, "trace"]),
    ]  # fmt: skip


def request_controls(tree: Tree) -> list[Control]:
    """Return the controls of the trace or the workload."""
    trace, workload = tree.get("trace"), tree.get("workload")
    if trace is None and workload is None:
        return []
    if trace is not None:
        return section_controls(TraceFile, as_mapping(as_section("trace", trace)), "trace.")
    try:
        found = section_controls(workload_model(workload), as_mapping(workload), "workload.")
    except BadInput:
        return []
    for control in found:
        if control.key == PREFIX_TOKENS:
            control.kind, control.ticks, control.default = "number", PROMPTS, "0"
            control.help = "tokens that all prompts begin with, before their own; a prefix cache computes them once"
    first = (*RATE_KEYS, PREFIX_TOKENS)
    return sorted(found, key=lambda control: first.index(control.key) if control.key in first else len(first))


def as_mapping(section: Any) -> Mapping[str, Any]:
    """Return a section; a wrong one has no values."""
    return section if isinstance(section, Mapping) else {}


def policy_controls(name: Any) -> list[Control]:
    """Return the fields of a policy; those that every policy has are rare."""
    try:
        known = own_fields_first(policy_class(name))
    except BadInput:
        return []
    found = [field_control("policy", field) for field in known]
    for place, (control, field) in enumerate(zip(found, known)):
        control.rare = place >= SHOWN_FIELDS or field.name in policy_fields(Policy)
    return found


def field_control(prefix: str, field: PolicyField) -> Control:
    """Return the control of a field of a policy or a router."""
    control = Control(f"{prefix}.{field.name}", "text", field.help, default=flow(field.default), range=field.range)
    if bool in field.types:
        control.kind = "switch"
    elif field.choices:
        control.kind, control.choices = "choice", [flow(choice) for choice in field.choices]
    elif {int, float} & set(field.types):
        control.kind = "number"
    return control


def cluster_controls(tree: Tree) -> list[Control]:
    """Return the number of replicas, their router and its fields, and the other keys of a cluster."""
    found = section_controls(Scenario, tree, names=("cluster",))
    router = value_at(tree, f"{ROUTER}.name") or next(iter(ROUTERS))
    fields: list[Control] = []
    for control in found:
        if control.key == REPLICAS:
            control.ticks, control.default = REPLICA_COUNTS, "1"
        elif control.key == ROUTER:
            control.kind, control.text = "choice", str(router)
            control.choices, control.help = [*dict.fromkeys([*ROUTERS, control.text])], "rule that chooses the replica"
            with suppress(BadInput):  # reported at its control
                fields = [field_control(ROUTER, one) for one in policy_fields(router_class(router, ROUTER)).values()]
    for control in fields:
        control.rare = True
    has_pools = bool(value_at(tree, "cluster.pools"))  # instead of a number of replicas
    return [*(control for control in found if not (has_pools and control.key == REPLICAS)), *fields]


def draft_controls(tree: Tree) -> list[Control]:
    """Return the keys of speculative decoding; a rate has a slider. Without the section, they show by search only."""
    found, has_section = section_controls(Scenario, tree, names=("speculative",)), bool(tree.get("speculative"))
    for control in found:
        control.rare = not has_section or (control.rare and control.key not in (DRAFTS, ACCEPTANCE))
        if control.key == DRAFTS:
            control.ticks, control.default = DRAFT_COUNTS, "0"
        elif control.key == ACCEPTANCE:
            is_rate = not has_section or is_number(value_at(tree, ACCEPTANCE))
            control.kind, control.choices = "number" if is_rate else "text", ()
    return found


def section_controls(
    model: type[BaseModel], values: Mapping[str, Any], prefix: str = "", names: Sequence[str] = ()
) -> list[Control]:
    """Return the controls of a section and of the sections in it; of some properties if there are `names`."""
    schema = schema_of(model)
    types = schema.get("$defs", {})
    rules = resolve(schema, types)["properties"]  # a model that contains itself is a reference
    return list(walk({name: rules[name] for name in names or rules}, types, prefix, values))


@lru_cache(maxsize=16)  # the page asks again after every choice
def schema_of(model: type[BaseModel]) -> Mapping[str, Any]:
    """Return the JSON schema of a section."""
    return model.model_json_schema()


def walk(
    rules: Mapping[str, Any], types: Mapping[str, Any], prefix: str, values: Mapping[str, Any]
) -> Iterator[Control]:
    """Yield the controls of properties; a section that may have several kinds has that of its value."""
    for name, rule in rules.items():
        key, value = prefix + name, values.get(name)
        options = [resolve(option, types) for option in alternatives(rule)]
        inner = pick(options, value)
        kinds = [kind for option in options if (kind := option.get("properties", {}).get("kind", {}).get("const"))]
        if name == "kind":
            continue  # another kind has other keys, so the whole section is the setting
        if inner is None or len(kinds) > 1:
            control = leaf(key, rule, options)
            control.help += f" (kind: {', '.join(kinds)})" if kinds else ""
            yield control
        if inner is not None:
            yield from walk(inner["properties"], types, f"{key}.", value or {})


def alternatives(rule: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the schemas that a property may have."""
    found = rule.get("anyOf") or rule.get("oneOf")
    if found is None:
        return [rule]
    return [inner for option in found for inner in alternatives(option)]


def resolve(option: Mapping[str, Any], types: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema that a reference names."""
    reference = option.get("$ref")
    return types[reference.rpartition("/")[2]] if reference else option


def pick(options: Sequence[Mapping[str, Any]], value: Any) -> Optional[Mapping[str, Any]]:
    """Return the schema of a section: that of its kind or its keys, or the only one; None for a plain value."""
    sections = [option for option in options if "properties" in option]
    if value is None:
        return sections[0] if sections and len([o for o in options if o.get("type") != "null"]) == 1 else None
    if not sections or not isinstance(value, Mapping):
        return None
    kind = [option for option in sections if option["properties"].get("kind", {}).get("const", 0) == value.get("kind")]
    known = [option for option in sections if set(value) <= set(option["properties"])]
    return (kind or known or sections)[0]


def leaf(key: str, rule: Mapping[str, Any], options: Sequence[Mapping[str, Any]]) -> Control:
    """Return the control of a plain value."""
    control = Control(key, "text", rule.get("description", ""), rare=True)
    default = rule.get("default")
    control.default = "" if default is None else flow(default)
    for option in options:
        if "enum" in option or "const" in option:
            control.kind, control.choices = "choice", list(option.get("enum") or [option["const"]])
        elif option.get("type") in KINDS and not any(other.get("type") == "string" for other in options):
            control.kind = KINDS[option["type"]]
    return control


def set_range(control: Control, start: Any) -> None:
    """Give a number a slider around the value that the scenario starts from, else around its default."""
    if control.kind != "number" or control.ticks:
        return
    try:
        centre = float(control.default if start is None else start)
    except (TypeError, ValueError):
        return
    if not is_number(centre):
        return
    whole = centre == int(centre) and "." not in control.default and "rate" not in control.key
    ticks = slider_ticks(abs(centre), whole and not control.key.endswith(("X", "mean", "sd")))
    control.ticks = [tick for tick in ticks if control.range is None or control.range.contains(tick)]


def slider_ticks(centre: float, whole: bool) -> list[float]:
    """Return the values of a slider: from a small part of its centre to several times as much, evenly by factors."""
    if not whole and centre <= 1:
        return [round(0.05 * step, 2) for step in range(21)] if centre else [0, *slider_ticks(2.0, False)]
    top = max(256.0, 8 * centre) if whole else 8 * centre
    low = max(1.0, centre / 64) if whole else centre / 8
    ticks = {0.0} if centre == 0 else set()
    power = 8.0 ** math.floor(math.log(low, 8))
    while power <= top:
        ticks |= {step * power for step in HALF_STEPS}
        power *= 8
    inside = [tick for tick in ticks if (low <= tick <= top and abs(tick - centre) > 0.01 * centre) or tick == 0]
    return sorted(
        {int(tick) for tick in [*inside, centre]} if whole else {centre, *(float(f"{t:.3g}") for t in inside)}
    )
