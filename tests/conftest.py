"""Common parts of the tests: the folders of the recordings and of the large data, and nothing left by a test."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Union

import pytest
from hypothesis import HealthCheck, settings
from servesim.core import BadInput

from .warm import folder

ROOT = Path(__file__).resolve().parents[1]
EXPECTED = ROOT / "tests" / "expected"  # texts; `pytest --renew` writes them again
RECORDINGS = ROOT / "tests" / "recordings"  # decisions of real engines; see its README
SHARED = ROOT.parent / "shared"  # data outside the repository

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells start background jobs like this; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


RUN_MARK = f"SERVESIM_TEST_RUN={os.getpid()}"  # in the environment of every process that the tests start
os.environ.update([RUN_MARK.split("=")])


def kill_processes_of(test: str) -> None:
    """Kill every process that the body of a test started in this run, also one whose parent has ended."""
    marks = {RUN_MARK.encode(), f"PYTEST_CURRENT_TEST={test} (call)".encode()}  # pytest sets the second
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended, or of another user
            if marks <= set((process / "environ").read_bytes().split(b"\0")):
                os.kill(int(process.name), signal.SIGKILL)


def seeds(quick: int, total: int, *known: int) -> list[Any]:
    """Return the numbers of random examples as parameters of a test.

    Those after the first `quick` ones are slow, except the known ones, which find a fault that the first ones miss.
    """
    slow = {*range(quick, total)} - {*known}
    return [pytest.param(number, marks=pytest.mark.slow if number in slow else ()) for number in range(total)]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew", action="store_true", help="write tests/expected again; review it as a diff")
    parser.addoption("--search", type=int, metavar="N", help="draw new random examples, N times as many as usual")


def pytest_configure(config: pytest.Config) -> None:
    """Draw the same examples in every run, so that a failure comes from the change; `--search` draws new ones.

    Neither fails because an example is slow: other processes may use the CPU.
    """
    folder()
    search = bool(config.getoption("--search"))
    settings.register_profile("tests", derandomize=not search, deadline=None, suppress_health_check=list(HealthCheck))
    settings.load_profile("tests")


def pytest_xdist_auto_num_workers() -> int:
    """Return the workers of `-n auto`: one more than cores, because tests also wait for processes and clocks."""
    return min(8, (os.cpu_count() or 1) + 1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draw more examples with `--search`."""
    factor = config.getoption("--search") or 1
    for test in {item.obj for item in items if hasattr(getattr(item, "obj", None), "is_hypothesis_test")}:
        usual = test._hypothesis_internal_use_settings
        test._hypothesis_internal_use_settings = settings(usual, max_examples=factor * usual.max_examples)


def limits() -> list[tuple[int, int]]:
    """Return the limits of memory and of file sizes of this process."""
    return [resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Leave nothing behind: no process of a test that fails, which would keep its port and the CPU, and no limit."""
    before = limits()
    try:
        result = yield
        assert limits() == before, "the test has changed the limits of this process for all tests after it"
        return result
    except BaseException:
        kill_processes_of(item.nodeid)
        raise


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line for each test that needed a second try: such a test is a fault."""
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.line(f"to repair, it needed another try: {report.nodeid}")


@pytest.fixture
def expected_errors(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """Return a function that checks errors of bad input: each is one short line; tests/expected has the wording."""

    def check(name: str, function: Callable[[Any], object], cases: Union[Mapping[str, Any], Iterable[Any]]) -> None:
        table = (
            cases
            if isinstance(cases, Mapping)
            else {f"{number} {case!r}"[:150]: case for number, case in enumerate(cases, 1)}
        )
        found = []
        for key, case in table.items():
            with pytest.raises(BadInput) as error:
                function(case)
            message = str(error.value).replace(str(tmp_path), "FOLDER")
            assert message.isprintable() and len(message) <= 800, key
            found.append(f"{key}\n    {message}\n")
        file = EXPECTED / f"{name}.txt"
        if request.config.getoption("--renew"):
            file.write_text("".join(found), encoding="utf-8")
        assert "".join(found) == file.read_text(encoding="utf-8")

    return check


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium, one for all tests."""
    from .browsers import open_browser

    with open_browser() as running:
        yield running


@pytest.fixture(scope="session")
def recordings() -> Path:
    """Return the folder of the recordings of real engines."""
    return RECORDINGS


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the data folder next to the checkout; skip the test if it is absent."""
    if not (SHARED / "data").is_dir():
        pytest.skip("needs the data in ../shared/data, which is absent")
    return SHARED
