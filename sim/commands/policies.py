"""`sim policies`: list policies, presets and routers, show their fields, check a policy or a router."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from . import options, policies_prove
from .notes import print_json

SEEDS = 8  # random workloads per check


def register(commands: Any) -> None:
    group = commands.add_parser("policies", help="list, show and check policies, presets and routers")
    group.set_defaults(run=list_policies, json=False)  # without an action
    actions = group.add_subparsers(metavar="ACTION")
    listing = actions.add_parser(
        "list", run=list_policies, help="list policies and presets by engine, with their validation, and routers"
    )
    options.add_json(listing)
    show = actions.add_parser(
        "show", run=show_policy, help="show the fields and defaults of a policy or router, and its validation"
    )
    shown = "name of a policy, preset or router, or path/to/file.py:Name"
    options.add(show, {"NAME=policy_or_preset": shown})
    options.add_json(show)
    options.add_trust(show)
    check = actions.add_parser(
        "check", run=run_check, help="check that a policy or a router follows its contract",
        description="Check the policy contract on random workloads. The policy must be deterministic, respect `hold`, "
        "lose no request, and make the same decisions in simulated and live runs. A router must be deterministic, "
        "change its memory only in the methods that say what happened, and choose replicas that are present.",
    )  # fmt: skip
    options.add(check, {"NAME=policy": "name of a policy or router, or path/to/file.py:Name",
                        "--set FIELD=VALUE": "value of a field (repeatable)"})  # fmt: skip
    options.add_trust(check)
    policies_prove.register(actions)


def list_policies(args: argparse.Namespace) -> int:
    """Print one line per policy and preset, grouped by the family of their engines, and one per router."""
    from servesim.config.policy_list import VALIDATION, list_policies, list_presets
    from servesim.core.class_source import docstring
    from servesim.files.terminal import fill, two_columns
    from servesim.routers import ROUTERS

    lists = {"policies": list_policies(), "presets": list_presets()}
    routers = {name: docstring(kind).splitlines()[0] for name, kind in ROUTERS.items()}
    if args.json:
        rows = {key: [entry._asdict() for entry in entries] for key, entries in lists.items()}
        print_json({**rows, "routers": [{"name": name, "about": about} for name, about in routers.items()]})
        return 0
    for family, row in VALIDATION.items():
        listed = {f"{kind} {e.name}": f"{e.version}, {count_text(e.recordings)}. {e.about}"
                  for kind, key in (("policy", "policies"), ("preset", "presets"))
                  for e in lists[key] if e.family == family}  # fmt: skip
        if listed:
            print(f"{fill(f'{family} (not modelled: {row.not_modelled})')}\n{two_columns(listed)}")
    print(f"routers of a cluster\n{two_columns({f'router {name}': about for name, about in routers.items()})}")
    return 0


def count_text(recordings: int) -> str:
    """Return a number of recordings as text."""
    return f"{recordings or 'no'} recording{'' if recordings == 1 else 's'}"


def show_policy(args: argparse.Namespace) -> int:
    """Print the fields of a policy, of a preset or of a router."""
    from servesim.files.terminal import align_columns, screen_of

    data = describe(args.policy_or_preset)
    if args.json:
        print_json(data, default=str)
        return 0
    if data["preset"] is not None:
        print(f"preset {data['preset']['name']}: {data['preset']['about']}")
        print(f"engine settings: {data['preset']['engine']}")
    print(f"{data['policy']}: {data['about']}")
    if "engine" in data:
        print(f"engine: {data['engine'] or 'none'}")
        print(f"validated against: {data['validated_against']}")
    print("fields:" if data["fields"] else "no fields")
    lines = []
    for field in data["fields"]:
        note = "" if field["value"] == field["default"] else f" (default {field['default']!r})"
        lines.append(("", field["name"], repr(field["value"]), field["help"] + note))
    if lines:
        print("\n".join(align_columns(lines, screen_of(sys.stdout), text_columns=[lines[0][-1]])))
    return 0


def describe(name: str) -> dict[str, Any]:
    """Return what `show` prints about a policy, a preset or a router."""
    from servesim.config.cluster import make_router, names_router
    from servesim.config.registry import about_preset, make_policy, own_fields_first, preset, presets
    from servesim.config.validation import validated_against
    from servesim.core.class_source import docstring
    from servesim.core.fields import policy_fields
    from servesim.engine.rules import rules_of

    tree = preset(name) if name in presets() else {}
    settings = tree.get("policy", {"name": name})
    shown = {"name": name, "about": about_preset(name) or "", "engine": tree.get("engine", {})} if tree else None
    made: Any
    if names_router(name):
        made, engine = make_router(settings, "router"), {}
        known = [*policy_fields(type(made)).values()]
    else:
        made = make_policy(settings)
        known = own_fields_first(type(made))
        engine = {"engine": rules_of(made).engine, "validated_against": validated_against(made)}
    fields = [
        {"name": field.name, "value": getattr(made, field.name), "default": field.default, "help": field.help}
        for field in known
    ]
    about = docstring(type(made)).splitlines()[0]
    return {"preset": shown, "policy": settings["name"], "about": about, **engine, "fields": fields}


def run_check(args: argparse.Namespace) -> int:
    """Check the contract on random workloads; return 1 if the policy or router breaks it."""
    from servesim.config.cluster import make_router, names_router
    from servesim.config.layers import override
    from servesim.config.registry import make_policy
    from servesim.config.user_code import class_line, describe_error, error_text, is_user_class
    from servesim.testing import check_policy, check_router

    settings = override({"name": args.policy}, args.set)
    is_router = names_router(args.policy)
    made: Any = make_router(settings, "router") if is_router else make_policy(settings)
    what, method = ("router", "choices") if is_router else ("policy", "decide")
    place = f"{class_line(type(made), method)}: " if is_user_class(type(made)) else ""
    for seed in range(SEEDS):
        try:
            if is_router:
                check_router(made, seed)
            else:
                check_policy(made, seed, lag=1 + seed % 3, end_lag=seed % 2 == 1)
        except (Exception, SystemExit) as broken:
            message = describe_error(broken)  # an error that the policy itself raised
            if message is None:
                message = f"{place}{args.policy} breaks the {what} contract: {error_text(broken)}"
            print(f"sim: {message}", file=sys.stderr)
            return 1
    print(f"{args.policy}: follows the {what} contract on {SEEDS} random workloads")
    return 0
