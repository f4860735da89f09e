"""`sim serve`: a policy behind llm-serving's endpoints and OpenAI's completions, on a live backend."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from servesim.core import BadInput

from .options import add_device_options, add_scenario_options, scenario_tree


def register(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve HTTP clients with a policy on a live backend",
        description="Answer llm-serving's endpoints and OpenAI completions with the scenario's policy and engine.",
    )
    add_scenario_options(serve)
    add_device_options(serve)
    where = serve.add_argument_group("server")
    where.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    where.add_argument("--port", type=int, default=8835, help="port to listen on, 0 for a free one (8835)")
    where.add_argument("--queue", type=int, default=4096, metavar="N", help="requests that may be open at once (4096)")
    serve.set_defaults(run=serve_clients)


def serve_clients(args: argparse.Namespace) -> int:
    """Serve until interrupted; 1 when blocks were lost."""
    from servesim.calibrate.device.backend import OutOfMemory
    from servesim.calibrate.device.fake import COST
    from servesim.calibrate.device.worker_client import WorkerFailed
    from servesim.calibrate.live.setup import Stage
    from servesim.calibrate.server.service import serve
    from servesim.config.overrides import override
    from servesim.config.scenario import scenario_from
    from servesim.costs.device_profile import load_profile
    from servesim.costs.mapping import mapping

    if args.queue < 1 or not 0 <= args.port < 65536:
        raise BadInput(f"--queue {args.queue} --port {args.port}: expected at least 1, and a port")
    tree = scenario_tree(args)
    scenario = scenario_from(tree, args.scenario or "scenario")
    options = override({}, args.option)
    if args.backend == "fake":
        options.setdefault("cost", mapping(load_profile(scenario.profile).cost) if "profile" in tree else COST)
    try:
        with Stage(args.backend, args.model, args.worker_python, args.weights, options) as stage:
            stage.load([scenario])
            state = serve(stage, scenario, args.host, args.port, args.queue)
    except (WorkerFailed, OutOfMemory) as failed:
        print(f"sim: {failed}", file=sys.stderr)
        return 1
    lost = state["total_blocks"] - state["free_blocks"]
    print(f"ended after {state['calls']} model calls" + (f"; {lost} blocks lost" if lost else ""))
    return 1 if lost else 0
