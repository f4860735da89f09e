"""`sim serve`: serve llm-serving's and OpenAI's API with a policy on a live backend."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from servesim.core import BadInput
from servesim.core.limits import MAX_RANKS

from . import options
from .notes import print_warning

if TYPE_CHECKING:
    from servesim.config.scenario import Scenario


def register(commands: Any) -> None:
    serve = commands.add_parser(
        "serve", run=serve_clients, help="serve HTTP clients with a policy on a live backend",
        description="Serve the HTTP APIs of OpenAI (completions, chat) and llm-serving with the policy and engine of"
        " a scenario, and vLLM's metrics at /metrics.",
    )  # fmt: skip
    options.add_scenario_options(serve)
    options.add_device_options(serve)
    serve.set_defaults(model=None)  # the default is given later: backend fake must know whether the user named one
    where = serve.add_argument_group("server")
    host = "address to listen on (default 127.0.0.1: this machine only)"
    options.add(where, {"--host HOST": host}, default="127.0.0.1")
    options.add(where, {
        "--api-key KEY": "accept only clients that send `Authorization: Bearer KEY` (default: the environment variable "
        "SERVESIM_API_KEY, else no key)",
        "--port PORT": "port to listen on, 0 for a free port (default 8835)",
        "--replicas N": "emulated servers, each with an engine of its own, on ports PORT, PORT + 1, ...; needs "
        "--backend fake (default: cluster.replicas of the scenario, else 1)",
        "--max-open-requests N": "maximum open requests; further ones get status 503 (default 4096)",
        "--default-output TOKENS": "length of an answer if the client sets no limit (default 256)",
        "--tokenizer PATH": "tokens of prompts: a tokenizer.model or tokenizer.json, or a folder with one "
        "(default: one word is one token)",
    })  # fmt: skip
    named = "name of the model for clients; repeat it for several (default: the model's own name)"
    options.add(where, {"--served-model-name NAME": named}, action="append", default=[])
    options.add_contest_options(serve)


def serve_clients(args: argparse.Namespace) -> int:
    """Serve until interrupted; return 1 if KV blocks were leaked."""
    from servesim.calibrate.client.protocols import api_key
    from servesim.calibrate.live.setup import DeviceSession
    from servesim.calibrate.server.http import ServerOptions, is_local
    from servesim.calibrate.server.service import Service, serve
    from servesim.calibrate.server.tokenizers import FileTokenizer
    from servesim.web import bound

    check_options(args)
    key = api_key(args.api_key)
    tokenizer = None if args.tokenizer is None else FileTokenizer(args.tokenizer)
    names = tuple(args.served_model_name)
    server = ServerOptions(args.max_open_requests, key, names, args.default_output, tokenizer)
    replicas = replicas_of(args)
    if not 0 <= args.port <= 65536 - len(replicas):
        raise BadInput(f"--port: expected 0 to {65536 - len(replicas)}, got {args.port}")
    with ExitStack() as stack:
        ports = [args.port + number if args.port else 0 for number in range(len(replicas))]
        sockets = [stack.enter_context(bound(args.host, port)) for port in ports]
        if key is None and not is_local(args.host):
            print_warning(f"all machines that reach {args.host or 'this one'} can send requests; set --api-key")
        services = []
        for (scenario, chosen), each in zip(replicas, sockets):
            session = DeviceSession(args.backend, args.model or "tiny", args.worker_python, args.weights, chosen)
            stack.enter_context(session).load([scenario])
            services.append(Service(session, scenario, each, server))
        states = serve(services)
    leaked = sum(state["total_blocks"] - state["free_blocks"] for state in states)
    calls = sum(state["calls"] for state in states)
    print(f"stopped after {calls} model calls" + (f"; {leaked} blocks leaked" if leaked else ""))
    return 1 if leaked else 0


def replicas_of(args: argparse.Namespace) -> list[tuple[Scenario, dict[str, Any]]]:
    """Return the scenario and the backend options of each server."""
    from servesim.calibrate.device.fake import DEFAULT_COST
    from servesim.config.cluster import Cluster
    from servesim.config.layers import override
    from servesim.config.scenario import scenario_of_pool
    from servesim.costs.device_profile import load_profile
    from servesim.costs.mapping import cost_mapping

    tree, scenario = options.read_scenario(args)
    cluster = scenario.cluster or Cluster()
    if args.replicas is not None and cluster.pools and args.replicas != cluster.size:
        raise BadInput(f"--replicas: expected {cluster.size}, the replicas of cluster.pools, got {args.replicas}")
    if args.replicas is not None and not cluster.pools:
        cluster = cluster.model_copy(update={"replicas": args.replicas})
    if cluster.size > 1 and args.backend != "fake":
        raise BadInput(f"--replicas {cluster.size}: expected --backend fake; a device runs one server")
    servers: list[tuple[Scenario, dict[str, Any]]] = []
    for pool in cluster.all_pools:
        own, chosen = scenario_of_pool(scenario, pool), override({}, args.option)
        if args.backend == "fake" and own.drafts is not None and own.drafts.acceptance == "column":
            raise BadInput("speculative.acceptance: expected a rate or a list of rates, requests of clients have none")
        if args.backend == "fake" and ("profile" in tree or pool.profile is not None):
            profile = load_profile(own.profile).for_run(own.engine.sampling)
            chosen.setdefault("cost", cost_mapping(profile.cost))
        elif args.backend == "fake":
            chosen.setdefault("cost", DEFAULT_COST)
        servers += [(own, chosen)] * pool.size
    return servers


def check_options(args: argparse.Namespace) -> None:
    """Raise BadInput for the first option with a wrong value."""
    if args.max_open_requests < 1:
        raise BadInput(f"--max-open-requests: expected at least 1, got {args.max_open_requests}")
    if args.default_output < 1:
        raise BadInput(f"--default-output: expected at least 1, got {args.default_output}")
    if not all(args.served_model_name):
        raise BadInput("--served-model-name: expected a name, got an empty text")
    if args.replicas is not None and not 0 < args.replicas <= MAX_RANKS:
        raise BadInput(f"--replicas: expected 1 to {MAX_RANKS}, got {args.replicas}")
    if args.backend == "fake":
        for option, value in (("--model", args.model), ("--weights", args.weights)):
            if value is not None:
                raise BadInput(f"{option} {value}: backend fake computes no model; leave {option} out")
