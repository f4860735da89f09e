"""The command or the settings of the real program that a router of a cluster stands for."""

from __future__ import annotations

from collections.abc import Sequence

from servesim.routers import Router

from .cluster import make_router
from .exported import flag_words, shell_command
from .layers import Tree

NGINX = {"round-robin": "", "least-requests": "least_conn; ", "random": "random; ",
         "power-of-two": "random two least_conn; "}  # fmt: skip
SGLANG = {
    "sglang-cache-aware": "cache_aware", "sglang-round-robin": "round_robin", "sglang-manual": "manual",
    "sglang-consistent-hashing": "consistent_hashing", "sglang-power-of-two": "power_of_two",
    "sglang-prefix-hash": "prefix_hash",
}  # fmt: skip
STACK = {
    "production-stack": "prefixaware", "production-stack-round-robin": "roundrobin",
    "production-stack-session": "session",
}  # fmt: skip
SGLANG_FLAGS = ("cache_threshold", "balance_abs_threshold", "balance_rel_threshold")
LLM_D = {"queue": "queue-scorer", "kv": "kv-cache-utilization-scorer", "prefix": "prefix-cache-scorer",
         "load": "load-aware-scorer"}  # fmt: skip


VLLM = ("vllm", "vllm-ascend")
APART = {  # engine -> program, its flag, and what each replica needs
    "vllm": (["vllm-router"], "--vllm-pd-disaggregation",
             """--kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'"""),
    "sglang": (["python", "-m", "sglang_router.launch_router"], "--pd-disaggregation",
               "--disaggregation-mode prefill (decode)"),
}  # fmt: skip


def router_command(settings: Tree, replicas: int, model: str, engine: str) -> str:
    """Return how to start a router in front of some replicas of an engine; a sentence if it has no command."""
    name, router = settings["name"], make_router(settings, "cluster.router")
    hosts = [f"replica-{number}:8000" for number in range(1, replicas + 1)]
    if name in NGINX:
        servers = " ".join(f"server {host};" for host in hosts)
        return f"nginx: upstream replicas {{ {NGINX[name]}{servers} }}"
    if name == "vllm-dp":
        return f"vLLM itself: add --data-parallel-size {replicas} to the command, and start it once"
    if name in SGLANG:
        return sglang_command(SGLANG[name], router, hosts, engine)
    if name in STACK:
        urls = ",".join(f"http://{host}" for host in hosts)
        flags = {"--service-discovery": "static", "--static-backends": urls,
                 "--static-models": ",".join([model] * replicas), "--routing-logic": STACK[name]}  # fmt: skip
        return shell_command(["python", "-m", "vllm_router.app"], flag_words(flags), {}).rstrip()
    if name == "llm-d":
        weights = {scorer: getattr(router, key) for key, scorer in LLM_D.items()}
        shown = ", ".join(f"{scorer} weight {weight:g}" for scorer, weight in weights.items() if weight)
        return f"llm-d endpoint picker: {shown}"
    if name == "dynamo-kv":
        return "python -m dynamo.frontend --router-mode kv"
    return f"router {name} in front of {', '.join(hosts)}"


def sglang_command(policy: str, router: Router, hosts: Sequence[str], engine: str) -> str:
    """Return the command of SGLang's router, or of vllm-router, which has the same rules and flags."""
    flags = {f"--{key.replace('_', '-')}": getattr(router, key, None) for key in SGLANG_FLAGS}
    words = [["--worker-urls", *(f"http://{host}" for host in hosts)], *flag_words({"--policy": policy, **flags})]
    program = APART["vllm" if engine in VLLM else "sglang"][0]
    return shell_command(program, words, {}).rstrip()


def apart_command(pools: Sequence[Tree], engine: str) -> str:
    """Return how to start a router in front of replicas for prefill and for decode, in turn each."""
    known = APART.get(engine)
    shown = " and ".join(f"{pool['replicas']} for {pool['role']}" for pool in pools)
    if known is None:
        return f"a proxy of {engine} in front of {shown}"
    urls = [
        [f"--{pool['role']}", f"http://{pool['role']}-{number}:8000"]
        for pool in pools for number in range(1, pool["replicas"] + 1)
    ]  # fmt: skip
    router = shell_command(known[0], [[known[1]], *urls, ["--policy", "round_robin"]], {}).rstrip()
    return f"add to each replica, {shown}: {known[2]}\n{router}"
