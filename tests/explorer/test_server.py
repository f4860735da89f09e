"""The server of `sim explore` without a browser: token, sizes, bad requests, code, cancelling, replications."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import servesim
from servesim.cli import main
from servesim.config.layers import read_scenario_file
from servesim.config.scenario import scenario_from
from servesim.core import BadInput
from servesim.explorer.runner import SLOTS
from servesim.explorer.server import MAX_BODY_BYTES, ExploreServer
from servesim.explorer.state import Choice, Origin
from servesim.runs.simulate import simulate

from .. import warm
from ..events import PATIENCE_S, wait_until
from .conftest import post


def messages(server: ExploreServer, state: Any, page: str = "test", change: int = 0) -> list[dict[str, Any]]:
    """Return all messages of one answer."""
    status, text = post(server.url, "run", {"state": state, "page": page, "change": change})
    assert status == 200, text
    return [json.loads(line) for line in text.splitlines()]


def one(found: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Return the last message of a kind."""
    return [message for message in found if message["kind"] == kind][-1]


def values(picture: dict[str, Any], column: int = 0) -> dict[str, float]:
    """Return the metrics of a scenario in the table."""
    return {row["metric"]: row["cells"][column]["value"] for row in picture["table"]}


def test_the_picture_has_the_numbers_of_a_run(server: ExploreServer, scenario: Path) -> None:
    found = messages(server, {"settings": {"policy.decode_batch": "8"}})
    tree = read_scenario_file(scenario)
    run = simulate(scenario_from({**tree, "policy": {**tree["policy"], "decode_batch": 8}})).result()
    shown = values(one(found, "picture"))
    assert len(shown) > 8
    assert all(value == run[metric] for metric, value in shown.items())
    charts = {chart["id"]: chart for chart in one(found, "picture")["charts"]}
    assert {"cdf-0", "cdf-1", "cdf-2", "time-waiting", "time-running", "time-kv", "time-breakdown"} == set(charts)
    assert max(charts["time-running"]["data"][0]["y"]) == 8
    assert found[-1] == {"kind": "done"}


def test_pinned_scenarios_get_the_requests_of_the_controls(server: ExploreServer) -> None:
    rate = {"workload.contest.X": "2"}
    pins = [{"settings": {}}, {"settings": {"policy.decode_batch": "32", "workload.contest.X": "9"}}]
    picture = one(messages(server, {"settings": rate, "pins": pins}), "picture")
    assert values(picture, 0) == values(picture, 1)
    alone = one(messages(server, {"settings": {**rate, "policy.decode_batch": "32"}}), "picture")
    assert values(picture, 2) == values(alone)


def test_a_picture_names_the_scenarios_that_have_run(server: ExploreServer) -> None:
    seven = {"settings": {"policy.decode_batch": "7"}}
    messages(server, seven)
    state = {"settings": {"policy.decode_batch": "6"}, "pins": [{"settings": {"policy.decode_batch": "5"}}, seven]}
    first, last = [message for message in messages(server, state) if message["kind"] == "picture"]
    assert (first["columns"], last["columns"]) == ([0, 2], [0, 1, 2])
    assert values(first, 1) == values(last, 2)


def test_a_new_rate_keeps_the_number_of_requests(server: ExploreServer) -> None:
    for rate in ("1", "4", "7.3"):
        found = messages(server, {"settings": {"workload.contest.X": rate}})
        assert one(found, "picture")["requests"] == 240


def test_the_verdict_with_replications_is_that_of_sim_compare(server: ExploreServer, scenario: Path) -> None:
    state = {"settings": {"policy.decode_batch": "32"}, "pins": [{}], "replications": 4, "metric": "mean_ttft_ms"}
    verdict = one(messages(server, state), "verdict")
    compared = servesim.compare(
        str(scenario), {**read_scenario_file(scenario), "policy": {"decode_batch": 32, "delay_variant": "queue"}},
        replications=4, metrics=["mean_ttft_ms"],
    )  # fmt: skip
    relative = compared.table.loc["mean_ttft_ms"]
    low, high = 100 * relative["relative_low"], 100 * relative["relative_high"]
    assert f"interval {low:+.2f} to {high:+.2f} %" in verdict["text"]
    assert verdict["better"] == "current"
    assert verdict["pairs"].startswith("4 pairs of replications")


