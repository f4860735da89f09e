"""`sim check`: the verdict of every constraint, its interval, exit codes and files."""

from __future__ import annotations

import json
import math
from functools import cache
from itertools import product
from pathlib import Path
from statistics import NormalDist
from typing import Any, Optional
from xml.etree import ElementTree

import pytest
import yaml
from servesim.statistics.constraints import Bound, parse_bound
from servesim.statistics.intervals import Interval, interval
from servesim.study.check import Check, CheckedBound, append_summary, check_runs, write_junit
from servesim.study.compared_runs import ComparedRuns
from servesim.study.single_run import Task, context_json, run_tasks
from servesim.traces.export import export
from servesim.traces.make.synth import synthesise

from . import sweeps

SCENARIO = {"trace": {"path": "trace.csv"}, "policy": {"name": "llm-serving"}, "profile": sweeps.COSTS}
ATTRIBUTES = {  # of the JUnit schema of Jenkins: required, optional
    "testsuites": ((), ("name", "time", "tests", "failures", "errors")),
    "testsuite": (("name", "tests", "failures", "errors"), ("time", "skipped", "timestamp", "hostname", "id")),
    "testcase": (("name",), ("time", "classname")),
    "failure": ((), ("type", "message")),
    "skipped": ((), ("type", "message")),
    "system-out": ((), ()),
}


def scenario(folder: Path, name: str = "scenario", **changes: Any) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(sweeps.base(**changes)))
    return path


def sides(*values: float, metric: str = "mean_ttft_ms", name: str = "a") -> ComparedRuns:
    """Return runs whose replications have these values."""
    runs = [{"seed": seed, "metrics": {metric: value, "failed": 0.0}} for seed, value in enumerate(values)]
    return ComparedRuns(name, runs, scenario=SCENARIO)


def checked(*words: Any, code: Optional[int] = None, capsys: Any) -> Any:
    """Return the JSON of a check."""
    capsys.readouterr()
    found = sweeps.sim("check", *words, "-j", 1, "--json", "-q")
    result = json.loads(capsys.readouterr().out)
    assert code is None or found == code, result
    return result


@pytest.mark.parametrize("sign", ["<=", ">="])
def test_the_verdict_agrees_with_the_interval(sign: str) -> None:
    for low, high, limit in product((-3.0, -0.5, 0.0, 0.5, 3.0), repeat=3):
        if low <= high:
            meets = [value <= limit if sign == "<=" else value >= limit for value in (low, high)]
            expected = "met" if all(meets) else "undecided" if any(meets) else "broken"
            assert Bound("makespan", sign, limit).verdict(low, high) == expected


@pytest.mark.parametrize("seed", [0, 2**40])
@pytest.mark.parametrize(("sign", "codes"), [("<=", (3, 0)), (">=", (0, 3))])
def test_a_distant_limit_is_decided_for_every_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int, sign: str, codes: tuple[int, int]
) -> None:
    file = scenario(tmp_path)
    words = (file, "--seed", seed, "--replications", 3, "--intervals", 4, "--subject-to")
    for limit, code in zip(("0.001", "1e9"), codes):
        found = checked(*words, f"mean_ttft_ms {sign} {limit}", code=code, capsys=capsys)
        assert found["verdict"] == {0: "met", 3: "broken"}[code]


def test_a_limit_equal_to_the_mean_is_undecided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (scenario(tmp_path), "--replications", 4, "--subject-to")
    (row, failed) = checked(*words, "mean_ttft_ms <= 1e9", code=0, capsys=capsys)["constraints"]
    assert failed["constraint"] == "failed <= 0" and failed["verdict"] == "met"
    for sign in ("<=", ">="):
        bound = f"mean_ttft_ms {sign} {row['value']!r}"
        assert checked(*words, bound, code=1, capsys=capsys)["verdict"] == "undecided"
        assert checked(*words, bound, "--allow-undecided", code=0, capsys=capsys)["verdict"] == "undecided"
    inside, outside = row["value"] + 0.99 * row["half_width"], row["value"] + 1.01 * row["half_width"]
    assert checked(*words, f"mean_ttft_ms <= {inside!r}", code=1, capsys=capsys)
    assert checked(*words, f"mean_ttft_ms <= {outside!r}", code=0, capsys=capsys)


