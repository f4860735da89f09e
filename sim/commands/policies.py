"""`sim policies`: list policies and presets, show their fields, check a policy."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Optional

from . import options, policies_prove
from .notes import print_json

SEEDS = 8  # random workloads per check


def register(commands: Any) -> None:
    group = commands.add_parser("policies", help="list, show and check policies and presets")
    group.set_defaults(run=list_policies, json=False)
    actions = group.add_subparsers(metavar="ACTION")
    listing = actions.add_parser("list", help="list policies and presets by engine, with their validation")
    options.add_json(listing)
    listing.set_defaults(run=list_policies)
    show = actions.add_parser("show", help="show the fields and defaults of a policy, its engine and its validation")
    show.add_argument("policy_or_preset", metavar="NAME", help="name of a policy or preset, or path/to/file.py:Name")
    options.add_json(show)
    options.add_trust(show)
    show.set_defaults(run=show_policy)
    check = actions.add_parser(
        "check", help="check that a policy follows the policy contract",
        description="Check the policy contract on random workloads. The policy must be deterministic, respect `hold`, "
        "lose no request, and make the same decisions in simulated and live runs.",
    )  # fmt: skip
    check.add_argument("policy", metavar="NAME", help="policy name, or path/to/file.py:Name")
    options.add_setting(check, "value of a policy field (repeatable)", "FIELD=VALUE")
    options.add_trust(check)
    check.set_defaults(run=run_check)
    policies_prove.register(actions)


def list_policies(args: argparse.Namespace) -> int:
    """Print one line per policy and preset, grouped by the family of their engines."""
    from servesim.config.validation import VALIDATION, list_policies, list_presets
    from servesim.files.terminal import fill, two_columns

    lists = {"policies": list_policies(), "presets": list_presets()}
    if args.json:
        rows = {key: [entry._asdict() for entry in entries] for key, entries in lists.items()}
        print_json(rows)
        return 0
    for family, row in VALIDATION.items():
        listed = {f"{kind} {e.name}": f"{e.version}, {count_text(e.recordings)}. {e.about}"
                  for kind, key in (("policy", "policies"), ("preset", "presets"))
                  for e in lists[key] if e.family == family}  # fmt: skip
        if listed:
            print(f"{fill(f'{family} (not modelled: {row.not_modelled})')}\n{two_columns(listed)}")
    return 0


def count_text(recordings: int) -> str:
    """Return a number of recordings as text."""
    return f"{recordings or 'no'} recording{'' if recordings == 1 else 's'}"


def show_policy(args: argparse.Namespace) -> int:
    """Print the fields of a policy or of a preset."""
    from servesim.files.terminal import align_columns, screen_of

    data = describe_policy(args.policy_or_preset)
    if args.json:
        print_json(data, default=str)
        return 0
    if data["preset"] is not None:
        print(f"preset {data['preset']['name']}: {data['preset']['about']}")
        print(f"engine settings: {data['preset']['engine']}")
    print(f"{data['policy']}: {data['about']}")
    print(f"engine: {data['engine'] or 'none'}")
    print(f"validated against: {data['validated_against']}")
    print("fields:")
    lines = []
    for field in data["fields"]:
        note = "" if field["value"] == field["default"] else f" (default {field['default']!r})"
        lines.append(("", field["name"], repr(field["value"]), field["help"] + note))
    print("\n".join(align_columns(lines, screen_of(sys.stdout), text_columns=[lines[0][-1]])))
    return 0


def describe_policy(name: str) -> dict[str, Any]:
    """Return what `show` prints about a policy or a preset."""
    from servesim.config.registry import about_preset, make_policy, own_fields_first, policy_class, preset, presets
    from servesim.config.validation import validated_against
    from servesim.core.class_source import docstring
    from servesim.engine.rules import rules_of

    settings: dict[str, Any] = {"name": name}
    shown: Optional[dict[str, Any]] = None
    if name in presets():
        tree = preset(name)
        settings = tree.get("policy", settings)
        shown = {"name": name, "about": about_preset(name) or "", "engine": tree.get("engine", {})}
    policy = make_policy(settings)
    rules = rules_of(policy)
    return {
        "preset": shown,
        "policy": settings["name"],
        "about": docstring(policy_class(settings["name"])).splitlines()[0],
        "engine": rules.engine,
        "validated_against": validated_against(policy),
        "fields": [
            {"name": field.name, "value": getattr(policy, field.name), "default": field.default, "help": field.help}
            for field in own_fields_first(type(policy))
        ],
    }


def run_check(args: argparse.Namespace) -> int:
    """Check the contract on random workloads; return 1 if the policy breaks it."""
    from servesim.config.layers import override
    from servesim.config.registry import make_policy
    from servesim.config.user_code import class_line, describe_error, error_text, is_user_class
    from servesim.testing import check_policy

    policy = make_policy(override({"name": args.policy}, args.set))
    place = f"{class_line(type(policy), 'decide')}: " if is_user_class(type(policy)) else ""
    for seed in range(SEEDS):
        try:
            check_policy(policy, seed, lag=1 + seed % 3, end_lag=seed % 2 == 1)
        except (Exception, SystemExit) as broken:
            message = describe_error(broken)  # an error that the policy itself raised
            if message is None:
                message = f"{place}{args.policy} breaks the policy contract: {error_text(broken)}"
            print(f"sim: {message}", file=sys.stderr)
            return 1
    print(f"{args.policy}: follows the policy contract on {SEEDS} random workloads")
    return 0
