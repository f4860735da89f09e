"""`sim recommend`: from a question to settings, with two sweeps that can be repeated."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from statistics import median

import pytest
from servesim.config.families import tunings
from servesim.config.layers import Layer, assemble
from servesim.config.scenario import scenario_from
from servesim.core import BadInput, ClientRequest
from servesim.costs.derivation import EXPECTED_ERRORS, MXFP4_ERRORS
from servesim.costs.device_profile import load_profile
from servesim.policies import FAMILIES
from servesim.statistics.constraints import parse_bound
from servesim.study import pilot_runs
from servesim.study import recommend as recommending
from servesim.study.draft_question import DraftLoads
from servesim.study.recommend import slo_of, workload
from servesim.study.recommend_text import is_close

from ..commands.running import run_sim

PROOF = Path(__file__).parents[2] / "benchmarks" / "results" / "proof.csv"
QUESTION = ("recommend", "--rate", "5", "--prompt", "200", "--output", "20", "--system-prompt", "100", "-j", "1", "-q")
NAMES = ("--model", "llama-3.1-8b", "--device", "H100")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A short workload and four settings."""
    monkeypatch.setattr(recommending, "REQUESTS", 100)
    monkeypatch.setattr(pilot_runs, "MIN_REQUESTS", 200)
    monkeypatch.setattr(pilot_runs, "MIN_TURNOVER", 2)
    small = tunings()["vllm"]._replace(grids=[
        {"policy.max_num_seqs": (1, 256), "policy.max_num_batched_tokens": (128, 2048)},
    ])  # fmt: skip
    monkeypatch.setattr(recommending, "tunings", lambda: {**tunings(), "vllm": small})
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def _without_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reports are not the subject of most tests."""
    monkeypatch.setattr("servesim.report.sweep_page.write_report", lambda *_: None)


def test_the_answer_is_a_command_with_figures_and_its_sweeps_can_be_repeated(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run_sim(capsys, *QUESTION, *NAMES, "--subject-to", "p99_ttft_ms <= 1000")
    assert said.code == 0, said.error
    for text in ("vllm serve meta-llama/Llama-3.1-8B-Instruct", "--max-num-seqs", "P99 TTFT", "Highest load",
                 "What limits it (at ", "Expected error: ", "Next: sim calibrate vllm"):  # fmt: skip
        assert text in said.out, text
    assert len(said.out.splitlines()) <= 32  # one screen
    folder = small / "runs" / "recommend-1"
    assert {path.name for path in folder.iterdir()} >= {"scenario.yaml", "best.yaml", "vllm.sh"}
    assert all((folder / name / "report.html").is_file() for name in ("sweep", "capacity"))
    again = run_sim(capsys, "sweep", str(folder / "sweep.yaml"), "-o", "again", "-j", "1", "-q", "--no-report")
    assert again.code == 0, again.error
    assert (small / "again" / "best.yaml").read_text() == (folder / "sweep" / "best.yaml").read_text()


@pytest.mark.usefixtures("_without_pages")
def test_the_error_of_derived_times_is_known_for_vllm_only(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs that derived times were compared with are those of vLLM on GPUs."""
    one = tunings()["mindie"]._replace(grids=[{"policy.max_batch_size": (100, 200)}])
    monkeypatch.setattr(recommending, "tunings", lambda: {"mindie": one})
    names = ("--engine", "mindie", "--model", "qwen3-8b", "--device", "910B4")
    said = run_sim(capsys, *QUESTION, *names, "--json")
    assert said.code == 0 and json.loads(said.out)["expected_error"] == {}, said.error
    said = run_sim(capsys, *QUESTION, *names)
    assert said.code == 0 and "Expected error: not known: derived step times" in said.out


