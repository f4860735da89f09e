"""Export a scenario to a real server: `sim export`.

The result is a command with flags, or a configuration file. policies/*/export.py writes it. What the server has no
setting for is listed as `not expressed`. Settings with which the server does not start are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Optional

from servesim.core import BadInput
from servesim.costs.named_profile import is_named
from servesim.costs.public_models import hub_name
from servesim.files.read import show_path
from servesim.policies import FAMILIES

from .exported import MODEL, Exported, refusals_of
from .layers import Tree
from .scenario import Scenario, scenario_from

Exporter = Callable[..., Exported]  # of a scenario and the model that the server loads


def find_targets() -> dict[str, dict[str, Exporter]]:
    """Return the servers; of each one, the policies that reproduce its scheduler and their exporters."""
    targets: dict[str, dict[str, Exporter]] = {}
    for folder, family in FAMILIES.items():
        if family.server is not None:
            exporters = import_module(f"servesim.policies.{folder}.export").EXPORTS
            targets.setdefault(family.server, {}).update(exporters)
    return targets


TARGETS = find_targets()


def exporter_of(scenario: Scenario, target: str) -> Exporter:
    """Return the function that exports a scenario; raise BadInput for a policy of another engine."""
    exporters, name = TARGETS[target], scenario.policy["name"]
    if name not in exporters:
        fits = next((f"; export it to {other}" for other, names in TARGETS.items() if name in names), "")
        article = "an" if target[0] in "al" else "a"
        *most, last = exporters
        known = " and ".join(filter(None, (", ".join(most), last)))
        raise BadInput(f"policy {show_path(name)}: only {known} policies have {article} {target} configuration{fits}")
    return exporters[name]


def served_model(profile: Any) -> str:
    """Return the model of a profile by names, as on Hugging Face; MODEL if it names none."""
    name = profile.get("model") if is_named(profile) else None
    return hub_name(name) if isinstance(name, str) else MODEL


def export_scenario(scenario: Scenario, target: str, model: Optional[str] = None) -> Exported:
    """Return the settings of a server that runs a scenario; raise BadInput if the server does not start with them.

    `model`: the name or the folder that the server loads (default: that of a profile by names).
    """
    exported = exporter_of(scenario, target)(scenario, model or served_model(scenario.profile))
    refusals = refusals_of(scenario)
    if refusals:
        raise BadInput(f"{exported.server} does not start with these settings: {'; '.join(refusals)}")
    return exported


def export_text(tree: Tree, target: str, model: Optional[str], source: str) -> str:
    """Return the command or the configuration file of a server as text; `source` names where it comes from."""
    if target not in TARGETS:
        raise BadInput(f"server {target!r}: expected one of {', '.join(TARGETS)}")
    return export_scenario(scenario_from(tree), target, model).render(source)
