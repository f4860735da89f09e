"""`sim replay`: run scenarios on the live engine, simulate them, and compare.

The simulation uses the same requests, policy and KV blocks as the device. It adds no padding. It includes the host
overhead per step, measured in the warm-up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Optional

from servesim.calibrate.live.setup import DeviceSession, check_same_device
from servesim.calibrate.probe.host_overhead import fit_saved, measured_host
from servesim.config.layers import assemble, read_scenario_file, setting_layers
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput, Request
from servesim.core.content import Content
from servesim.costs.device_profile import Profile
from servesim.costs.parts import NO_HOST, HostPart
from servesim.engine.rules import rules_of
from servesim.files.csv_rows import read_csv
from servesim.runs.answers import split_answers, with_answers
from servesim.runs.build import copy_requests
from servesim.runs.run_folder import DECISIONS, RunData, run_data, write_decisions, write_run
from servesim.runs.simulate import Run, check_drafted, load_trace, simulate
from servesim.study.progress import StatusLine
from servesim.study.sweep_file import read_experiment
from servesim.traces.trace import Trace

from .measured_run import NO_PROFILE, MeasuredRun, run_from_result, write_live
from .resimulate import replay_intervals, resimulate, simulate_with_cost
from .verify import Comparison, compare

SESSION_SECONDS = 3600.0  # a profile that is not older was measured in the session of the replay


@dataclass
class ReplayedScenario:
    """A scenario run on the device, and simulated if there is a profile."""

    name: str
    live: MeasuredRun
    measured: RunData
    run: Optional[Run] = None
    simulated: Optional[RunData] = None
    comparison: Optional[Comparison] = None

    @property
    def interrupted(self) -> bool:
        """Whether the user stopped the run or its token check."""
        return self.live.stopped or (self.live.token_check is not None and self.live.token_check.stopped)


def top_scenarios(
    path: Path, top: int, baseline: bool = False, settings: tuple[str, ...] = ()
) -> list[tuple[str, Scenario]]:
    """Return the `top` best scenarios of a sweep with their names; with `baseline`, also the baseline."""
    if path.is_file():  # a best.yaml
        return [(path.stem, scenario_from(read_scenario_file(path, settings), str(path)))]
    ranking = path / "summary.csv"
    if not ranking.exists():
        raise BadInput(f"{path}: expected the folder of a finished `sim sweep`; it has no summary.csv")
    experiment = read_experiment(path)
    if experiment.rates:
        raise BadInput(f"{path}: is a sweep over rates; give one of its scenarios, e.g. --from {path / 'best.yaml'}")
    order = [row.whole("config", len(experiment.configs) - 1) for row in read_csv(ranking, ["config"])]  # best first
    if not order:
        raise BadInput(f"{ranking}: expected at least one configuration, got none")
    chosen = order[:top]
    if baseline and 0 not in chosen:
        chosen.append(0)
    named = []
    for config in chosen:
        rank = order.index(config) + 1 if config in order else len(order) + 1
        name = f"rank{rank}" + ("-baseline" if config == 0 else "")
        tree = assemble(setting_layers(settings), experiment.tree(config))
        named.append((name, scenario_from(tree, f"{path}: {config}")))
    return named


def replay_requests(
    scenario: Scenario, time_scale: float = 1.0, limit: Optional[int] = None, split: bool = True
) -> Sequence[Request]:
    """Return the first `limit` requests of a scenario. Times start at 0 and are multiplied by `time_scale`.

    `split`: each of several answers to a request is a request of its own, as in vLLM V1.
    """
    requests = copy_requests(load_trace(scenario).requests)
    requests.sort(key=lambda request: request.sent)
    requests = requests[:limit]
    check_drafted(requests, scenario)
    rules = rules_of(scenario.make_policy())
    several = next((request for request in requests if request.sampling is not None), None)
    if several is not None and (rules.sequence_groups or not split):
        reason = "sim tune measures one answer per request"
        if split:
            reason = "this policy runs all answers as one group, which no backend can do; vllm-v1 runs each by itself"
        raise BadInput(f"request {several.id}: n: expected one answer, got several: {reason}")
    if not requests:
        raise BadInput("trace: expected requests to replay, got none")
    if not 0 < time_scale < float("inf"):
        raise BadInput(f"--time-scale: expected a positive number, got {time_scale:g}")
    start = requests[0].sent
    kept = {request.id for request in requests}
    for request in requests:
        request.sent = request.arrival = request.state_since = (request.sent - start) * time_scale
        request.think_time *= time_scale
        if request.follows not in kept:
            request.follows = None
    return with_answers(requests, split_answers(requests, rules))


def expected_seconds(scenario: Scenario, requests: Sequence[Request], profile: Optional[Profile]) -> float:
    """Return the duration of a replay: as simulated, or until the last request is sent if there is no profile."""
    last_sent = max(request.sent for request in requests)
    if profile is None:
        return last_sent
    run = simulate(scenario, Trace(list(copy_requests(requests)), "replay", "synth"), profile=profile)
    return max(last_sent, run.end)


def as_backend_scenario(scenario: Scenario) -> Scenario:
    """Return a scenario as a backend runs it: without padding and without cold start."""
    engine = scenario.engine.model_copy(
        update={"prefill_buckets": [], "decode_buckets": [1], "start": None, "cold_start": None}
    )
    return scenario.model_copy(update={"engine": engine})


def with_known_answers(requests: Sequence[Request]) -> list[Request]:
    """Return copies whose prompts contain only answers that are complete when the prompt is sent.

    A prompt can only contain the answer to a request that it follows. Other answers lose their names: a prompt that has
    such a name contains another text.
    """
    copies = copy_requests(requests)
    contents = {request.id: request.content for request in copies if request.content is not None}
    answers = Counter(content.answer for content in contents.values() if content.answer is not None)
    follows = {request.id: request.follows for request in copies}
    unknown = {name for name, count in answers.items() if count > 1}  # several requests would generate one text
    for id, content in contents.items():
        earlier, before = set(), follows[id]
        while before in contents and contents[before].answer not in earlier:
            earlier.add(contents[before].answer)
            before = follows[before]
        unknown |= {name for name in content.names if name in answers and name not in earlier}
    for request in copies:
        if request.content is not None and request.content.answer in unknown:
            request.content = Content(request.content.names, request.content.ends)
    return copies


def replay_on_backend(
    session: DeviceSession,
    name: str,
    scenario: Scenario,
    requests: Sequence[Request],
    profile: Optional[Profile],
    warm_up: int = 0,
    quiet: bool = True,
    draws: int = 0,
    check_tokens: Optional[int] = None,
    max_seconds: float = math.inf,
    compares: bool = True,
) -> ReplayedScenario:
    """Replay one scenario on a loaded model; with a profile, simulate and compare it too. `draws` give intervals.

    `check_tokens` requests then run again alone, and their tokens are compared. Without `compares`, the profile only
    gives a fake backend its step times.
    """
    scenario, requests = as_backend_scenario(scenario), with_known_answers(requests)
    selected = session.use_sampling(scenario)
    if profile is not None and profile.sampling_used not in (None, selected) and selected is not None:
        # The option of the backend, or its default, is not what the profile was measured with.
        scenario = scenario.model_copy(update={"engine": scenario.engine.model_copy(update={"sampling": selected})})
    cost = None if profile is None else profile.for_run(scenario.engine.sampling).cost
    line = ProgressLine(name, len(requests), quiet)
    result = session.replay(scenario, copy_requests(requests), cost, warm_up, line, max_seconds, check_tokens)
    line.end()
    live = run_from_result(scenario, profile or NO_PROFILE, copy_requests(requests), result)
    replayed = ReplayedScenario(name, live, replace(run_data(live, live.decisions), name=name))
    if compares and profile is not None and not live.stopped:
        recent = profile.measured_within(SESSION_SECONDS, datetime.now(timezone.utc))
        simulate_and_compare(replayed, requests, profile, measured_host(result), draws, same_session=recent)
    return replayed


def simulate_and_compare(
    replayed: ReplayedScenario,
    requests: Sequence[Request],
    profile: Profile,
    host: HostPart = NO_HOST,
    draws: int = 0,
    same_session: bool = False,
) -> None:
    """Simulate a replayed scenario, compare both runs, and split the error into its sources."""
    plain = profile.in_same_session() if same_session else profile
    live, scenario = replayed.live, replayed.live.scenario
    profile = profile_of_run(profile, live, host)
    drafts = live.extra.get("drafts")
    replayed.run, decisions = simulate_with_cost(scenario, copy_requests(requests), profile, profile.cost, drafts)
    if draws:
        replayed.run.intervals = replay_intervals(
            replayed.run, requests, plain, lambda draw: profile_of_run(draw, live, host), draws, drafts
        )
    replayed.simulated = replace(run_data(replayed.run, decisions), name=replayed.name)
    resimulated, calls_matched = None, None
    if replayed.measured.calls:
        resimulated, calls_matched = resimulate(replayed.measured, profile)
    replayed.comparison = compare(replayed.simulated, replayed.measured, resimulated, calls_matched)


def profile_of_run(profile: Profile, live: MeasuredRun, host: HostPart) -> Profile:
    """Return a profile with the host overhead that was measured in a run.

    With steps in flight, the host works while the device runs, and a step is shorter by the time that overlaps. The
    steps of a fake backend always have the times of its profile.
    """
    profile = profile.for_run(live.scenario.engine.sampling, host)
    if rules_of(live.scenario.make_policy()).steps_in_flight == 1 or live.backend.get("backend") == "fake":
        return profile
    return profile.overlapped(fit_saved(live.warm_up_calls, profile.cost))


def write_replay(replayed: ReplayedScenario, folder: Path, single: bool) -> None:
    """Write both runs of a scenario under live/ and sim/ of a folder."""
    live = folder / "live" if single else folder / "live" / replayed.name
    write_live(replayed.live, live)
    if replayed.run is not None and replayed.simulated is not None:
        sim = folder / "sim" if single else folder / "sim" / replayed.name
        write_run(replayed.run, sim)
        if replayed.simulated.decisions:  # a replay against a server compares none
            write_decisions(replayed.simulated.decisions, sim / DECISIONS)


class ProgressLine(StatusLine):
    """The progress of a replay: queue lengths, or open requests of a server; tokens per second."""

    def __init__(self, name: str, total: int, quiet: bool) -> None:
        super().__init__(quiet)
        self.name = name
        self.total = total

    def __call__(self, state: Mapping[str, Any]) -> None:
        text = f"{self.name}  {state['t']:.1f} s  "
        if "checked" in state:
            text += f"token check: {state['checked']}/{state['to_check']} requests"
        elif "open" in state:  # a client cannot see the queues
            text += f"sent {state['sent']}/{self.total}  done {state['done']}  open {state['open']}  "
            text += f"{state['tokens_per_s']:.0f} tokens/s"
        else:
            text += f"done {state['done']}/{self.total}  waiting {state['waiting']}  running {state['running']}  "
            text += f"swapped {state['swapped']}  {state['tokens_per_s']:.0f} tokens/s"
        self.show(text)


def check_profile(profile: Profile, session: DeviceSession) -> None:
    """Reject a profile of another device or kernel set. A fake backend accepts every profile."""
    if session.backend != "fake":
        check_same_device(profile, session.about)
