"""The YAML reader, in scenario files, --set options and sweep parameters."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from servesim.config.layers import override, read_scenario_file
from servesim.config.registry import make_policy, presets
from servesim.config.scenario import scenario_from
from servesim.core import BadInput
from servesim.costs.device_profile import bundled_profiles
from servesim.files.yaml_reader import MAX_YAML_BYTES, Reader, load, parse, read_yaml
from servesim.study.sweep_file import read_experiment

from ..conftest import ROOT

EXPECTED: dict[str, Any] = {
    "1e-5": 1e-5, "2E3": 2000.0, "-1e3": -1000.0, "1.e+2": 100.0, ".5": 0.5, "1.5": 1.5, "12e03": 12000.0,
    "64": 64, "-3": -3, "+4": 4, "1_000": 1000, "010": 10, "0x1F": 31, "0o17": 15,
    "true": True, "False": False, "null": None, "~": None, "": None,
    "no": "no", "off": "off", "yes": "yes", "on": "on", "y": "y", "1:30": "1:30", "2026-11-15": "2026-11-15",
    "1e": "1e", "e5": "e5", "=": "=", "1.2.3": "1.2.3", "my_policy.py:Gather": "my_policy.py:Gather", "'1e-5'": "1e-5",
}  # fmt: skip


@pytest.mark.parametrize("text", EXPECTED)
def test_a_value_has_the_expected_type(text: str) -> None:
    value = parse(text, "here")
    assert value == EXPECTED[text]
    assert type(value) is type(EXPECTED[text])


def test_inf_and_nan_are_read() -> None:
    assert parse("[.inf, -.Inf]", "here") == [math.inf, -math.inf]
    assert math.isnan(parse(".nan", "here"))


def test_a_key_merged_from_an_anchor_can_be_overridden() -> None:
    text = "a: &a {x: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b, y: 3}\nd: {<<: *b}\n"
    assert parse(text, "here")["c"] == {"x": 2, "y": 3}


@pytest.mark.parametrize(
    "path", [*presets().values(), *sorted((ROOT / "examples").glob("*.yaml"))], ids=lambda p: p.stem
)
def test_our_files_read_the_same_with_plain_pyyaml(path: Path) -> None:
    assert read_yaml(path) == yaml.safe_load(path.read_text(encoding="utf-8"))


def test_a_set_option_reads_like_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xef\xbb\xbfpolicy: {delay_factor: 1e-5}\r\nengine: {num_blocks: 2E3}\r\n")
    settings = override({}, ["policy.delay_factor=1e-5", "engine.num_blocks=2E3"])
    for tree in (read_scenario_file(tmp_path / "a.yaml"), settings):
        scenario = scenario_from(tree)
        assert scenario.policy["delay_factor"] == 1e-5
        assert scenario.engine.num_blocks == 2000


def test_a_sweep_parameter_reads_like_a_file(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        "base: {workload: {contest: {X: 5, T: 2}}}\n"
        "params: {policy.delay_factor: [1e-5, 2E0], engine.num_blocks: {range: [1e2, 2e2], count: 2}}\n"
    )
    experiment = read_experiment(tmp_path / "s.yaml")
    assert [experiment.tree(config)["policy"].get("delay_factor") for config in range(1, 5)] == [1e-5, 1e-5, 2.0, 2.0]


def test_a_whole_number_may_be_written_with_an_exponent() -> None:
    assert make_policy({"name": "llm-serving", "decode_batch": 2e1}).decode_batch == 20  # type: ignore[attr-defined]
    with pytest.raises(BadInput, match=r"expected int, got 1\.5"):
        make_policy({"name": "llm-serving", "decode_batch": 1.5})


@pytest.mark.parametrize(("word", "expected"), [("on", True), ("yes", True), ("off", False), ("no", False)])
def test_a_boolean_accepts_on_off_yes_no(word: str, expected: bool) -> None:
    tree = override({}, [f"policy.fix_delay_bugs={word}", f"engine.front_end.end_lag={word}"])
    scenario = scenario_from(tree)
    assert scenario.engine.front_end.end_lag is expected
    assert scenario.make_policy().fix_delay_bugs is expected  # type: ignore[attr-defined]


def test_another_encoding_gives_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes("name: Müller\n".encode("latin-1"))
    with pytest.raises(BadInput, match=r"expected text in UTF-8, got byte 0xfc at 7$"):
        read_yaml(tmp_path / "a.yaml")


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefghijk", "bcdefghijkl")
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BOMB, "more than 50000 values (aliases count in full)"),
        ("a: &a [*a]", "line 1, column 8: an alias inside its own anchor"),
        (
            "a: &a {x: 1}\n" + BOMB.partition("\n")[2].replace("[", "{<<: [").replace("]", "]}"),
            "more than 50000 values",
        ),
        ("a: &a " + "y" * 100_000 + "\nb: [" + "*a, " * 10_000 + "]", "more than 50000 values"),
        ("[" * 100_000, "more than 60 levels"),
        ("\n".join(" " * n + "a:" for n in range(1000)), "more than 60 levels"),
        ("- " * 5000 + "1", "more than 60 levels"),
        ("a: 0x_", "line 1, column 4: expected int, got '0x_'"),
        ("a: !!int abc", "line 1, column 4: expected int, got 'abc'"),
        ("a: !!float abc", "expected float, got 'abc'"),
        ("a: !!bool abc", "expected bool, got 'abc'"),
        ("a: !!timestamp abc", "expected timestamp, got 'abc'"),
        ("a: !!timestamp 2026-99-99", "expected timestamp, got '2026-99-99'"),
        ("a: " + "1" * 5000, "expected at most 300 digits, got 5000"),
        ("a: 0x" + "1" * 5000, "line 1, column 4: expected int, got '0x1111"),
        ("a: '" + "k" * 5000, "found unexpected end of stream"),
        ("*" + "k" * 5000, "found undefined alias"),
        ("k" * 900 + ": 1\n" + "k" * 900 + ": 1", "appears twice"),
        ('a: "\\ud800"', r"got \ud800"),
        ("a: \x07", "special characters are not allowed"),
        ("{[1]: 2}", "found unhashable key"),
    ],
)
def test_a_hostile_file_gives_one_line_at_once(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
    start = time.process_time()
    with pytest.raises(BadInput) as caught:
        read_yaml(tmp_path / "a.yaml")
    assert time.process_time() - start < 20
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'a.yaml'}: not valid YAML: ")
    assert reason in message
    assert len(message) < 500
    assert message.isprintable()


def test_a_file_over_the_size_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"#" * (MAX_YAML_BYTES + 1))
    with pytest.raises(BadInput, match="expected at most 1 MiB, got more"):
        read_yaml(tmp_path / "a.yaml")


def test_useful_aliases_and_hexadecimal_numbers_are_read() -> None:
    assert parse("a: &a [1, 2]\nb: [*a, *a]\nc: 0xFFFFFFFF", "x")["b"] == [[1, 2], [1, 2]]


def test_a_reader_may_change_what_it_has_read() -> None:
    """A text is parsed once per process."""
    first = parse("a: [1, 2]", "file")
    first["a"].append(3)
    assert parse("a: [1, 2]", "file") == {"a": [1, 2]}


PIECES = (
    "a", "key", "12", "1e-3", "010", "~", "'q'", '"d\\n"', ":", ": ", "- ", "-", "? ", ",", "[", "]", "{", "}", "\n",
    "\n  ", "\n- ", "\t", " ", "#", " # c\n", "&a ", "*a", "!", "!!int ", "|\n  ", ">-\n  ", "%YAML 1.1\n", "---\n",
    "...\n", "\r", "\x85", "\ufeff", "\xa0", "@", "%", "<<: ", "'", '"', "a:b", "\x07", "a: b\n",
    "a: {b: 1, c: [x, y]}\n", "- &a {k: 1}\n",
)  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_libyaml_and_pyyaml_read_the_same(text: str) -> None:
    def outcome(read: Any) -> str:
        try:
            return repr(read(text))
        except (yaml.YAMLError, ValueError) as error:
            return f"{type(error)} {error}"

    assert outcome(load) == outcome(lambda text: yaml.load(text, Reader))


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML has no libyaml here")
def test_the_files_of_the_package_are_read_by_libyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("yaml.scanner.Scanner.fetch_more_tokens", None)  # PyYAML's own code cannot read a token
    for path in (*presets().values(), *(folder / "profile.yaml" for folder in bundled_profiles().values())):
        assert load(path.read_text(encoding="utf-8")), path