def test_tiles_and_constraints_use_the_same_means_of_replications(server: ExploreServer, scenario: Path) -> None:
    """The P99 TTFT of the first run is below the mean of four runs: a bound between them is missed everywhere."""
    tree = read_scenario_file(scenario)
    result = servesim.compare(tree, tree, replications=4, metrics=["p99_ttft_ms"])
    mean, one_run = float(result.table.loc["p99_ttft_ms"]["a"]), servesim.run(tree).metrics["p99_ttft_ms"]
    assert one_run < mean
    bound = f"p99_ttft_ms <= {(one_run + mean) / 2:.0f}"
    found = messages(server, {"settings": {}, "replications": 4, "subject_to": bound})
    verdict, rates = one(found, "verdict"), one(found, "rates")
    assert verdict["limits"] == f"Constraints, by the means of 4 replications: current misses {bound}."
    tile = verdict["tiles"]["ttft"]
    assert (float(tile["texts"][0].split()[0]) * 1000, tile["detail"]) == (
        pytest.approx(mean, rel=0.01), "mean of 4 replications",
    )  # fmt: skip
    assert float(rates["loads"][0]["text"].split()[0]) < 4 and "4 at the rate of the scenario" in rates["caption"]


def test_curves_over_the_rate_have_open_points_above_the_constraint(server: ExploreServer) -> None:
    state = {"settings": {}, "subject_to": "p99_ttft_ms <= 3000"}
    rates = one(messages(server, state), "rates")
    throughput, latency = rates["charts"]
    points = dict(zip(latency["data"][0]["x"], zip(latency["data"][0]["y"], latency["data"][0]["marker"]["symbol"])))
    assert {1, 2, 3, 4, 5, 6, 8} <= set(points)
    limit = 3 if "(s)" in latency["layout"]["yaxis"]["title"]["text"] else 3000
    assert {symbol for value, symbol in points.values() if value > limit} == {"circle-open"}
    assert "circle" in {symbol for _, symbol in points.values()}
    assert throughput["data"][0]["x"] == latency["data"][0]["x"]
    best = max(rate for rate, (_, symbol) in points.items() if symbol == "circle")
    above = min(rate for rate, (_, symbol) in points.items() if symbol == "circle-open")
    assert best < above <= 1.05 * best
    assert rates["loads"][0]["text"] == f"{best:.3g} req/s"
    assert rates["loads"][0]["detail"].startswith(f"at {above:g} req/s: ")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"policy.decode_batch": "0"}, "policy.decode_batch"),
        ({"policy.order": "none"}, "policy.order"),
        ({"engine.block_size": "abc"}, "engine.block_size"),
        ({"workload.contest.X": "-1"}, "workload.contest.X"),
        ({"policy.no_such": "1"}, "policy.no_such"),
        ({"workload.contest.T": "1e9"}, "workload.contest"),
        ({"profile": "no-such"}, "profile"),
        ({"slo.ttft": "[1"}, "slo.ttft"),
    ],
)
def test_an_error_names_its_key_in_the_words_of_the_command_line(
    server: ExploreServer, scenario: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, str], key: str
) -> None:
    error = one(messages(server, {"settings": settings}), "error")
    assert error["key"] == key
    words = [word for name, text in settings.items() for word in ("--set", f"{name}={text}")]
    assert main(["run", str(scenario), *words]) == 2
    assert capsys.readouterr().err.strip() == f"sim: {error['text']}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("policy", value) for value in ("7", "[x]", ".nan", "1e999", "true", "{name: [x]}", "'")),
        *(("workload.contest.X", value) for value in ("[x]", "nan", ".inf", "{a: 1}")),
        *(("policy.decode_batch", value) for value in ("inf", "1e999", "[x]")),
        ("engine.num_blocks", ".nan"),
        ("seed", "1e999"),
        ("slo.ttft", "[1"),
    ],
)
def test_a_wrong_value_is_an_error_at_its_control_and_the_controls_stay(
    server: ExploreServer, key: str, value: str
) -> None:
    state = {"settings": {key: value}}
    status, text = post(server.url, "scenario", {"state": state})
    assert status == 200, text
    controls = {control["key"]: control for control in json.loads(text, parse_constant=pytest.fail)["controls"]}
    assert {"start", "policy", "workload", "seed", "engine.num_blocks", "slo.ttft"} <= controls.keys()
    assert key == "policy" or controls[key]["text"] in (value, "inf", ".inf")
    error = one(messages(server, state), "error")
    assert error["key"] in (key, f"{key}.name")
    assert "\n" not in error["text"]
    assert post(server.url, "copy", {"state": state})[0] == 400
    chosen = {"state": {}, "choose": {"key": key, "value": value}}
    assert post(server.url, "scenario", chosen)[0] == 200


