"""The notebooks: they hold the output of a run, match their Python files, and run on small data."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from ..conftest import ROOT

FOLDER = ROOT / "notebooks"
NAMES = ("policy_curves", "calibration", "replay_verification", "capacity")
MAX_BYTES = 150_000  # of a notebook, so that all four are below 600 KB
# Code inserted after the first cell of a notebook, so that it runs in seconds.
SMALL_PARAMETERS = {
    "policy_curves": """
        BASE["workload"] = {"contest": {"X": 5, "T": 20}}
        SETTINGS = {name: dict(list(values.items())[2:4]) for name, values in SETTINGS.items()}
        REPLICATIONS, JOBS = 2, 1
        CLOSER_VALUES, CLOSER_RATES = list(SETTINGS[CLOSER]), [3, 4]
    """,
    "calibration": """
        PROFILE = "cpu-tiny-kbk"
    """,
    "capacity": """
        BASE["workload"]["requests"] = 100
        KNOBS = {"policy.max_num_seqs": [8, 16], "policy.max_num_batched_tokens": [512, 2048]}
        RATES, REPLICATIONS, PRECISION, JOBS = [5, 10], 1, 0.5, 1
    """,
    "replay_verification": """
        SCENARIO["workload"] = {"contest": {"X": 25, "T": 3}}
    """,
}


def read(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))


def test_every_notebook_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES) == {path.stem for path in FOLDER.glob("*.py")}


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_holds_the_output_of_one_run(name: str) -> None:
    """`make renew` writes it: every code cell ran once, in order, without errors, warnings and progress bars."""
    codes = [cell for cell in read(name)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in codes] == list(range(1, len(codes) + 1))
    assert sum(bool(cell["outputs"]) for cell in codes) >= 4
    for output in [output for cell in codes for output in cell["outputs"]]:
        assert output["output_type"] in ("display_data", "execute_result", "stream")
        assert output.get("name", "stdout") == "stdout"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_small_and_the_same_on_every_machine(name: str) -> None:
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert len(text) < MAX_BYTES
    assert not re.search(r"[\"' (](/home/|/root/|/tmp/|/Users/|[A-Z]:\\\\)", text)
    assert not re.search(r"(object|figure|axes)[\w .]* at 0x[0-9a-f]+", text, re.IGNORECASE)
    notebook = read(name)
    assert set(notebook["metadata"]) == {"jupytext", "kernelspec"}
    assert all(set(cell["metadata"]) <= {"tags", "lines_to_next_cell"} for cell in notebook["cells"])


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_matches_its_python_file(name: str) -> None:
    jupytext = pytest.importorskip("jupytext", reason="needs the extra `notebooks`")
    paired = jupytext.read(FOLDER / f"{name}.py")
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in read(name)["cells"]]
    assert cells == [(cell.cell_type, cell.source) for cell in paired.cells], "run python tools/run_notebooks.py"


@pytest.mark.parametrize("name", NAMES)
def test_the_first_code_cell_holds_the_parameters(name: str) -> None:
    first = next(cell for cell in read(name)["cells"] if cell["cell_type"] == "code")
    assert first["metadata"]["tags"] == ["parameters"]


@pytest.mark.parametrize("name", NAMES)
def test_every_chart_has_labels_and_a_sentence(name: str) -> None:
    for cell in read(name)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and "plt.show()" in source:
            assert re.search(r"xlabel|\{side\}label|\.plot(_trade_off)?\(", source)  # plots of results have labels
            assert "display(Markdown(" in source.partition("plt.show()")[2]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_from_start_to_end(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs the extra `notebooks`")
    client = pytest.importorskip("nbclient", reason="needs the extra `notebooks`")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONWARNINGS", os.environ.get("PYTHONWARNINGS", "ignore"))
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    first_code = next(i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code")
    lines = [line.strip() for line in SMALL_PARAMETERS[name].splitlines()]
    notebook.cells.insert(first_code + 1, nbformat.v4.new_code_cell("\n".join(lines)))
    patience = {"timeout": 1500, "startup_timeout": 1500, "iopub_timeout": 1500}  # for a busy machine
    client.NotebookClient(
        notebook, **patience, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    ).execute()
    charts = [
        output for cell in notebook.cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    assert len(charts) >= (3 if name == "capacity" else 5)
    if os.environ.get("SERVESIM_KEEP"):
        nbformat.write(notebook, Path(os.environ["SERVESIM_KEEP"]) / f"{name}.ipynb")