def test_the_interval_is_that_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = sweeps.sweep_file(tmp_path, objectives=["mean_ttft_ms"], replications=4)
    words = ("sweep", file, "-o", tmp_path / "out", "-j", 1, "-q", "--no-report", "--intervals", 6, "--json")
    assert sweeps.sim(*words) == 0
    [swept] = [row for row in json.loads(capsys.readouterr().out)["configurations"] if row["config"] == 0]
    words = (scenario(tmp_path), "--replications", 4, "--intervals", 6, "--subject-to", "mean_ttft_ms <= 1e9")
    row = checked(*words, code=0, capsys=capsys)["constraints"][0]
    assert row["value"] == swept["metrics"]["mean_ttft_ms"]
    assert row["half_width"] == pytest.approx(swept["metrics"]["mean_ttft_ms_half_width"], rel=1e-12)


def test_a_baseline_is_paired_by_seed() -> None:
    """The replications vary more than both sides differ, but B is 1 % above A in each of them."""
    values = (100.0, 200.0, 400.0, 800.0)
    a, b = sides(*values), sides(*(1.01 * value for value in values))
    verdicts = {f: check_runs(b, a, [Bound("mean_ttft_ms", "<=", f, True)]).verdict for f in (1.0, 1.009, 1.011, 2.0)}
    assert verdicts == {1.0: "broken", 1.009: "broken", 1.011: "met", 2.0: "met"}
    assert check_runs(b, None, [Bound("mean_ttft_ms", "<=", 375.0)]).verdict == "undecided"
    row = check_runs(b, a, [Bound("mean_ttft_ms", "<=", 1.05, True)]).rows[0]
    assert row.limit == pytest.approx(1.05 * 375) and row.change is not None
    assert row.change.relative == pytest.approx((0.01, 0.01, 0.01))


def test_the_interval_of_the_change_decides_a_relative_limit() -> None:
    """The mean of B is 1 % above A, but by pairs it changes by -10 to +10 %."""
    a, b = sides(100.0, 100.0, 100.0, 100.0), sides(90.0, 110.0, 95.0, 109.0)
    for sign, (low, high) in {"<=": ("broken", "met"), ">=": ("met", "broken")}.items():
        bounds = [Bound("mean_ttft_ms", sign, factor, True) for factor in (0.5, 1.0, 1.02, 1.5)]
        verdicts = [row.verdict for row in check_runs(b, a, bounds).rows[:4]]
        assert verdicts == [low, "undecided", "undecided", high]


def test_equal_scenarios_meet_their_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = scenario(tmp_path, "a"), scenario(tmp_path, "b")
    bounds = ("--subject-to", "mean_ttft_ms <= baseline", "--subject-to", "output_throughput >= baseline")
    result = checked(b, "--baseline", a, *bounds, "--replications", 3, code=0, capsys=capsys)
    assert [(row["constraint"], row["change"], row["verdict"]) for row in result["constraints"]] == [
        ("mean_ttft_ms <= baseline", 0.0, "met"),
        ("output_throughput >= baseline", 0.0, "met"),
        ("failed <= baseline", 0.0, "met"),
    ]