def test_a_state_without_a_known_start_has_controls(server: ExploreServer) -> None:
    answer = json.loads(post(server.url, "scenario", {"state": {"start": "no-such", "settings": {"seed": "5"}}})[1])
    texts = {control["key"]: control["text"] for control in answer["controls"]}
    assert texts["seed"] == "5"
    assert "no such preset" in answer["error"]["text"]


def test_only_the_address_with_the_token_answers(server: ExploreServer) -> None:
    good, bad = server.url, server.url.replace(server.token, "x" * len(server.token))
    assert post(good, "copy", {"state": {}})[0] == 200
    for path in ("", "explore.js", "plotly.js"):
        assert post(bad, path, b"")[0] == 403
    for path in ("run", "scenario", "copy"):
        assert post(bad, path, {"state": {}})[0] == 403
    assert post(f"http://127.0.0.1:{server.port}/", "run", {"state": {}})[0] == 403


def send(server: ExploreServer, data: str) -> bytes:
    """Return the first line of the answer to bytes on a socket."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(data.encode())
        return connection.makefile("rb").readline()


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:{}", 200), ("localhost:{}", 200), ("localhost:9", 200), ("localhost", 200), ("evil.example:{}", 403),
     ("127.0.0.1:{}.evil.com", 403), ("localhost:{}.evil.com", 403), ("127.0.0.1.evil.com:{}", 403),
     ("127.0.0.1:1@evil.com", 403), ("127.0.0.1:", 403), ("[::1]:{}", 403)],
)  # fmt: skip
def test_a_foreign_name_of_this_machine_is_refused(server: ExploreServer, host: str, status: int) -> None:
    """A page of another site can resolve its own name to 127.0.0.1. An SSH tunnel has another port."""
    head = f"GET /{server.token}/explore.js HTTP/1.1\r\nHost: {host.format(server.port)}\r\n\r\n"
    assert send(server, head).split()[1] == str(status).encode()


@pytest.mark.parametrize(
    "request_text",
    [
        "garbage\r\n\r\n", "GET / HTTP/9.9\r\n\r\n", "GET / HTTP/1.1\r\nbad header\r\n\r\n",
        "GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n", f"GET /{'a' * 20000} HTTP/1.1\r\n\r\n",
        "CONNECT evil:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "POST /{}/copy HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd",
        "POST /{}/copy HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
    ],
)  # fmt: skip
def test_a_malformed_request_is_refused_without_a_traceback(
    server: ExploreServer, caplog: pytest.LogCaptureFixture, request_text: str
) -> None:
    assert send(server, request_text.replace("{}", server.token)).split()[1] in (b"400", b"403")
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
    assert all("\n" not in record.getMessage() for record in caplog.records)


def test_it_listens_on_the_loopback_address_only(server: ExploreServer) -> None:
    port = f":{server.port:04X} "
    lines = Path("/proc/net/tcp").read_text().splitlines() + Path("/proc/net/tcp6").read_text().splitlines()
    listening = [line.split()[1] for line in lines if port in line[:45] and line.split()[3] == "0A"]
    assert listening == [f"0100007F{port.strip()}"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"not JSON", 400),
        (b"[1]", 400),
        (b"[" * 100_000, 400),
        ({"state": {"replications": 0}}, 400),
        ({"state": {"replications": 10**9}}, 400),
        ({"state": {"pins": [{}] * 6}}, 400),
        ({"state": {"settings": {"a": 1}}}, 400),
        ({"state": {"settings": {f"k{n}": "1" for n in range(300)}}}, 400),
        ({"state": {"settings": {"name": "x" * 30_000}}}, 400),
        ({"state": {"no": 1}}, 400),
        (b"x" * (MAX_BODY_BYTES + 1), 413),
    ],
)
@pytest.mark.parametrize("path", ["run", "scenario", "copy"])
def test_a_bad_request_is_one_line(server: ExploreServer, path: str, body: Any, status: int) -> None:
    got, text = post(server.url, path, body)
    assert (got, list(json.loads(text))) == (status, ["detail"])
    assert "\n" not in json.loads(text)["detail"]


POLICY_FILE = """
from dataclasses import dataclass
from pathlib import Path
from servesim.policies.papers import Orca
Path(__file__).with_suffix(".executed").touch()
@dataclass(frozen=True)
class Mine(Orca):
    extra: int = 3  # a field of my own
