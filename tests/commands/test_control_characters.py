"""Names in files and answers of servers reach the terminal without sequences that it would execute."""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from servesim.cli import main
from servesim.files.terminal import COLOURS, Screen, paint, printable

from .running import run_sim

EVIL = "\x1b]0;owned\x07\x1b[31mred\x1b[0m\x9b2J\r\u202e"
CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
ROWS = f"id,arrival,prompt,output,session_id\nx{EVIL[:-2]},0,8,2,s\nx{EVIL[:-2]},0.1,8,2,s\n"
COMMANDS = (
    ("run", "named.json"), ("run", "named.json", "--json"), ("run", f"{EVIL}.json"), ("run", f"missing{EVIL}.json"),
    ("run", "named.json", "-o", f"out{EVIL}"), ("run", "named.json", "--set", f"policy.x{EVIL}=3"),
    ("run", "named.json", "--set", f"policy={EVIL}"), ("run", "named.json", "--set", f"cluster.router={EVIL}"),
    ("run", "named.json", "--set", f"profile={EVIL}"), ("run", "plain.json", "--trace", "ids.csv"),
    ("run", "plain.json", "--trace", "header.csv"), ("run", "key.json"), ("run", f"--{EVIL}"), (f"{EVIL}",),
    ("config", "validate", "named.json"), ("config", "validate", f"{EVIL}.json"), ("trace", "inspect", "ids.csv"),
    ("trace", "inspect", "header.csv"), ("sweep", "sweep.json", "-o", f"swept{EVIL}", "-j", "1", "--no-report"),
    ("sweep", "bad.json", "-o", "bad", "-j", "1"), ("compare", "run", "plain.json", "-j", "1"),
    ("compare", f"{EVIL}.json", "named.json", "-j", "1", "--replications", "2"), ("compare", "run", "run"),
    ("check", "named.json", "--subject-to", f"{EVIL} <= 5"), ("policies", "show", EVIL), ("report", f"{EVIL}"),
    ("export", "named.json", "--to", "llm-serving"), ("replay", "plain.json", "--url", "URL", "--api", "openai"),
)  # fmt: skip


class Terminal(io.StringIO):
    """Text that a terminal gets."""

    def isatty(self) -> bool:
        return True


class BadServer(BaseHTTPRequestHandler):
    """A server whose errors have escape sequences."""

    def do_GET(self) -> None:
        self.send_response(500)
        self.end_headers()
        self.wfile.write(json.dumps({"detail": EVIL}).encode() + EVIL.encode())

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), BadServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with files whose names and contents have escape sequences."""
    monkeypatch.chdir(tmp_path)
    workload = {"requests": 3, "arrivals": {"kind": "burst"}, "lengths": {"prompt": 8, "output": 2}}
    plain = {"profile": {"base": 0.001}, "workload": workload}
    named = {**plain, "name": EVIL, "cluster": {"pools": [{"name": f"a{EVIL}", "replicas": 2}, {"name": EVIL}]}}
    files = {
        "plain.json": plain, "named.json": named, f"{EVIL}.json": named, "key.json": {**plain, EVIL: 1},
        "sweep.json": {"base": "named.json", "params": {f"cluster.pools.a{EVIL}.replicas": [1, 2]}},
        "bad.json": {"base": "plain.json", "params": {EVIL: [1, 2]}, "name": EVIL},
    }  # fmt: skip
    for name, tree in files.items():
        Path(name).write_text(json.dumps(tree))
    Path("ids.csv").write_text(ROWS)
    Path("header.csv").write_text(f"id{EVIL[:-2]},when,prompt{EVIL[:-2]}\n1,2,3\n")
    assert main(["run", "named.json", "-o", "run", "-q"]) == 0
    return tmp_path


def test_no_command_prints_a_control_character_of_a_name(
    folder: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = 0
    for line in COMMANDS:
        words = [url if word == "URL" else word for word in line]
        said = run_sim(capsys, *words)
        assert not CONTROLS.search(said.out + said.error), line
        shown += "owned" in said.out + said.error
        assert not CONTROLS.search(re.sub("\033\\[[0-9;]+m|\r", "", on_screen(words))), line
    assert shown > len(COMMANDS) / 2


def on_screen(words: Sequence[str]) -> str:
    """Return what a command prints on a terminal."""
    screen = Terminal()
    with redirect_stdout(screen), redirect_stderr(screen), suppress(SystemExit):
        main(words)
    assert "[31mred" not in screen.getvalue().replace("\\u001b[31m", "").replace("\\x1b[31m", ""), words
    return screen.getvalue()


def test_only_what_was_painted_has_colours() -> None:
    painted = paint(f"winner {EVIL}", "winner", Screen(80, True))
    assert printable(f"{EVIL}{painted}\n") == f"{printable(EVIL)}{painted}\n"
    assert not CONTROLS.search(painted[len("\033[1;32m") : -len("\033[0m")])
    for code in COLOURS.values():
        assert "\033" not in printable(f"\033[{code}mtext\033[0m")
    assert printable("tab\tline\n名前 é 🙂") == "tab\tline\n名前 é 🙂"
    assert json.loads(f'"{printable(EVIL)}"') == EVIL, "a JSON document stays one"


def test_a_trace_for_another_program_is_unchanged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("ids.csv").write_text(ROWS.replace("\nx", "\ny", 1))
    said = run_sim(capsys, "trace", "convert", "ids.csv", "--to", "servesim")
    assert said.code == 0 and said.out.count("\x1b]0;owned") == 2
    assert not CONTROLS.search(on_screen(["trace", "convert", "ids.csv", "--to", "servesim"]).replace("\r", ""))
