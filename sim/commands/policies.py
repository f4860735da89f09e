"""`sim policies`: what schedulers there are, and what each one's knobs mean."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from typing import Any

from servesim.core import Policy

SEEDS = 8  # random workloads that a policy is checked on


def register(commands: Any) -> None:
    group = commands.add_parser("policies", help="list policies and presets, show one's fields")
    group.set_defaults(run=list_policies)
    actions = group.add_subparsers(metavar="ACTION")
    listing = actions.add_parser("list", help="all policies and presets")
    listing.set_defaults(run=list_policies)
    show = actions.add_parser("show", help="fields, defaults, help, what it mirrors and how it was proven")
    show.add_argument("name", metavar="NAME", help="a policy, a preset, or path/to/file.py:Name")
    show.set_defaults(run=show_policy)
    check = actions.add_parser(
        "check", help="put a policy through the contract that every policy keeps",
        description="Put a policy through the contract that every policy keeps, on random requests: leaps change "
        "nothing, equal views give equal plans, nobody is lost, both clocks decide alike.",
    )  # fmt: skip
    check.add_argument("name", metavar="NAME", help="a policy, or path/to/file.py:Name")
    check.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of the policy")
    check.set_defaults(run=run_check)


def list_policies(args: argparse.Namespace) -> int:
    """Print one line each."""
    from servesim.config.registry import about_preset, presets
    from servesim.policies import POLICIES

    print("policies")
    for name, kind in POLICIES.items():
        print(f"  {name:<20} {(kind.__doc__ or '').strip().splitlines()[0]}")
    print("presets")
    for name in presets():
        print(f"  {name:<20} {about_preset(name) or ''}")
    return 0


def show_policy(args: argparse.Namespace) -> int:
    """Print a policy's fields, or a preset's."""
    from servesim.config.registry import about_preset, make_policy, policy_class, preset, presets
    from servesim.core import traits_of

    given: dict[str, Any] = {"name": args.name}
    if args.name in presets():
        print(f"preset {args.name}: {about_preset(args.name) or ''}")
        tree = preset(args.name)
        given = tree.get("policy", given)
        print(f"engine: {tree.get('engine', {})}")
    kind = policy_class(given["name"])
    policy = make_policy(given)
    traits = traits_of(policy)
    print(f"{given['name']}: {(kind.__doc__ or '').strip().splitlines()[0]}")
    print(f"mirrors: {traits.engine or 'no engine'}")
    print(f"proven:  {traits.validated_against}")
    print("fields:")
    for name, value, default, comment in rows(policy):
        note = "" if value == default else f" (default {default!r})"
        print(f"  {name:<28} {value!r:<14} {comment}{note}")
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Try the contract on a few workloads; 1 where it is broken."""
    from servesim.config.overrides import override
    from servesim.config.registry import blamed, make_policy
    from servesim.testing import check_policy

    policy = make_policy(override({"name": args.name}, args.set))
    for seed in range(SEEDS):
        try:
            check_policy(policy, seed, lag=1 + seed % 3, end_lag=seed % 2 == 1)
        except Exception as broken:
            if blamed(broken) is not None:
                raise
            kind = "" if isinstance(broken, AssertionError) else f"{type(broken).__name__}: "
            print(f"sim: {args.name} breaks the contract: {kind}{broken}", file=sys.stderr)
            return 1
    print(f"{args.name}: pure, loses nobody, holds what it promises, decides alike on both clocks ({SEEDS} workloads)")
    return 0


def rows(policy: Any) -> list[tuple[str, Any, Any, str]]:
    """Return name, value, default and help of every field, the policy's own before the common ones."""
    from servesim.config.registry import field_help

    comments = field_help(type(policy))
    common = {field.name for field in fields(Policy)}
    ordered = sorted(fields(policy), key=lambda field: field.name in common)
    return [(f.name, getattr(policy, f.name), f.default, comments.get(f.name, "")) for f in ordered]