"""


def test_the_page_executes_no_policy_file(server: ExploreServer, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(POLICY_FILE)
    for settings in (
        {"policy": f"{tmp_path}/mine.py:Mine"},
        {"policy.name": f"{tmp_path}/mine.py"},
        {"policy": "engine"},
    ):
        error = one(messages(server, {"settings": settings}), "error")
        assert "executes only code that its scenario file names" in error["text"]
        for path in ("scenario", "copy"):
            assert "executes only" in post(server.url, path, {"state": {"settings": settings}})[1]
        body = {"state": {}, "choose": {"key": "policy", "value": next(iter(settings.values()))}}
        assert "executes only" in post(server.url, "scenario", body)[1]
    pinned = one(messages(server, {"pins": [{"settings": {"policy": f"{tmp_path}/mine.py:Mine"}}]}), "error")
    assert pinned["text"].startswith("baseline: policy.name")
    assert not (tmp_path / "mine.executed").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"cluster.router": "{file}:Mine"},
        {"cluster.router.name": "{file}:Mine"},
        {"cluster": "{{router: '{file}:Mine'}}"},
        {"cluster.pools": "[{{name: a, policy: '{file}:Mine'}}]"},
        {"cluster.pools": "[{{name: a}}, {{name: b, policy: {{name: '{file}:Mine'}}}}]"},
        {"cluster.pools": "[{{name: a, policy: engine}}]"},
    ],
)
def test_the_page_executes_no_router_and_no_policy_of_a_pool(
    scenario: Path, tmp_path: Path, settings: dict[str, str]
) -> None:
    (tmp_path / "mine.py").write_text(POLICY_FILE)
    named = {key: text.format(file=tmp_path / "mine.py") for key, text in settings.items()}
    with pytest.raises(BadInput, match=r"^cluster\.\S+: .*the page executes only code that its scenario file names"):
        Origin(str(scenario)).tree(Choice(settings=named))
    own = tmp_path / "own.yaml"
    own.write_text(f"cluster: {{router: {tmp_path}/mine.py:Mine}}\nworkload: {{contest: {{X: 20, T: 1}}}}\n")
    assert Origin(str(own)).tree(Choice(settings={"cluster.replicas": "2"}))["cluster"]["replicas"] == 2
    assert not (tmp_path / "mine.executed").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"policy.scheduler_cls": "other.py:Evil"},
        {"policy.scheduler_cls": "os.path.Evil"},
        {"policy.flags": "[[scheduler_cls, other.py:Evil]]"},
        {"policy.worker_cls": "other.Evil"},
        {"policy.kv_transfer_config": "{kv_connector_module_path: other}"},
        {"policy": "{name: engine, scheduler_cls: 'other.py:Evil', max_num_seqs: 8}"},
    ],
)
def test_the_page_names_no_code_of_an_installed_engine(tmp_path: Path, settings: dict[str, str]) -> None:
    """Any flag of an engine may name a class or a file, so only numbers and switches change."""
    file = tmp_path / "engine.yaml"
    file.write_text("policy: {name: engine, scheduler_cls: own.py:Mine}\nworkload: {contest: {X: 20, T: 1}}\n")
    origin = Origin(str(file))
    with pytest.raises(BadInput, match=r"^policy\.\w+: .*the page executes only code that its scenario file names"):
        origin.tree(Choice(settings=settings))
    allowed = {"policy.max_num_seqs": "64", "policy.async_scheduling": "true", "policy.scheduling_policy": "priority"}
    assert origin.tree(Choice(settings=allowed))["policy"]["scheduler_cls"] == "own.py:Mine"
    assert "scheduler_cls" in origin.tree(Choice(settings={"policy.scheduler_cls": "null"}))["policy"]


def test_the_policy_file_of_the_scenario_file_runs_with_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(POLICY_FILE)
    (tmp_path / "mine.yaml").write_text("policy: mine.py:Mine\nworkload: {contest: {X: 20, T: 1}}\n")
    monkeypatch.chdir(tmp_path)
    with servesim.explore("mine.yaml", jobs=1) as explorer:
        _, text = post(explorer.url, "scenario", {"state": {}})
        assert '"policy.extra"' in text, text
        _, text = post(explorer.url, "run", {"state": {"settings": {"policy.extra": "5"}}})
        assert '"kind":"picture"' in text, text
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    with pytest.raises(BadInput, match="outside the working folder"):
        servesim.explore("../mine.yaml")


@pytest.mark.parametrize(
    ("key", "value"),
    [("trace.path", "'-'"), ("trace.path", "/dev/stdin"), ("workload.contest.lengths", "'-'"), ("profile", "/dev/fd/0"),
     ("server_config", "/dev/stdin")],
)  # fmt: skip
def test_the_page_does_not_read_standard_input(server: ExploreServer, key: str, value: str) -> None:
    settings = {key: value, **({"workload": "null"} if key == "trace.path" else {})}
    error = one(messages(server, {"settings": settings}), "error")
    assert (error["key"], "standard input" in error["text"]) == (key, True)


def slow_state(number: int = 0) -> dict[str, Any]:
    """Return a state whose run takes many seconds."""
    return {"settings": {"workload.contest": "{X: 4, T: 40000}", "seed": str(number)}}


def open_run(server: ExploreServer, state: Any, page: str, change: int = 0) -> socket.socket:
    """Send a state and return the open connection."""
    body = json.dumps({"state": state, "page": page, "change": change}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
    head = f"POST /{server.token}/run HTTP/1.1\r\nHost: 127.0.0.1:1\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def is_idle(server: ExploreServer) -> bool:
    """Whether no run is left: a quick one gets a worker at once."""
    return not any(job.batches for job in server._jobs.values())


def test_a_slow_run_tells_its_progress_and_ends_with_its_connection(server: ExploreServer) -> None:
    connection = open_run(server, slow_state(), "slow")
    reader = connection.makefile("rb")
    seen: list[float] = []
    while len(seen) < 3 or seen[-1] == 0:
        line = reader.readline()
        assert line, "the run ended before its progress"
        if b'"progress"' in line:
            seen.append(json.loads(line)["part"])
    assert seen == sorted(seen) and 0 < seen[-1] < 1
    job = server._jobs["slow"]
    reader.close()
    connection.close()
    wait_until(lambda: job.cancelled and not job.batches, "the end of the run")
    assert server.runner._progress[job.number % SLOTS] < 1  # it did not run to its own end
    assert messages(server, {"settings": {"seed": "77"}})[-1] == {"kind": "done"}


SLOW_POLICY = """
import time
from dataclasses import dataclass
from servesim.policies.papers import Orca
@dataclass(frozen=True)
class Slow(Orca):
    def decide(self, view):
        open(__file__ + ".started", "w").close()
        time.sleep(600)
