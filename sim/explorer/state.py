"""The state of the page: a start (FILE or a preset) and settings, in the form of the options of `sim run`.

A setting is a key and a text, as in `--set KEY=TEXT`. So the page checks a scenario in the words of the command line,
and the command that it copies has the same result.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Optional

from pydantic import Field, StringConstraints
from servesim.config.export import TARGETS, export_scenario
from servesim.config.families import tunings
from servesim.config.first_scenario import CONTEST, CONTEST_WORKLOAD, GPU, GPU_WORKLOAD, defaults_on, flow
from servesim.config.layers import (
    Layer,
    Tree,
    assemble,
    file_layer,
    nesting_order,
    setting_layers,
    texts_in,
    value_at,
)
from servesim.config.registry import presets
from servesim.config.scenario import Scenario, scenario_from
from servesim.config.user_code import NOT_NAMED, code_access, use_access
from servesim.core import BadInput
from servesim.core.limits import is_number
from servesim.costs.named_profile import is_named
from servesim.files.checked import Int, Keys, validate
from servesim.files.read import show_path
from servesim.files.write import yaml_text
from servesim.files.yaml_reader import parse
from servesim.runs.leading import arrive_at_rate
from servesim.runs.request_rate import rate_key_value, scenario_at_rate
from servesim.traces.make.workload import workload_from

from .named_code import ROUTER, check_paths, executed_by, scenario_policy

MAX_SETTINGS, MAX_TEXT = 200, 20_000  # settings of a scenario; characters of one text
MAX_VARIANTS = 4
MAX_REPLICATIONS = 100
FIRST_SERVER = "vllm"  # of a page without a file
REQUESTS = ("trace", "workload", "slo", "seed", "noise")  # sections that all scenarios of the page share
MEMORY = ("num_blocks", "device_memory", "gpu_memory_utilization", "model", "reserve")
KEPT_COUNTS = {  # a new value of this rate keeps the number of requests: another key follows
    "workload.contest.X": "workload.contest.T",
    "workload.arrivals.rate": "workload.duration",
}
WORKLOADS = {
    "poisson": GPU_WORKLOAD,
    "closed loop": GPU_WORKLOAD.replace("arrivals: {kind: poisson, rate: 4}", "concurrency: 32"),
    "contest": CONTEST_WORKLOAD,
}
PREFIXES, PREFIX_TOKENS = "workload.prefixes", "workload.prefixes.tokens"
DEVICE, FIXED_MEMORY = "profile.device", ("engine.num_blocks", "engine.device_memory")
BLOCK_SIZE = "engine.block_size"
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT)]


class Choice(Keys):
    """One scenario of the page."""

    start: Text = ""  # a preset; empty: FILE
    settings: dict[Text, Text] = Field({}, max_length=MAX_SETTINGS)


class PageState(Choice):
    """The scenario of the controls, the pinned ones (the first is the baseline), and how they are compared."""

    pins: list[Choice] = Field([], max_length=1 + MAX_VARIANTS)
    replications: Int = Field(1, ge=1, le=MAX_REPLICATIONS)
    subject_to: Text = ""  # constraints, one per line
    metric: Text = ""  # that leads; empty: the one that fits the load
    at_knee: bool = False  # find the knee of the load, and run there


def read_state(body: Any) -> PageState:
    """Check the state that the page sends."""
    return validate(PageState, body, "page")


class Origin:
    """What the command line named: a scenario file, and whether its own policy file may run."""

    def __init__(self, file: Optional[str] = None) -> None:
        self.file, self._layer = file, None if file is None else file_layer(file)
        own: Tree = {} if file is None else self.base(Choice())
        self.own_policy, self._own_code = scenario_policy(own), executed_by(own)
        access = code_access()
        self.access = access and access._replace(only=sorted({*texts_in(own).values()}))

    def first_state(self, preset: Optional[str] = None, settings: Optional[Mapping[str, str]] = None) -> PageState:
        """Return the state of a new page; `settings` are those of the command line."""
        choice, settings = Choice(), split_profile(settings or {})
        if preset is not None or self.file is None:
            before = {} if self.file is None else self.base(choice)
            named = [f"{key}={text}" for key, text in settings.items() if key.partition(".")[0] == "profile"]
            tree = assemble([*setting_layers(named)], before)
            choice = self.start_from(preset or tunings()[FIRST_SERVER].preset, tree)
            if is_named(tree.get("profile")):
                choice.settings["profile"] = flow(tree["profile"].get("measured", GPU["profile"]))
        settings = {**choice.settings, **settings}
        own = any(key.partition(".")[0] in ("workload", "trace") for key in settings.keys() - choice.settings.keys())
        opened = Choice(start=choice.start, settings=settings)
        knee = self.file is None and not own and arrive_at_rate(self.base(opened, choice.settings))
        return PageState(start=choice.start, settings=settings, pins=[opened], at_knee=knee)

    def base(self, choice: Choice, settings: Optional[Mapping[str, str]] = None) -> Tree:
        """Return the scenario that the settings of a choice change, or that scenario with settings."""
        if not choice.start and self._layer is None:
            raise BadInput("start: expected a preset, because the page has no scenario file")
        start = Layer({"preset": choice.start}) if choice.start or self._layer is None else self._layer
        layers = setting_layers([f"{key}={text}" for key, text in (settings or {}).items()])
        for layer in layers:
            check_paths(layer.keys)  # `server_config` is read now
        return assemble([start, *layers])

    def where(self, choice: Choice) -> str:
        """Return how messages name the scenario, as those of `sim run` do."""
        return "scenario" if choice.start or self.file is None else self.file

    def applied(self, choice: Choice) -> dict[str, str]:
        """Return the settings, sections before their keys; a new request rate keeps the number of requests."""
        settings = dict(sorted(choice.settings.items(), key=nesting_order))
        if PREFIX_TOKENS in settings:
            settings = self._with_prefix(choice, settings)
        for key, other in KEPT_COUNTS.items():
            with suppress(BadInput):  # reported when all settings are applied
                rate: Any = parse(settings[key], key) if key in settings and other not in settings else None
                before = self.base(choice, {name: text for name, text in settings.items() if name != key})
                workload_from(before.get("workload"))
                old = rate_key_value(before)
                if old and is_number(rate, 1e-9) and rate != old:
                    value = value_at(scenario_at_rate(before, rate, rate / old) or {}, other)
                    if value is not None and value != value_at(before, other):
                        settings[other] = repr(float(value))
        if settings.get(FIXED_MEMORY[0]) and settings.get(FIXED_MEMORY[1]):  # a number of blocks wins
            follows = self._device_settings(choice)
            settings |= {f"engine.{key}": "null" for key in MEMORY[1:] if f"engine.{key}" in follows}
            settings[FIXED_MEMORY[1]] = "null"
        return settings

    def _with_prefix(self, choice: Choice, settings: dict[str, str]) -> dict[str, str]:
        """Return the settings with one system prompt of a length, if the workload has no other number; none of 0."""
        others = {key: text for key, text in settings.items() if key != PREFIX_TOKENS}
        if settings[PREFIX_TOKENS].strip() == "0":
            rest = {key: text for key, text in others.items() if not key.startswith(PREFIXES)}
            return {**rest, PREFIXES: "null"}
        with suppress(BadInput):  # reported when all settings are applied
            if value_at(self.base(choice, others), f"{PREFIXES}.count") is None:
                return {**others, PREFIXES: f"{{count: 1, tokens: {settings[PREFIX_TOKENS]}}}"}
        return settings

    def usable(self, choice: Choice) -> tuple[Choice, Optional[BadInput]]:
        """Return a choice without what makes no scenario, such as settings that are not YAML, and the first error."""
        first: Optional[BadInput] = None
        while True:
            try:
                self.tree(choice)
                return choice, first
            except BadInput as bad:
                first = first or bad
                wrong = error_json(bad, self.where(choice), choice.settings)["key"]
            rest = Choice(start="" if self.file else tunings()[FIRST_SERVER].preset)
            kept = {key: text for key, text in choice.settings.items() if not are_nested(key, wrong)}
            if len(kept) < len(choice.settings):
                rest = Choice(start=choice.start, settings=kept)
            if rest == choice:
                raise first
            choice = rest

    def tree(self, choice: Choice) -> Tree:
        """Return the keys of a scenario."""
        tree = self.base(choice, self.applied(choice))
        self.check_files(tree)
        return tree

    def scenario(self, choice: Choice, like: Optional[Tree] = None) -> tuple[Tree, Scenario]:
        """Return a checked scenario; `like`: another one whose requests it gets, so that both can be compared."""
        tree = self.tree(choice)
        if like is not None:
            tree = {key: value for key, value in tree.items() if key not in REQUESTS}
            tree |= {key: like[key] for key in REQUESTS if key in like}
        with use_access(self.access):
            return tree, scenario_from(tree, self.where(choice))

    def check_files(self, tree: Tree) -> None:
        """Raise BadInput for code that the command line did not name, and for standard input."""
        for key, text in executed_by(tree).items():
            if text != self._own_code.get(key):
                raise BadInput(f"{key}: {show_path(text)}: {NOT_NAMED}")
        check_paths(tree)

    def command(self, choice: Choice) -> str:
        """Return the command that runs a scenario."""
        source = ["--preset", choice.start] if choice.start else [str(self.file)]
        words = [word for key, text in self.applied(choice).items() for word in ("--set", f"{key}={text}")]
        return shlex.join(["sim", "run", *source, *words])

    def copies(self, choice: Choice) -> dict[str, str]:
        """Return what can be copied, by name: the command, the YAML, and the settings of every server.

        A file without comments has its remarks beside it: they name the settings that the server does not have.
        """
        tree, scenario = self.scenario(choice)
        texts = {"command": self.command(choice) + "\n", "YAML": yaml_text(tree)}
        for target in TARGETS:
            try:
                with use_access(self.access):
                    exported = export_scenario(scenario, target)
                texts[target] = exported.render(self.where(choice))
                if not exported.has_comments:
                    texts[f"{target} remarks"] = "".join(f"{line}\n" for line in exported.messages)
            except BadInput as bad:
                texts[target] = f"# {bad}\n"
        return texts

    def start_from(self, name: str, tree: Tree) -> Choice:
        """Return a preset with the requests, the profile and the memory of another scenario, if that has them.

        A server that chooses settings by its device has those.
        """
        base = self.base(Choice(start=name))
        contest = scenario_policy(base) == "llm-serving"
        usual = CONTEST if contest else GPU
        kept = {key: tree[key] for key in (*REQUESTS, "profile") if tree.get(key) is not None}
        if tree.get("cluster") and not value_at(tree, "cluster.pools"):
            kept["cluster"] = tree["cluster"]
        if not {"trace", "workload"} & kept.keys():
            kept |= parse(CONTEST_WORKLOAD if contest else GPU_WORKLOAD, "workload")
        new = {key: value for key, value in usual.items() if key != "engine"} | kept
        new |= memory_keys(base, tree, new["profile"])
        with suppress(BadInput):  # of the profile: reported at its control
            new |= defaults_on(name, new["profile"])
        return Choice(start=name, settings={key: flow(value) for key, value in new.items()})

    def choose(self, state: PageState, key: str, value: str) -> PageState:
        """Return the state after a choice that changes several settings: keys of what was chosen before go."""
        if key == "server":
            if value not in tunings():
                raise BadInput(f"server: expected one of {', '.join(tunings())}, got {value!r}")
            key, value = "start", tunings()[value].preset
        if key == "start":
            if value and value not in presets():
                raise BadInput(f"start: no preset {value!r}")
            follows = self._device_settings(state).items()
            own = {name: text for name, text in state.settings.items() if (name, text) not in follows}
            choice = (
                self.start_from(value, self.tree(state.model_copy(update={"settings": own}))) if value else Choice()
            )
            profile = {name: text for name, text in state.settings.items() if name.partition(".")[0] == "profile"}
            settings = {**choice.settings, **(profile if value and "profile" in profile else {})}
            return state.model_copy(update={"start": choice.start, "settings": settings})
        if key.startswith("profile."):
            return self._choose_profile(state, key, value)
        if key == ROUTER:  # the fields of the old one go
            settings = {name: text for name, text in state.settings.items() if not name.startswith(ROUTER)}
            return state.model_copy(update={"settings": {**settings, ROUTER: value}})
        base, gone = self.base(state), ("policy",) if key == "policy" else ("workload", "trace")
        settings = {name: text for name, text in state.settings.items() if name.partition(".")[0] not in gone}
        if key == "policy":
            own = scenario_policy(base) == value
            settings |= self._device_settings(state) if own else {"policy": value}
            settings = self._with_block_size(base, settings, value)
        elif value == "trace":
            settings |= {"trace": "{path: }", **({"workload": "null"} if base.get("workload") else {})}
        elif value in WORKLOADS:
            settings["workload"] = flow(parse(WORKLOADS[value], "workload")["workload"])
            settings |= {"trace": "null"} if base.get("trace") else {}
        return state.model_copy(update={"settings": settings})

    def _choose_profile(self, state: PageState, key: str, value: str) -> PageState:
        """Return the state with another model or device: its memory, and what the server chooses by it, follow."""
        old = self._device_settings(state)
        kept = {name: text for name, text in state.settings.items() if name != key and old.get(name) != text}
        if key == DEVICE:
            kept = {name: text for name, text in kept.items() if name not in FIXED_MEMORY}
        settings = {**kept, **({key: value} if value else {})}
        tree = self.base(state, settings)
        memory = memory_keys(self.base(state), {}, tree.get("profile")) if state.start and key == DEVICE else {}
        usual = {name: flow(given) for name, given in memory.items()}
        usual |= self._device_settings(state.model_copy(update={"settings": {**usual, **settings}}))
        return state.model_copy(update={"settings": {**usual, **settings}})

    def _device_settings(self, choice: Choice) -> dict[str, str]:
        """Return what the server of a preset chooses by the device of a scenario."""
        with suppress(BadInput):  # reported at its control
            keys = defaults_on(choice.start, self.base(choice, choice.settings).get("profile"))
            return {key: flow(value) for key, value in keys.items()}
        return {}

    def changes(self, choice: Choice, first: Choice) -> dict[str, str]:
        """Return the settings that the user has changed since the page was opened, without those that follow."""
        automatic = self._device_settings(choice).items() | first.settings.items()
        changed = {key: text for key, text in choice.settings.items() if (key, text) not in automatic}
        if choice.start != first.start or DEVICE in choice.settings:  # the page sets them for it
            changed = {key: text for key, text in changed.items() if key not in (*FIXED_MEMORY, BLOCK_SIZE)}
        return changed

    def label(self, choice: Choice, first: Choice) -> str:
        """Return what the user has changed, in short; requests are those of the controls for all scenarios."""
        changed = self.changes(choice, first).items()
        words = [f"{key.rpartition('.')[2]}={text}" for key, text in changed if key.partition(".")[0] not in REQUESTS]
        return ", ".join(words if choice.start == first.start and words else [choice.start or self.file or "", *words])

    def _with_block_size(self, base: Tree, settings: dict[str, str], policy: str) -> dict[str, str]:
        """Return the settings with the block size of a policy's engine, instead of that of the preset's policy."""
        kept = {key: text for key, text in settings.items() if key != BLOCK_SIZE}
        other = scenario_policy(base) != policy and value_at(base, BLOCK_SIZE) is not None
        size = block_defaults({"policy": {"name": policy}}).get(BLOCK_SIZE) if other else None
        return kept if size is None or size == str(value_at(base, BLOCK_SIZE)) else {**kept, BLOCK_SIZE: size}


def split_profile(settings: Mapping[str, str]) -> dict[str, str]:
    """Return settings with one setting per key of a profile by name, as the controls have them."""
    profile = parse(settings.get("profile", ""), "profile")
    if not is_named(profile):
        return dict(settings)
    stored = {"profile": flow(profile["measured"])} if "measured" in profile else {}
    keys = {f"profile.{key}": flow(value) for key, value in profile.items() if key != "measured"}
    return {**stored, **{key: text for key, text in settings.items() if key != "profile"}, **keys}


def memory_keys(base: Tree, tree: Tree, profile: Any) -> dict[str, Any]:
    """Return the memory of a scenario on top of a preset; none if the preset or the device of a profile has its own."""
    if is_named(profile) and "device" in profile:
        return {}
    usual = CONTEST if scenario_policy(base) == "llm-serving" else GPU
    engine = (tree if tree.get("engine") or tree.get("policy") else usual).get("engine") or {}
    fixed = "num_blocks" in (base.get("engine") or {})
    return {f"engine.{key}": engine[key] for key in MEMORY if key in engine and not fixed}


def block_defaults(tree: Tree) -> dict[str, str]:
    """Return the size and the number of KV blocks of the policy's engine, by key; none for a wrong scenario."""
    try:
        engine = scenario_from({**tree, "engine": {}, "profile": {"base": 1.0}}).engine
    except BadInput:
        return {}
    return {f"engine.{key}": str(getattr(engine, key)) for key in ("block_size", "num_blocks")}


def are_nested(first: str, second: str) -> bool:
    """Whether two keys are equal, or one is in the section of the other."""
    return f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}.")


def error_json(error: BadInput, where: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Return an error with the key of the control that it belongs to: the message names it, or a file that it sets."""
    text = str(error)
    rest = text.removeprefix(f"{where}: ")
    files = [key for key, value in settings.items() if value and rest.startswith(value.strip("'\"") + ":")]
    key = re.match(r"(?:--set )?([\w.]+)", rest)
    return {"key": files[0] if files else key[1] if key else "", "text": text}