@pytest.mark.usefixtures("_without_pages")
def test_the_error_of_mxfp4_weights_is_that_of_their_own_runs(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real TTFT may be 1 / (1 - 0.27) = 1.37 times as long, so it may miss a limit of 1.3 times the prediction."""
    said = run_sim(capsys, *QUESTION, "--model", "gpt-oss-120b", "--device", "H200")
    assert said.code == 0 and "Expected error: E2EL 5.5 %, TTFT 27.0 %, TPOT 6.0 % (medians of 38 loads" in said.out
    bound = parse_bound("p99_ttft_ms <= 900")
    assert is_close(bound, 900 / 1.3, MXFP4_ERRORS) and not is_close(bound, 900 / 1.3, EXPECTED_ERRORS)
    assert not is_close(bound, 900 / 1.4, MXFP4_ERRORS)


@pytest.mark.usefixtures("_without_pages")
def test_a_combination_that_the_engine_refuses_cannot_be_the_answer(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run_sim(capsys, *QUESTION, *NAMES)
    assert said.code == 0 and "Highest load" not in said.out  # without limits there is none
    rows = list(csv.DictReader((small / "runs" / "recommend-1" / "sweep" / "summary.csv").open()))
    assert len(rows) == 5 and "does not start" in str(rows)  # budget 128 below 256 sequences


@pytest.mark.usefixtures("_without_pages")
def test_limits_that_no_setting_meets_are_said(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = run_sim(capsys, *QUESTION, *NAMES, "--subject-to", "mean_tpot_ms <= 0.001")
    assert said.code == 1 and said.out.startswith("No tested setting meets mean_tpot_ms <= 0.001 at 5 req/s.")


@pytest.mark.parametrize(
    "options",
    [
        ("recommend",),
        ("recommend", "--model", "llama-3.1-8b"),
        ("recommend", *NAMES),
        ("recommend", *NAMES, "--rate", "5", "--prompt", "100"),
        ("recommend", *NAMES, "--trace", "my.csv", "--prompt", "100"),
        ("recommend", *NAMES, "--rate", "5", "--prompt", "-3", "--output", "9"),
        ("recommend", *NAMES, "--rate", "5", "--prompt", "100", "--output", "9", "--system-prompt", "100"),
        ("recommend", *NAMES, "--profile", "h200-llama2-7b", "--rate", "5", "--prompt", "9", "--output", "9"),
        *(
            ("recommend", *NAMES, "--rate", "5", "--prompt", "9", "--output", "9", "--speculative", drafts)
            for drafts in ("eagle", "eagle:much", "eagle:1.5", "hawk:0.5")
        ),
        (
            "recommend",
            *NAMES,
            "--engine",
            "sglang",
            "--rate",
            "5",
            "--prompt",
            "9",
            "--output",
            "9",
            "--speculative",
            "eagle:0.7",
        ),
        ("recommend", "--model", "lama", "--device", "H100", "--rate", "5", "--prompt", "9", "--output", "9"),
    ],
)
def test_a_question_that_is_not_complete_is_one_line(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str], small: Path
) -> None:
    said = run_sim(capsys, *options)
    assert said.code == 2 and said.error.count("\n") == 1 and "expected" in said.error


def test_every_server_with_flags_has_settings_to_try_and_starts_with_its_defaults() -> None:
    assert set(tunings()) >= {"vllm", "sglang", "mindie", "vllm-ascend"}
    for server, tuning in tunings().items():
        tree = assemble([Layer({"preset": tuning.preset, "profile": {"base": 0.01}})])
        policy = scenario_from(tree).make_policy()
        for key in (key for grid in tuning.grids for key in grid):
            assert hasattr(policy, key.removeprefix("policy.")), (server, key)
    assert FAMILIES


@pytest.mark.usefixtures("_without_pages")
def test_json_has_the_command_and_the_figures_and_a_second_question_gets_its_own_folder(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (1, 2):
        said = run_sim(capsys, *QUESTION, *NAMES, "--rate", str(number), "--json")
        data = json.loads(said.out)
        assert data["folder"] == f"runs/recommend-{number}" and data["rate"] == pytest.approx(number)
        assert data["command"].startswith("vllm serve") and data["defaults"]["p99_ttft_ms"] > 0


@pytest.mark.usefixtures("_without_pages")
def test_of_settings_that_are_equal_at_this_load_the_one_that_holds_more_wins(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 5 requests per second, four slots are as good as 64; the defaults have four."""
    grids = [{"policy.max_num_seqs": (2, 64)}]
    few = tunings()["vllm"]._replace(grids=grids, defaults=lambda about, requests: {"policy.max_num_seqs": 4})
    monkeypatch.setattr(recommending, "tunings", lambda: {"vllm": few})
    monkeypatch.setattr(recommending, "REQUESTS", 200)
    said = run_sim(capsys, *QUESTION, *NAMES, "--subject-to", "p99_ttft_ms <= 100")
    assert said.out.startswith("Best settings at 5 req/s: max_num_seqs 64."), said.out
    assert "Other settings are as good at this load; these hold more." in said.out


@pytest.mark.parametrize(("drafts", "on"), [("eagle:0.9", True), ("eagle:0", False), ("ngram:0", False)])
def test_drafts_are_tried_and_the_answer_says_up_to_which_load_they_gain(
    drafts: str, on: bool, small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = tunings()["vllm"]._replace(grids=[{"policy.max_num_seqs": (64, 256)}])
    monkeypatch.setattr(recommending, "tunings", lambda: {"vllm": few})
    said = run_sim(capsys, *QUESTION, *NAMES, "--speculative", drafts)
    assert said.code == 0, said.error
    assert ("--speculative-config" in said.out) == on
    line = next(line for line in said.out.splitlines() if line.startswith("Drafts: "))
    assert line.startswith("Drafts: on. With " if on else "Drafts: off. With ")
    assert drafts != "eagle:0" or "they cost more than they gain at all tested loads" in line
    assert (small / "runs" / "recommend-1" / "drafts" / "report.html").is_file()


def test_the_load_from_which_on_drafts_cost_more() -> None:
    for changes, expected in (
        ({1.0: -0.4, 2.0: -0.1, 4.0: 0.1}, "from about 4 req/s on they cost more than they gain"),
        ({1.0: -0.4, 2.0: 0.1, 4.0: -0.1}, "they gain at all tested loads"),
        ({1.0: 0.1, 2.0: 0.2}, "they cost more than they gain at all tested loads"),
    ):
        assert expected in DraftLoads("eagle", 3, True, changes).text


@pytest.mark.usefixtures("_without_pages")
def test_the_command_has_the_devices_and_the_precision(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = run_sim(capsys, *QUESTION, *NAMES, "--tensor-parallel", "2", "--precision", "fp8")
    assert "--tensor-parallel-size 2" in said.out and "--quantization fp8" in said.out


@pytest.mark.parametrize(
    ("server", "device", "settings"),
    [
        ("vllm", "H100", {"policy.max_num_seqs": 1024, "policy.max_num_batched_tokens": 8192}),
        ("vllm", "A100", {"policy.max_num_seqs": 256, "policy.max_num_batched_tokens": 2048}),
        ("vllm", "B200", {"policy.max_num_seqs": 1024, "policy.max_num_batched_tokens": 16384}),
        ("sglang", "L40S", {"policy.chunked_prefill_size": 4096}),
        ("sglang", "H200", {"policy.chunked_prefill_size": 8192}),
        ("mindie", "910B4", {"policy.max_input_token_len": 3072, "policy.max_iter_times": 1024}),
        ("vllm-ascend", "910B4", {"engine.max_model_len": 8192}),
    ],
)
def test_defaults_are_those_of_the_engine_for_the_device_and_the_requests(
    server: str, device: str, settings: dict[str, int]
) -> None:
    """As vLLM 0.32 (arg_utils.py), SGLang 0.5 (server_args.py) and the config.json of MindIE choose them."""
    about = load_profile({"model": "llama-3.1-8b", "device": device}).about
    values = tunings()[server].defaults(about, [ClientRequest(0, 0.0, 3000, 600)])
    assert {key: values[key] for key in settings} == settings


def test_the_workload_has_the_means_of_the_question() -> None:
    tree = workload(20, 1200, 200, 1000)
    assert tree["lengths"]["prompt"]["mean"] == 200 and tree["prefixes"] == {"count": 1, "tokens": 1000}
    assert "prefixes" not in workload(20, 1200, 200)
    with pytest.raises(BadInput, match="--system-prompt: expected fewer tokens than --prompt"):
        workload(20, 100, 20, 100)


def test_latency_limits_are_the_slo() -> None:
    assert slo_of(["p99_ttft_ms <= 1000", "mean_tpot_ms <= 50", "request_throughput >= 3"]) == {
        "ttft": 1000,
        "tpot": 50,
    }


def test_the_expected_errors_are_those_of_the_proof() -> None:
    """Medians of the absolute errors of runs of others that derived profiles predict."""
    errors: dict[str, list[float]] = {}
    with PROOF.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["set"] == "derived profiles: blis-validation":
                error = abs(float(row["predicted"]) / float(row["measured"]) - 1)
                errors.setdefault(row["quantity"], []).append(error)
    for name, quantity in (("e2el", "E2E mean"), ("ttft", "TTFT mean"), ("tpot", "TPOT mean")):
        assert EXPECTED_ERRORS[name] == pytest.approx(median(errors[quantity]), abs=0.001)