"""


def test_a_worker_that_does_not_react_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").write_text(SLOW_POLICY)
    (tmp_path / "slow.yaml").write_text("policy: slow.py:Slow\nworkload: {contest: {X: 20, T: 1}}\n")
    monkeypatch.chdir(tmp_path)
    others = set(children())
    with servesim.explore("slow.yaml", jobs=1) as explorer:
        server = explorer._server
        connection = open_run(server, {}, "slow")
        wait_until(lambda: "slow" in server._jobs and (tmp_path / "slow.py.started").exists(), "the run")
        [worker] = set(children()) - others
        connection.close()
        wait_until(lambda: worker not in children(), "the end of the worker")
        assert messages(server, {"settings": {"policy": "orca"}})[-1] == {"kind": "done"}
        assert len(set(children()) - others) == 1
    assert set(children()) <= others


def test_fifty_states_of_one_page_leave_one_answer_and_no_process(server: ExploreServer) -> None:
    """The server may read them in another order, so the page numbers them."""
    page = secrets.token_hex()
    others = other_children(server)
    with contextlib.ExitStack() as connections:
        for number in range(50):
            connections.enter_context(open_run(server, slow_state(number), page, number))
        answer = messages(server, {"settings": {"policy.decode_batch": "12"}}, page, 50)
        assert answer[-1] == {"kind": "done"}
        wait_until(lambda: is_idle(server), "the end of the runs")
        assert messages(server, slow_state(), page, 49) == []  # a late one
    wait_until(lambda: len(set(children()) - others) == 2, "two workers")  # one that did not react in time was replaced
    again = messages(server, {"settings": {"policy.decode_batch": "12"}}, "again")
    assert values(one(again, "picture")) == values(one(answer, "picture"))


def children() -> list[int]:
    """Return the worker processes of this process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(") ")[2].split()[1])
            if parent == os.getpid() and b"spawn_main" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def other_children(server: ExploreServer) -> set[int]:
    """Return the worker processes of this process that are not those of a server."""
    pool: Any = server.runner._pool._futures
    return set(children()) - set(pool._processes if pool else ())