def test_a_trace_has_the_interval_of_the_profile_or_an_exact_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(synthesise(sweeps.workload()), tmp_path / "trace.csv")
    tree = {"trace": str(tmp_path / "trace.csv"), "policy": "llm-serving", "profile": sweeps.COSTS}
    (tmp_path / "trace.yaml").write_text(yaml.safe_dump(tree))
    words = (tmp_path / "trace.yaml", "--subject-to")
    drawn = checked(*words, "makespan <= 1e9", code=0, capsys=capsys)
    assert drawn["constraints"][0]["half_width"] > 0 and "95 % intervals of 24 draws" in drawn["text"]
    exact = checked(*words, "makespan <= 1e9", "--intervals", 0, code=0, capsys=capsys)
    value = exact["constraints"][0]["value"]
    assert exact["constraints"][0]["half_width"] is None and exact["text"].endswith("the verdicts are exact.")
    assert checked(*words, f"makespan <= {value!r}", "--intervals", 0, code=0, capsys=capsys)
    below = math.nextafter(value, 0)
    assert checked(*words, f"makespan <= {below!r}", "--intervals", 0, code=3, capsys=capsys)
    (tmp_path / "sure").mkdir()
    profile = {"name": "sure", "device": "x", "how": "x", "cost": sweeps.COSTS, "uncertainty": {"session": 0.0}}
    (tmp_path / "sure" / "profile.yaml").write_text(yaml.safe_dump(profile))
    sure = checked(*words, "makespan <= 1e9", "--profile", tmp_path / "sure", code=0, capsys=capsys)
    assert sure["text"] == exact["text"], "the profile has no uncertainty"


def test_more_replications_decide_as_often_as_advised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, count = scenario(tmp_path), 5
    words = (file, "--intervals", 0, "--replications", count, "--subject-to")
    row = checked(*words, "mean_e2el_ms <= 1e9", code=0, capsys=capsys)["constraints"][0]
    limit = row["value"] + row["half_width"] / 2
    text = checked(*words, f"mean_e2el_ms <= {limit!r}", code=1, capsys=capsys)["constraints"][0]["reason"]
    advised = int(text.removeprefix("the interval contains the limit; about ").removesuffix(" replications decide"))
    assert 8 <= advised <= 4 * count, "half the width: less than four times as many, as the t quantile falls too"


@pytest.mark.parametrize(("limit", "helps"), [(103.0, False), (104.5, True)])
def test_replications_do_not_help_if_the_calibration_alone_is_too_uncertain(limit: float, helps: bool) -> None:
    """The half-width of 5 has 3 of the replications and 4 of the draws: more replications cannot go below 4."""
    row = CheckedBound(Bound("mean_ttft_ms", "<=", limit), Interval(100.0, 5.0, 8), Interval(100.0, 3.0, 8))
    assert row.verdict == "undecided" and ("replications decide" in row.reason) == helps


def test_a_stuck_engine_breaks_every_constraint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stuck, runs = scenario(tmp_path, "stuck", engine={"num_blocks": 3}), scenario(tmp_path, "runs")
    words = ("--replications", 2, "--subject-to", "mean_ttft_ms <= 1e9", "--subject-to", "makespan >= 0")
    result = checked(stuck, *words, code=3, capsys=capsys)
    assert [row["verdict"] for row in result["constraints"]] == ["broken"] * 3
    assert all(row["reason"].startswith("the engine gets stuck at t=") for row in result["constraints"])
    other = checked(runs, "--baseline", stuck, *words, code=0, capsys=capsys)
    assert [row["baseline"] for row in other["constraints"]] == [None] * 3
    assert any("stuck.yaml: the engine gets stuck" in note for note in other["notes"])
    relative = ("--subject-to", "makespan <= baseline")
    last = checked(runs, "--baseline", stuck, *words, *relative, code=1, capsys=capsys)["constraints"][2]
    assert (last["verdict"], last["reason"]) == ("undecided", "the baseline has no value")


def test_refused_requests_break_a_check_unless_they_are_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = {"name": "vllm-v1", "max_num_batched_tokens": 512, "max_num_seqs": 64}
    short = scenario(tmp_path, "short", policy=policy, engine={"num_blocks": 500, "max_model_len": 30})
    words = ("--replications", 6, "--subject-to", "mean_ttft_ms <= 1e9")
    row = checked(short, *words, code=3, capsys=capsys)["constraints"][1]
    assert row["constraint"] == "failed <= 0" and 0 < row["value"] < 40
    assert checked(short, *words, "--subject-to", "failed <= 40", code=0, capsys=capsys)
    assert checked(short, "--baseline", short, *words, code=0, capsys=capsys), "no more than the baseline"


