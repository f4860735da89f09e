"""Targets of fuzz.py: small valid inputs, the commands that read them, and how often each target is tried.

A target has several inputs: sets of files and the command lines that read them. Commands write the folders they need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fuzz_seeds import (
    COSTS,
    ENGINE,
    LAYER_TABLES,
    LLM_SERVING,
    POLICY,
    PROFILE,
    PROFILE_FILES,
    SCENARIO,
    SEARCH,
    STEP_LOG,
    SWEEP,
    SWEEP_OPTIONS,
    TRACE_SCENARIO,
    WORKLOADS,
    Command,
    Files,
    folder_of,
    npz,
    samples_csv,
    text,
)
from fuzz_traces import LOG, TRACES

SERVER = ("--url", "http://127.0.0.1:1", "--quiet", "--timeout", "1")  # nothing listens: only the readers run
POLICY_FILE = Path(__file__).resolve().parents[1] / "examples" / "my_policy.py"


@dataclass(frozen=True)
class Input:
    """Valid files and the command lines that read them; the first file is mutated most often."""

    files: Files
    commands: Sequence[Command]
    written: tuple[str, ...] = ()  # folders of the input into which the commands write


@dataclass(frozen=True)
class Target:
    """Inputs of one kind."""

    share: int  # tries, of about 20,000 in all
    inputs: Callable[[], Sequence[Input]]


TRACE_FILES: Files = {"t.csv": TRACES["servesim"]["a.csv"]}


def in_folder(folder: str, files: Files) -> Files:
    return {f"{folder}/{name}": data for name, data in files.items()}


@cache
def traces() -> list[Input]:
    inputs = []
    for files in TRACES.values():
        name = next(iter(files))
        commands: list[Command] = [
            ("trace", "convert", name, "-o", "out/t.csv"),
            ("trace", "convert", name, "--to", "mooncake", "-o", "out/t.jsonl.gz"),
            ("trace", "convert", name, name, "--to", "timed-trace"),
            ("trace", "inspect", name, "--json"),
            ("trace", "inspect", name, "--limit", "2", "--scale", "3"),
            ("run", "--trace", name, "--profile", "p", "-o", "out"),
        ]
        inputs.append(Input({**files, **PROFILE_FILES}, commands))
    return inputs


@cache
def scenarios() -> list[Input]:
    commands: list[Command] = [
        ("run", "f.yaml", "-o", "out"),
        ("run", "f.yaml", "--json", "--decisions", "out/d.jsonl.gz", "--timeline", "out/t.json"),
        ("config", "validate", "f.yaml"),
        ("compare", "f.yaml", "f.yaml", "--replications", "2", "-j", "1", "-q"),
        ("check", "f.yaml", "--subject-to", "mean_ttft_ms<=500", "-j", "1", "-q", "--junit", "out/x.xml"),
        ("replay", "f.yaml", *SERVER),
    ]
    capacity = (
        "capacity",
        "f.yaml",
        "--subject-to",
        "mean_ttft_ms<=500",
        "-j",
        "1",
        "-q",
        "-o",
        "out",
        "--precision",
        "0.5",
    )
    return [
        Input({"f.yaml": text(SCENARIO), **PROFILE_FILES}, [*commands, capacity]),
        Input({"f.yaml": text(TRACE_SCENARIO), **TRACE_FILES, **PROFILE_FILES}, commands),
    ]


@cache
def workloads() -> list[Input]:
    commands: list[Command] = [
        ("trace", "synth", "f.yaml", "-o", "out/t.csv"), ("trace", "synth", "f.yaml", "--scale", "2", "--jitter", "1"),
    ]  # fmt: skip
    return [Input({"f.yaml": text({"workload": workload})}, commands) for workload in WORKLOADS]


@cache
def llm_serving() -> list[Input]:
    options = ("-X", "2", "-T", "3", "--profile", "p")
    commands: list[Command] = [("run", "f.yaml", *options, "-o", "out"), ("config", "validate", "f.yaml")]
    return [Input({"f.yaml": text(LLM_SERVING), **PROFILE_FILES}, commands)]


@cache
def sweeps() -> list[Input]:
    shared = {"s.yaml": text(SCENARIO), **PROFILE_FILES}
    sweep = ("sweep", "f.yaml", "-o", "out", *SWEEP_OPTIONS)
    commands: list[Command] = [sweep, (*sweep, "--set", "engine.num_blocks=32")]
    return [
        Input({"f.yaml": text(SWEEP), **PROFILE_FILES}, commands),
        Input({"f.yaml": text({**SWEEP, "base": "s.yaml", "steady": True, "objectives": "mean_e2el_ms"}), **shared},
              commands),
        Input({"f.yaml": text({**SWEEP, "confirm": 0, "params": [{"policy.delay_factor": {"range": [0, 2], "step": 1}},
              {"policy.prefill_batch": [1, 4]}]}), **PROFILE_FILES},
              commands),
    ]  # fmt: skip


@cache
def searches() -> list[Input]:
    command = ("search", "f.yaml", "-o", "out", *SWEEP_OPTIONS)
    return [Input({"f.yaml": text(SEARCH), **PROFILE_FILES}, [command])]


@cache
def experiments() -> list[Input]:
    shared = {**PROFILE_FILES, "f.yaml": text({**SWEEP, "confirm": 0})}
    commands: list[Command] = [
        ("sweep", "e", *SWEEP_OPTIONS),
        ("sweep", "f.yaml", "-o", "e", "--resume", *SWEEP_OPTIONS),
        ("report", "e", "-o", "out/r.html"),
        ("compare", "e:0", "e:1", "--json"),
        ("compare", "e", "e:0"),
        ("replay", "--from", "e", "--top", "1", *SERVER),
        ("replay", "--from", "e/best.yaml", *SERVER),
    ]
    # Charts take a second; few inputs are enough, because `report` reads the same files.
    return [
        Input({**in_folder("e", folder_of("sweep")), **shared}, [*commands * 30, ("plot", "e", "-o", "out")], ("e",)),
    ]


@cache
def search_folders() -> list[Input]:
    commands: list[Command] = [
        ("search", "f.yaml", "-o", "e", "--resume", *SWEEP_OPTIONS),
        ("search", "f.yaml", "-o", "e", "--resume", *SWEEP_OPTIONS),
        ("report", "e", "-o", "out/r.html"),
    ]
    files = {**in_folder("e", folder_of("search")), "f.yaml": text(SEARCH), **PROFILE_FILES}
    return [Input(files, commands, ("e",))]


@cache
def run_folders() -> list[Input]:
    runs = {**in_folder("a", folder_of("run")), **in_folder("b", folder_of("run")), **PROFILE_FILES}
    commands: list[Command] = [("compare", "a", "b", "--json"), ("compare", "a", "b"), ("verify", "a", "b", "--json")]
    replay = folder_of("replay")
    compare: list[Command] = [
        ("verify", "r/sim", "r/live", "--json"), ("verify", "r/sim", "r/live", "--tolerance", "5%", "--profile", "p"),
    ]  # fmt: skip
    return [Input(runs, commands), Input({**in_folder("r", replay), **PROFILE_FILES}, compare)]


@cache
def profiles() -> list[Input]:
    inputs = []
    for cost in COSTS:
        files = {"p/profile.yaml": text({**PROFILE, "cost": cost}), "s.yaml": text(SCENARIO)}
        commands: list[Command] = [
            ("run", "s.yaml", "-o", "out"), ("run", "s.yaml", "--set", "noise=true"), ("calibrate", "check", "p"),
            ("config", "validate", "s.yaml"),
        ]  # fmt: skip
        inputs.append(Input(files, commands))
    vidur = {"p/profile.yaml": text({"name": "p", "cost": {"kind": "vidur", "tables": "tables.npz"}})}
    files = {"p/tables.npz": npz(), **vidur, "s.yaml": text(SCENARIO)}
    return [*inputs, Input(files, [("run", "s.yaml", "-o", "out"), ("calibrate", "check", "p")])]


@cache
def samples() -> list[Input]:
    about = {"backend": "fake", "device": "d", "kernels": "reference", "model": {"name": "tiny"}}
    session = {"about": about, "settings": {"backend": "fake", "model": "tiny", "seed": 0}, "blocks": 64}
    commands: list[Command] = [("calibrate", "fit", "p"), ("calibrate", "check", "p")]
    return [
        Input({"p/samples.csv": samples_csv(), "p/probe.yaml": text({**about, **session})}, commands[:1], ("p",)),
        Input({"p/samples.csv": samples_csv(), "p/profile.yaml": text(PROFILE)}, commands, ("p",)),
    ]


@cache
def logs() -> list[Input]:
    runs = {"name": "r", "scenario": {"engine": ENGINE, "policy": POLICY}, "cost": COSTS[0], "free": ["base"]}
    table = b"idx,arrival_s,ttft_s,e2e_s\n0,0,0.05,0.2\n1,0.1,0.06,0.25\n2,0.2,0.07,0.3\n"
    entry = {"name": "a", "scenario": {"trace": "t.csv"}, "log": "a.csv", "cold": False}
    total = {"name": "b", "scenario": {"workload": {"contest": {"X": 1, "T": 3}}}, "total": 9.5, "fit": True}
    text_log = {"name": "a", "scenario": {}, "log": "a.txt"}
    closed = {"concurrency": 2, "requests": 6, "lengths": {"prompt": 9, "output": 4}}
    stages = {"stages": [{"rate": 4, "seconds": 1}, {"rate": 8, "seconds": 1}], "lengths": {"prompt": 9, "output": 4}}
    figures = {"mean_ttft_ms": 40.0, "p90_e2el_ms": 90.0}
    reported = [
        {"name": "a", "scenario": {"workload": closed}, "reported": figures},
        {"name": "b", "scenario": {"workload": stages}, "reported": [figures, figures]},
    ]
    fit = ("calibrate", "logs", "f.yaml", "-q", "--no-cross-validation")
    commands: list[Command] = [fit, (*fit[:-1], "-o", "out"), (*fit, "-o", "out")]
    return [
        Input({"f.yaml": text({**runs, "runs": [entry, total]}), "a.csv": table, **TRACE_FILES}, commands),
        Input({"f.yaml": text({**runs, "free": {"base": 0.1}, "runs": [text_log]}), "a.txt": LOG}, commands),
        Input({"f.yaml": text({**runs, "runs": reported})}, commands),
    ]  # fmt: skip


@cache
def imports() -> list[Input]:
    vidur = Input({"a.npz": npz()}, [("calibrate", "import", "vidur", "a.npz", "-o", "out")])
    layers = Input(LAYER_TABLES, [("calibrate", "import", "layers", "l", "--layers", "4", "-o", "out")])
    steps: list[Command] = [
        ("calibrate", "import", "steps", "a.jsonl", "-o", "out"),
        ("calibrate", "import", "steps", "a.jsonl", "-o", "out", "--first-use", "64"),
        ("calibrate", "import", "steps", "a.jsonl", "-o", "out", "--no-fit", "--time-unit", "ms"),
    ]
    results = [
        Input(TRACES[name], [("calibrate", "import", "results", next(iter(TRACES[name])), "-o", "out")])
        for name in ("sglang-bench", "vllm-bench", "guidellm-results", "aiperf-results")
    ]
    return [vidur, layers, Input({"a.jsonl": STEP_LOG}, steps), *results]


@cache
def all_files() -> list[Input]:
    """One input for mutated command lines: files of every kind, and a valid command line of every command."""
    files = {
        "f.yaml": text(SCENARIO), "w.yaml": text(SWEEP), "se.yaml": text(SEARCH), **TRACE_FILES, **PROFILE_FILES,
        **in_folder("e", folder_of("sweep")), **in_folder("a", folder_of("run")), "l.csv": TRACES["servesim"]["a.csv"],
    }  # fmt: skip
    commands: list[Command] = [
        ("run", "f.yaml"), ("run", "--trace", "t.csv", "--profile", "p"), ("run", "-X", "2", "-T", "2", "--profile",
        "p"),
        ("sweep", "w.yaml", *SWEEP_OPTIONS, "-o", "out"), ("search", "se.yaml", *SWEEP_OPTIONS, "-o", "out"),
        ("capacity", "f.yaml", "--subject-to", "mean_ttft_ms<=500", "-j", "1", "-q", "--precision", "0.5", "-o", "out"),
        ("compare", "f.yaml", "f.yaml", "--replications", "2", "-j", "1", "-q"), ("compare", "a", "a"),
        ("check", "f.yaml", "--baseline", "f.yaml", "--subject-to", "makespan<=baseline", "-j", "1", "-q"),
        ("report", "e", "-o", "out/r.html"), ("verify", "a", "a"), ("replay", "f.yaml", *SERVER),
        ("trace", "convert", "t.csv"), ("trace", "inspect", "t.csv"), ("trace", "synth", "f.yaml"),
        ("trace", "synth", "-X", "2", "-T", "2"), ("policies", "show", "vllm"), ("config", "validate", "f.yaml"),
        ("calibrate", "check", "p"), ("config", "init"),
    ]  # fmt: skip
    return [Input(files, commands, ("e", "runs", "out-2"))]  # default output folders


@cache
def policies() -> list[Input]:
    name = "my_policy.py:Gather"
    commands: list[Command] = [
        ("run", "f.yaml", "--policy", name, "-o", "out"),
        ("policies", "show", name), ("policies", "check", name), ("sweep", "w.yaml", "-o", "out", *SWEEP_OPTIONS),
    ]  # fmt: skip
    base = {**SCENARIO, "policy": {"name": "orca"}}
    sweep = {**SWEEP, "base": base, "baseline": {}, "params": {"policy.name": [name], "policy.group": [1, 2]}}
    files = {"my_policy.py": POLICY_FILE.read_bytes(), "f.yaml": text(base), "w.yaml": text(sweep), **PROFILE_FILES}
    return [Input(files, commands)]


# Policies come last: a loaded user policy changes how the command line reports errors.
TARGETS: dict[str, Target] = {
    "trace": Target(6000, traces),
    "scenario": Target(3500, scenarios),
    "workload": Target(1500, workloads),
    "llm-serving": Target(800, llm_serving),
    "sweep": Target(1600, sweeps),
    "search": Target(400, searches),
    "experiment": Target(1400, experiments),
    "search-folder": Target(300, search_folders),
    "run-folder": Target(1400, run_folders),
    "profile": Target(1200, profiles),
    "samples": Target(500, samples),
    "logs": Target(500, logs),
    "import": Target(1000, imports),
    "options": Target(2000, all_files),
    "policy": Target(400, policies),
}
