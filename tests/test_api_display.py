"""What notebooks show of the results of the Python API: HTML and charts."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import servesim
import yaml
from servesim.core import BadInput

from .test_api_studies import BASE, COST, OWN_POLICY, WIDE

EVIL = "<script>"
matplotlib.use("agg")


class Tags(HTMLParser):
    """Collects the tags and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_of_every_result_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(f"{EVIL}.py").write_text(OWN_POLICY)
    base = {**BASE, "name": EVIL}
    params = {"policy.name": [f"{EVIL}.py:Mine"], "policy.decode_batch": [16]}
    slow = {**BASE, "policy": {"name": "vllm", "max_num_seqs": 1}}
    run = servesim.run(base, policy=f"{EVIL}.py:Mine")
    run.metrics["warnings"] = [EVIL]  # type: ignore[index]
    (tmp_path / "profile.yaml").write_text(yaml.safe_dump({"name": EVIL, "device": EVIL, "how": EVIL, "cost": COST}))
    fast = {key: value if key == "kind" else value / 20 for key, value in COST.items()}
    quick = {**base, "profile": fast, "workload": {"contest": {"X": 50, "T": 0.2}}}
    results = [
        run,
        servesim.sweep(base=BASE, params=params),
        servesim.sweep(base=BASE, params=params, rates=[2, 4], subject_to="p99_ttft_ms <= 8000"),
        servesim.sweep(base=slow, params=params, rates=[2, 4]),  # names the winner at each rate
        servesim.compare(base, {**WIDE, "name": EVIL}, replications=2),
        servesim.check(base, subject_to="makespan <= 9", replications=2),
        servesim.replay(quick, backend="fake"),
        servesim.load(tmp_path),
    ]
    pages = [Tags(result._repr_html_()) for result in results]  # type: ignore[union-attr]
    for page in pages:
        assert page.tags <= {"p", "b", "table", "thead", "tbody", "tr", "th", "td"}
        assert "nan" not in page.text
        assert EVIL in page.text


def test_plots_have_labels_and_use_given_axes() -> None:
    swept = servesim.sweep(base=BASE, params={"policy.max_num_seqs": [2, 8]}, replications=2, objectives=["makespan"])

    capacity = servesim.capacity(BASE, subject_to="p99_ttft_ms <= 3000", precision=0.5)
    rates = servesim.sweep(
        base=BASE, params={"policy.max_num_seqs": [8]}, rates=[2, 4], subject_to="p99_ttft_ms <= 9000"
    )
    axes = plt.figure().subplots()
    assert capacity.plot(axes=axes) is axes and axes.get_xlabel() == "request rate (req/s)"
    charts = {
        "P99 TTFT (s)": [capacity.plot(), rates.plot()],
        "Makespan (s)": [capacity.plot("makespan"), swept.plot("policy.max_num_seqs"), rates.plot("makespan")],
    }
    for label, plots in charts.items():
        assert [plot.get_ylabel() for plot in plots] == [label] * len(plots)
    changes = swept.compare().plot()
    assert changes.get_xlabel() == "B against A (%)"
    assert next(iter(changes.get_yticklabels())).get_text() == "Mean end-to-end latency"
    assert np.isclose(charts["P99 TTFT (s)"][0].lines[1].get_ydata()[0], 3)
    for result in (capacity, rates):
        with pytest.raises(BadInput, match="metric 'speed': expected a metric of the"):
            result.plot("speed")
    plt.close("all")