def test_a_configuration_that_the_engine_refuses_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = {"name": "vllm-v1", "max_num_batched_tokens": 8, "max_num_seqs": 256}
    words = (scenario(tmp_path, policy=policy), "--replications", 2, "--subject-to", "makespan <= 1e9")
    row = checked(*words, code=3, capsys=capsys)["constraints"][0]
    assert row["reason"].startswith("the real engine does not start: max_num_batched_tokens (8)")


def test_a_baseline_of_0_leaves_a_small_difference_undecided() -> None:
    """+0.2 +- 1.0 above 0, and 0 below 0.2 +- 1.0, can both be chance."""
    zero, few = sides(*[0.0] * 5, metric="preemptions"), sides(0.0, 0.0, 1.0, 0.0, 0.0, metric="preemptions")
    many = sides(30.0, 31.0, 32.0, 29.0, 30.0, metric="preemptions")
    for runs, baseline, sign, verdict in (
        (few, zero, "<=", "undecided"), (zero, few, ">=", "undecided"), (zero, few, "<=", "met"),
        (many, zero, "<=", "broken"), (zero, many, "<=", "met"), (zero, many, ">=", "broken"),
        (zero, zero, "<=", "met"),
    ):  # fmt: skip
        check = check_runs(runs, baseline, [Bound("preemptions", sign, 1.0, True)])
        assert check.rows[0].verdict == verdict, (runs, baseline, sign)
    assert check_runs(zero, few, [Bound("preemptions", "<=", 1.0, True)]).cells[1][4] == "-0.20 ± 0.56"


def test_one_replication_of_random_requests_has_no_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (scenario(tmp_path), "--subject-to", "mean_ttft_ms <= 1e9", "--replications")
    one, two = (checked(*words, count, code=0, capsys=capsys) for count in (1, 2))
    assert one["constraints"][0]["half_width"] is None and two["constraints"][0]["half_width"] > 0
    assert one["text"].endswith(
        "One run of random requests: no intervals, so the verdicts are those of these requests only."
    )


@cache
def values_of_400_runs() -> list[float]:
    context = context_json(sweeps.base(workload=sweeps.workload(20)))
    return [record["metrics"]["mean_ttft_ms"] for record in run_tasks(context, [Task(0, n, {}) for n in range(400)])]


@pytest.mark.parametrize("replications", [2, 3, 5])
def test_the_interval_of_few_replications_holds_the_mean(replications: int) -> None:
    """Of 80 intervals at 95 %, at least 70 hold the mean of all replications."""
    values = values_of_400_runs()[: 80 * replications]
    truth, groups = math.fsum(values) / len(values), range(0, len(values), replications)
    held = [interval(values[start : start + replications]) for start in groups]
    assert sum(abs(found.mean - truth) <= (found.half_width or 0.0) for found in held) >= 70


def test_a_baseline_with_other_requests_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for name, requests in (("a", 30), ("b", 40)):
        export(synthesise(sweeps.workload(requests)), tmp_path / f"{name}.csv")
        tree = {"trace": str(tmp_path / f"{name}.csv"), "policy": "llm-serving", "profile": sweeps.COSTS}
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(yaml.safe_dump(tree))
    words = ("--subject-to", "makespan <= 9 * baseline", "--intervals", 0, "--baseline", files[0])
    other = checked(files[1], *words, code=0, capsys=capsys)
    assert other["text"].endswith("the verdicts are exact for these requests.")
    assert any("the baseline has other requests" in note for note in other["notes"])
    same = checked(files[0], *words, code=0, capsys=capsys)
    assert same["text"].endswith("the verdicts are exact.") and not any(
        "other requests" in note for note in same["notes"]
    )


def test_the_advice_is_for_the_confidence() -> None:
    needed = []
    for confidence in (0.5, 0.99):
        check = check_runs(sides(90.0, 110.0, 100.0, 104.0), None, [Bound("mean_ttft_ms", "<=", 101.5)], confidence)
        needed.append(int(check.rows[0].reason.split("about ")[1].split()[0].replace(",", "")))
    expected = [(NormalDist().inv_cdf(quantile) * 8.41 / 0.5) ** 2 for quantile in (0.75, 0.995)]
    assert needed == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("metric", ["mean_tpot_ms", "request_goodput"])
