"""Old names of scenario keys: input may use either name, results and written files are the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import servesim
import yaml
from servesim.calibrate.adapter.llm_serving import policy_from
from servesim.cli import main
from servesim.config.old_keys import NEW, OLD, rename_keys
from servesim.config.registry import make_policy
from servesim.config.scenario import EngineConfig, scenario_from
from servesim.config.user_code import allow_code
from servesim.core import BadInput
from servesim.policies import OLD_FIELDS, POLICIES

ARRIVALS = {"kind": "diurnal", "rate": 4, "swing": 0.5}
CLOSED = {"kind": "closed", "users": 4, "think": 0.5}
LENGTHS = {"prompt": 20, "output": 10}
SCENARIO: dict[str, Any] = {
    "workload": {"mix": [
        {"requests": 20, "arrivals": ARRIVALS, "lengths": LENGTHS},
        {"requests": 8, "arrivals": CLOSED, "lengths": LENGTHS},
        {"requests": 8, "arrivals": {"kind": "contest", "X": 5, "dispatch": 0.001}, "lengths": LENGTHS},
        {"contest": {"X": 5, "T": 4, "dispatch": 0.003}},
    ]},
    "policy": {
        "name": "llm-serving", "decode_batch": 6, "evicted": "swapped", "serve_first": "waiting", "open_above": 1,
        "mend_delay": True,
    },
    "engine": {
        "num_blocks": 60, "prefill_gears": [520], "decode_gears": [6], "lost_after": 20, "refuse": "never",
    },
}  # fmt: skip
SWEEP: dict[str, Any] = {
    "base": {"preset": "yyds", "workload": {"contest": {"X": 8, "T": 3, "dispatch": 0.003}},
             "engine": {"num_blocks": 60, "prefill_gears": [520], "lost_after": 500}},
    "params": [
        {"policy.evicted": ["front", "swapped"], "engine.decode_gears": [[8], [16]]},
        {"policy": [{"name": "llm-serving", "evicted": "ranked"}, {"name": "splitfuse", "mend_flush": True}]},
    ],
    "baseline": {"policy.evicted": "front"},
}  # fmt: skip
ALL_OLD = re.compile(
    r"\b(prefill_gears|decode_gears|lost_after|refuse|swing|think|dispatch|evicted|serve_first|open_above|mend_\w+)\b"
)
NEW_NAMES = {**OLD_FIELDS, "prefill_gears": "prefill_buckets", "decode_gears": "decode_buckets",
             "lost_after": "client_timeout", "refuse": "reject_oversized", "swing": "amplitude",
             "think": "think_time", "dispatch": "send_overhead"}  # fmt: skip


def with_new_names(tree: Any) -> Any:
    """Return a tree with every old name replaced in its text, independent of the code under test."""
    return json.loads(ALL_OLD.sub(lambda match: NEW_NAMES[match[1]], json.dumps(tree)))


def write(folder: Path, name: str, tree: Any) -> str:
    (folder / name).write_text(yaml.safe_dump(tree, sort_keys=False))
    return str(folder / name)


def contents(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")
    return {path.name: path.read_bytes() for path in files}


def test_old_and_new_names_give_the_same_run(tmp_path: Path) -> None:
    for name, tree in (("old", SCENARIO), ("new", with_new_names(SCENARIO))):
        assert main(["run", write(tmp_path, f"{name}.yaml", tree), "-o", str(tmp_path / name)]) == 0
    assert contents(tmp_path / "old") == contents(tmp_path / "new")
    old, new = (json.loads((tmp_path / name / "manifest.json").read_text())["scenario"] for name in ("old", "new"))
    assert old == new
    assert {key: old["policy"][key] for key in SCENARIO["policy"]} == SCENARIO["policy"]
    assert old["workload"] == SCENARIO["workload"]
    assert {key: old["engine"][key] for key in SCENARIO["engine"]} == SCENARIO["engine"]
    assert servesim.load(tmp_path / "old").scenario["engine"]["prefill_buckets"] == [520]  # type: ignore[union-attr]


def test_old_and_new_names_give_the_same_sweep(tmp_path: Path) -> None:
    for name, tree in (("old", SWEEP), ("new", with_new_names(SWEEP))):
        file = write(tmp_path, "sweep.yaml", tree)
        assert main(["sweep", file, "-o", str(tmp_path / name), "-j", "1", "-q", "--no-report"]) == 0
    assert contents(tmp_path / "old") == contents(tmp_path / "new")
    header = (tmp_path / "new" / "summary.csv").read_text().partition("\n")[0]
    assert "policy.evicted,engine.decode_gears," in header
    best = yaml.safe_load((tmp_path / "new" / "best.yaml").read_text())
    assert best["engine"]["lost_after"] == 500
    assert main(["sweep", str(tmp_path / "old"), "-j", "1", "-q", "--no-report"]) == 0  # continues what it wrote
    assert "policy.preempted_to" in servesim.load(tmp_path / "old").table  # type: ignore[union-attr]


def test_old_and_new_names_give_the_same_search(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    tree = {"base": SWEEP["base"], "params": {"policy.evicted": ["front", "swapped"], "policy.open_above": [0, 1, 2]}}
    for name, keys in (("old", tree), ("new", with_new_names(tree))):
        file = write(tmp_path, "search.yaml", {**keys, "trials": 4})
        command = ["search", file, "-o", str(tmp_path / name), "-j", "1", "-q", "--no-report"]
        assert main(command) == 0
        assert main([*command, "--resume", "--trials", "6"]) == 0
    old, new = contents(tmp_path / "old"), contents(tmp_path / "new")
    assert b"policy.evicted" in old.pop("study.journal") and b"policy.evicted" in new.pop("study.journal")
    assert old == new


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"engine": {"prefill_gears": [1], "prefill_buckets": [2]}}, "engine.prefill_buckets: expected one of"),
        ({"policy": {"evicted": "front", "preempted_to": "swapped"}}, "policy.preempted_to: expected one of"),
        (
            {"workload": {"contest": {"X": 1, "T": 9, "dispatch": 0, "send_overhead": 0}}},
            "workload.contest.send_overhead",
        ),
    ],
)
def test_both_names_in_one_file_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tree: Any, message: str
) -> None:
    assert main(["run", write(tmp_path, "both.yaml", tree)]) == 2
    said = capsys.readouterr().err
    assert f"both.yaml: {message}" in said and "(its old name), got both" in said


def test_both_names_in_a_sweep_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params = {"policy.evicted": ["front"], "policy.preempted_to": ["swapped"]}
    assert main(["sweep", write(tmp_path, "both.yaml", {**SWEEP, "params": params})]) == 2
    assert "both.yaml: params.policy.preempted_to: expected one of" in capsys.readouterr().err


def test_settings_on_the_command_line_take_both_names(tmp_path: Path) -> None:
    file = write(tmp_path, "a.yaml", SCENARIO)
    for name, settings in {
        "old": ["policy.evicted=ranked", "engine.lost_after=3", "engine={num_blocks: 60, refuse: always}"],
        "new": [
            "policy.preempted_to=ranked",
            "engine.client_timeout=3",
            "engine={num_blocks: 60, reject_oversized: always}",
        ],
    }.items():
        options = [word for setting in settings for word in ("--set", setting)]
        assert main(["run", file, "-o", str(tmp_path / name), *options]) == 0
    assert contents(tmp_path / "old") == contents(tmp_path / "new")


def test_python_arguments_take_both_names() -> None:
    workload = {"contest": {"X": 8, "T": 3, "dispatch": 0.003}}
    old = servesim.run(
        preset="yyds", workload=workload, engine={"prefill_gears": [520]}, settings={"policy.evicted": "front"}
    )
    new = servesim.run(
        preset="yyds", workload=with_new_names(workload), engine={"prefill_buckets": [520]},
        settings={"policy.preempted_to": "front"},
    )  # fmt: skip
    assert old.scenario == new.scenario
    assert old.requests.equals(new.requests)
    assert old.scenario["policy"]["preempted_to"] == "front"


def test_errors_show_the_new_names() -> None:
    with pytest.raises(BadInput, match=r"engine\.client_timeout: expected"):
        scenario_from({"engine": {"lost_after": -1}})
    with pytest.raises(BadInput, match=r"policy\.preempted_to: expected one of front"):
        scenario_from({"policy": {"evicted": "nowhere"}})


def test_a_users_policy_may_have_a_field_with_an_old_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom servesim.core import Policy\n\n\n@dataclass(frozen=True)\n"
        "class Mine(Policy):\n    evicted: int = 0  # requests\n\n    def decide(self, view):\n        return None\n"
    )
    with allow_code(trust=True):
        scenario = scenario_from({"policy": {"name": f"{file}:Mine", "evicted": 3}})
        assert scenario.make_policy().evicted == 3  # type: ignore[attr-defined]
    assert rename_keys(scenario.policy, OLD["policy"])["evicted"] == 3


def test_the_adapter_takes_both_names() -> None:
    old, new = (
        policy_from('{"evicted": "swapped", "open_above": 1}'),
        policy_from('{"preempted_to": "swapped", "admission_hysteresis": 1}'),
    )
    assert old == new == make_policy({"name": "llm-serving", "evicted": "swapped", "open_above": 1})
    with pytest.raises(BadInput, match="preempted_to: also set under its old name evicted"):
        policy_from('{"evicted": "swapped", "preempted_to": "front"}')


def test_every_new_name_exists_and_no_old_one_does() -> None:
    fields = {name for kind in POLICIES.values() for name in kind.__dataclass_fields__}
    assert set(OLD_FIELDS.values()) <= fields and not set(OLD_FIELDS) & fields
    assert set(NEW["engine"].values()) <= set(EngineConfig.model_fields)
    assert not set(NEW["engine"]) & set(EngineConfig.model_fields)