def test_a_worker_that_dies_is_replaced(server: ExploreServer) -> None:
    messages(server, {"settings": {"seed": "5"}})
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(messages(server, {"settings": {"workload.contest": "{X: 4, T: 400}"}}, "dies"))
    )
    thread.start()
    wait_until(lambda: "dies" in server._jobs and server.runner.progress(server._jobs["dies"]) > 0, "the run")
    os.kill((set(children()) - other_children(server)).pop(), 9)
    thread.join()
    assert answers[0][-1] == {"kind": "done"}


def test_the_command_prints_the_address_and_ends_with_its_workers(scenario: Path) -> None:
    words = ["explore", str(scenario), "--no-browser", "--set", "policy.decode_batch=9"]
    with subprocess.Popen([warm.sim(), *words], stdout=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().split()[-1]
        assert "decode_batch=9" in post(url, "copy", {"state": json.loads(first_state(url))})[1]
        process.terminate()
        assert process.wait() == 0


def first_state(url: str) -> str:
    """Return the first state that the page has, as JSON."""
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    return json.dumps(json.loads(text.partition('id="first">')[2].partition("</script>")[0])["state"])


def test_in_a_notebook_it_is_a_frame_that_ends_with_stop(scenario: Path) -> None:
    explorer = servesim.explore(str(scenario), settings={"policy.decode_batch": 4}, height=500, jobs=1)
    html = explorer._repr_html_()
    assert f'<iframe src="{explorer.url}" height="500"' in html
    assert '"policy.decode_batch": "4"' in first_state(explorer.url)
    assert one(messages(explorer._server, {}), "picture")["requests"] == 240
    explorer.stop()
    with pytest.raises(OSError, match="refused"):
        post(explorer.url, "copy", {})
    explorer.stop()


def test_a_page_without_a_file_starts_with_a_server_of_vllm() -> None:
    with servesim.explore(jobs=1) as explorer:
        command = json.loads(post(explorer.url, "copy", {"state": json.loads(first_state(explorer.url))})[1])
    assert command["command"].startswith("sim run --preset vllm-v1-")
    assert "vllm serve MODEL" in command["vllm"]
    assert command["sglang"].startswith("# policy vllm-v1: only sglang policies")