def test_a_metric_without_a_value_is_an_input_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], metric: str
) -> None:
    lengths = {"kind": "fixed", "prompt": 5, "output": 1}
    file = scenario(tmp_path, workload={**sweeps.workload(10), "lengths": lengths})
    assert sweeps.sim("check", file, "--subject-to", f"{metric} >= 1", "-j", 1, "-q", "--replications", 2) == 2
    said = capsys.readouterr()
    assert not said.out and f"--subject-to: {metric}: the runs of {file} have no value" in said.err.splitlines()[-1]


@pytest.mark.parametrize("text", ["makespan <= 5", "makespan >= 0.95 * baseline", "attainment[priority=0] >= baseline"])
def test_a_bound_prints_as_it_is_written(text: str) -> None:
    assert str(parse_bound(text, baseline=True)) == text
    assert parse_bound(text.replace(" ", ""), baseline=True) == parse_bound(text, baseline=True)


def example() -> Check:
    """Return a check with a met, an undecided and a broken constraint; its name is hostile."""
    runs = sides(90.0, 110.0, 100.0, 101.0, name="<b>|\x07\udcff\n.yaml")
    bounds = [Bound("mean_ttft_ms", "<=", limit) for limit in (1000.0, 100.0, 1.0)]
    return check_runs(runs, None, bounds)


def test_junit_has_no_control_characters_of_a_constraint(tmp_path: Path) -> None:
    """A session may have any name."""
    metric = "mean_ttft_ms[session=a\x01b]"
    write_junit(check_runs(sides(1.0, metric=metric), None, [parse_bound(f"{metric} <= 5")]), str(tmp_path / "x.xml"))
    case = next(ElementTree.parse(tmp_path / "x.xml").getroot().iter("testcase"))
    assert case.get("name") == "mean_ttft_ms[session=a?b] <= 5"


@pytest.mark.parametrize(("allowed", "tags"), [(False, ["failure", "failure"]), (True, ["skipped", "failure"])])
def test_junit_has_one_test_case_per_constraint(tmp_path: Path, allowed: bool, tags: list[str]) -> None:
    write_junit(example(), str(tmp_path / "check.xml"), allowed)
    root = ElementTree.parse(tmp_path / "check.xml").getroot()
    for element in root.iter():
        required, optional = ATTRIBUTES[element.tag]
        assert set(required) <= set(element.keys()) <= {*required, *optional}
    suite = root[0]
    cases = suite.findall("testcase")
    assert [case.get("name", "").split("= ")[1] for case in cases] == ["1000", "100", "1", "0"]
    assert [[(part.tag, part.get("type")) for part in case] for case in cases] == [
        [], [(tags[0], "undecided")], [(tags[1], "broken")], [],
    ]  # fmt: skip
    counts = [suite.get(name) for name in ("tests", "failures", "errors", "skipped")]
    assert counts == ["4", str(tags.count("failure")), "0", str(tags.count("skipped"))]
    assert "limit 1 ms, value 100 ± " in cases[2][0].get("message", "")
    assert "mean_ttft_ms <= 100 " in suite.findtext("system-out", "")


def test_a_summary_is_a_markdown_table_at_the_end_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.md"
    path.write_text("before\n")
    for _ in range(2):
        append_summary(example(), str(path))
    first, *parts = path.read_text().split("## ")
    assert first == "before\n" and len(parts) == 2 and parts[0] == parts[1]
    assert parts[0].startswith("Broken: scenario &lt;b&gt;&#124;")
    table = [line for line in parts[0].splitlines() if line.startswith("|")]
    assert len(table) == 6 and {line.count("|") for line in table} == {5}
    assert [line.split("**")[1].split(":")[0] for line in table[2:]] == ["met", "undecided", "broken", "met"]


def test_files_that_cannot_be_written_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("check", scenario(tmp_path), "--subject-to", "makespan <= 1e9", "-j", 1, "--replications", 2)
    for option in ("--junit", "--summary"):
        assert sweeps.sim(*words, option, tmp_path) == 2
        said = capsys.readouterr()
        assert "All constraints are met" in said.out and str(tmp_path) in said.err.splitlines()[-1]
