"""`sim recommend`: from a model, a device, a load and limits to the settings of a server."""

from __future__ import annotations

import argparse
from itertools import count
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from servesim.core import BadInput

from . import options
from .notes import print_json, print_note, print_warnings_of

if TYPE_CHECKING:
    from servesim.study.fleet_question import Fleet

ENGINES = ("vllm", "sglang", "mindie", "vllm-ascend")
REPLACES = "replaces derived step times by measured ones"
EXPORTED = {"vllm-ascend": "vllm"}  # engine -> server of `sim export`


def register(commands: Any) -> None:
    recommend = commands.add_parser(
        "recommend", run=print_answer, help="find the settings of a server for a model, a device, a load and limits",
        description="Try the settings that matter for an engine at your load, and print the best ones as a command of "
        "the server, the highest load within your limits, and what limits it. Requests arrive at random; their lengths "
        "have the given means, and half of the mean as standard deviation. --trace FILE uses your own requests.",
    )  # fmt: skip
    server = recommend.add_argument_group("server")
    options.add(server, {"--engine NAME": "the engine (default vllm)"}, choices=ENGINES)
    options.add(server, {"--profile NAME": "measured profile, instead of model and device: bundled name or folder"})
    options.add_names(recommend)
    options.add(server, {"--speculative DRAFTS": "also try 1, 3 and 5 drafts per step: method and acceptance rate, "
                         "e.g. eagle:0.7"})  # fmt: skip
    options.add(recommend.add_argument_group("load"), {
        "--rate RATE": "requests per second",
        "--prompt TOKENS": "mean length of prompts, with the system prompt",
        "--output TOKENS": "mean length of answers",
        "--system-prompt TOKENS": "tokens at the beginning that all prompts share (default 0)",
        "--trace FILE": "requests, instead of the options above; --rate scales their arrival times",
        "--subject-to BOUND": "limit such as 'p99_ttft_ms <= 1000' (repeatable)",
    })  # fmt: skip
    options.add(recommend.add_argument_group("more than one replica, if one does not hold the load"), {
        "--replicas N": "number of replicas (default: the smallest one that meets the limits)",
        "--router NAME": "router to compare (repeatable; default: some that suit the engine)",
        "--price-per-hour PRICE": "price of one device: also print the cost per million tokens",
    })  # fmt: skip
    out = recommend.add_argument_group("output")
    options.add(
        out, {"-o, --folder DIR": "folder of the scenario, the sweeps and their reports (default: runs/recommend-N)"}
    )
    options.add(out, options.JOBS)
    options.add_json(out)


def print_answer(args: argparse.Namespace) -> int:
    """Run the sweeps and print the answer; return 1 if no setting meets the limits."""
    from servesim.config.cluster import make_router
    from servesim.config.export import export_scenario
    from servesim.config.exported import MODEL
    from servesim.costs.public_models import alias_note, hub_name
    from servesim.files.write import write_text
    from servesim.study.draft_question import parse_drafts
    from servesim.study.executor import open_executor
    from servesim.study.progress import Progress
    from servesim.study.recommend import Question, recommend
    from servesim.study.recommend_text import answer_json, answer_text

    for name in args.router:
        make_router({"name": name}, "--router")
    keys = {**profile_key(args), **load_key(args)}
    keys |= {} if args.price_per_hour is None else {"cluster": {"price_per_hour": args.price_per_hour}}
    keys |= {"speculative": parse_drafts(args.speculative)} if args.speculative else {}
    question = Question(args.engine, keys, args.subject_to, args.replicas, args.router)
    print_note(args, *filter(None, [alias_note(args.named_device or "")]))
    folders = (Path("runs") / f"recommend-{number}" for number in count(1))  # no answer is overwritten
    folder = Path(args.folder) if args.folder else next(path for path in folders if not path.exists())
    with open_executor("local", args.jobs) as executor, Progress("recommend", args.quiet) as progress:
        answer = recommend(question, folder, executor, progress)
    print_warnings_of(question.base)
    model = hub_name(args.named_model) if args.named_model else MODEL
    exported = export_scenario(answer.scenario, EXPORTED.get(args.engine, args.engine), model)
    router = "" if answer.fleet is None else start_router(answer.fleet, model, args.engine)
    write_text(folder / exported.file_name, exported.text)
    reports = write_reports(folder)
    if args.json:
        print_json({**answer_json(answer, exported.text, router), "folder": str(folder)})
    else:
        short = exported.text if exported.has_comments else fill(" ".join(exported.text.split()), 120)
        print(answer_text(answer, short, next_command(args, folder, model), router))
        print(f"Files: {folder}: scenario.yaml (defaults), best.yaml; `sim sweep` repeats {reports}")
    return 0 if answer.holds else 1


def start_router(fleet: Fleet, model: str, engine: str) -> str:
    """Return how to start the router of an answer."""
    from servesim.config.router_command import apart_command, router_command

    if fleet.pools:
        return apart_command(fleet.pools, engine)
    return router_command({"name": fleet.router}, fleet.replicas, model, engine)


def write_reports(folder: Path) -> str:
    """Write the page of every sweep and return their names."""
    from servesim.report.sweep_page import write_report
    from servesim.study.result import load_result

    names = [path.parent.name for path in folder.glob("*/experiment.json")]
    names.sort(key=lambda name: (name != "sweep", name))
    for name in names:
        write_report(load_result(folder / name), folder / name / "report.html")
    return ", ".join(f"{name}.yaml ({name}/report.html)" for name in names)


def profile_key(args: argparse.Namespace) -> dict[str, Any]:
    """Return the profile: a measured one, or names."""
    keys = options.names_of(args)
    if args.profile:
        if set(keys) - {"model"}:
            raise BadInput("--profile: expected a measured profile, or --model and --device, got both")
        return {"profile": args.profile}
    if "model" not in keys or "device" not in keys:
        raise BadInput("expected --model and --device, or --profile; `sim models` lists names")
    return {"profile": keys}


def load_key(args: argparse.Namespace) -> dict[str, Any]:
    """Return the requests: a trace, or a workload of the given means."""
    from servesim.study.recommend import workload

    if args.trace:
        if args.prompt or args.output or args.system_prompt:
            raise BadInput("--trace: expected no --prompt, --output and --system-prompt, the trace has the lengths")
        return {"trace": {"path": args.trace, **({} if args.rate is None else {"rate": args.rate})}}
    missing = [name for name in ("rate", "prompt", "output") if getattr(args, name) is None]
    if missing:
        raise BadInput(f"expected --{missing[0]}, or --trace FILE")
    return {"workload": workload(args.rate, args.prompt, args.output, args.system_prompt)}


def next_command(args: argparse.Namespace, folder: Path, model: str) -> str:
    """Return what to do next: replace derived step times by measured ones."""
    if args.profile:
        return f"sim replay {folder}/best.yaml --url http://HOST:PORT measures the settings on the server"
    if args.engine == "vllm":
        return f"sim calibrate vllm -o my-server -- {model} {REPLACES}"
    return f"sim calibrate endpoint --url http://HOST:PORT -o my-server {REPLACES}"
