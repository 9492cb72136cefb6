"""The report is one file that works offline, with nothing in it that a trace could smuggle in."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import xarray as xr

from bmoe_lab.errors import SchemaError
from bmoe_lab.report import report_html, write_report
from bmoe_lab.testing.traces import make_trace
from tests.unit.comparison_data import make_tree


class Page(HTMLParser):
    """Collects tags, attributes and visible text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data):
        if not self.open:
            self.text += data


def without_library(page: str) -> str:
    """Return the page without plotly.js."""
    start = page.index("<script>")
    return page[:start] + page[page.index("</script>", start) :]


def test_report_of_a_comparison_is_one_small_file_that_loads_nothing():
    page = report_html(make_tree())
    assert len(page.encode()) < 6 * 10**6
    parsed = Page(page)
    for tag, attrs in parsed.tags:
        for name in ("src", "href"):
            assert (attrs.get(name) or "data:").startswith("data:"), (tag, attrs)
    assert page.count("plotly.js v") == 1
    assert "@import" not in page
    assert "url(" not in without_library(page)


def test_report_lists_experts_of_one_map_only_and_not_of_a_large_one(monkeypatch):
    """Hover text of every cell of every map would take the page over its limit."""
    tree = make_tree()
    assert without_library(report_html(tree)).count("experts ") in range(240, 260)  # 80 x 3 cells
    monkeypatch.setattr("bmoe_lab.report._HOVER_CELLS", 239)
    assert without_library(report_html(tree)).count("experts ") < 20


def test_report_of_a_comparison_shows_table_figures_and_marks():
    tree = make_tree(warnings=json.dumps(["Idle() never fired: it looked at 8 slots"]))
    parsed = Page(report_html(tree))
    figures = [a for t, a in parsed.tags if a.get("class") == "plotly-graph-div"]
    assert len(figures) == 7  # quality, text, hit rate, misses, load, two policies
    assert len({figure["id"] for figure in figures}) == 7
    assert "lossy: DropCold(frac=0.75)" in parsed.text
    assert "NEVER FIRED" in parsed.text
    assert "Idle() never fired: it looked at 8 slots" in parsed.text
    assert f"{float(tree['perplexity'][2]):.3f}" in parsed.text


def test_report_settings_are_those_of_the_run():
    tree = make_tree(model_name="demo", llama_cpp_commit="abc123")
    tree.attrs["session_settings"] = json.dumps({"n_ctx": 512, "cache": 4096})
    text = Page(report_html(tree)).text
    assert "abc123" in text
    assert "n_ctx = 512, cache = 4096" in text
    assert "not recorded" not in text


def test_report_incomplete_comparison_says_where_it_stopped():
    text = Page(report_html(make_tree(complete=0, failed_arm="Mine()"))).text
    assert "stopped in Mine()" in text
    assert "INCOMPLETE" in text


@pytest.mark.parametrize("make", [make_tree, lambda: make_trace(n_token=30)])
def test_report_text_of_a_trace_cannot_become_markup(make):
    nasty = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    data = make()
    datasets = [data] if isinstance(data, xr.Dataset) else list(data.children.values())
    for ds in datasets:
        ds.coords["piece"] = ("token", np.array([nasty] * ds.sizes["token"]))
        ds.attrs.update(policy=nasty, model_name=nasty, machine=nasty)
    data.attrs.update(model_name=nasty, warnings=json.dumps([nasty]), arch=nasty)
    if isinstance(data, xr.DataTree):
        names = data["arm_name"].values.astype(object)
        names[2] = nasty
        data["arm_name"] = xr.DataArray(names.astype(str), dims="arm")
    page = without_library(report_html(data))
    assert "<script>alert(1)" not in page
    assert "<img" not in page
    assert "alert(1)" in page  # it is there, as text


def test_report_of_a_trace_draws_its_figures():
    parsed = Page(report_html(make_trace(n_token=40, policy="drop")))
    figures = [a for t, a in parsed.tags if a.get("class") == "plotly-graph-div"]
    assert len(figures) == 4
    assert "lossy: DropCold(0.75)" in parsed.text
    assert "What the policy changed" in parsed.text


def test_report_of_a_prompt_only_shows_its_prefill():
    page = report_html(make_trace(n_token=8, n_prefill=8))
    assert "Hit rate per layer, prefill" in page
    assert "Hit rate per layer, decode" in report_html(make_trace(n_token=8))


def test_report_of_something_else_is_refused():
    with pytest.raises(SchemaError, match="data must be a trace or a comparison; got Dataset"):
        report_html(xr.Dataset())
    with pytest.raises(SchemaError, match="got DataTree"):
        report_html(xr.DataTree())


def test_write_report_replaces_the_old_page_whole(tmp_path):
    target = tmp_path / "report.html"
    target.write_text("old")
    assert write_report(make_trace(n_token=20), target, title="A & B") == target
    page = target.read_text(encoding="utf-8")
    assert page.endswith("</html>\n")
    assert "<title>A &amp; B</title>" in page
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_write_report_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    from pathlib import Path

    def fails(self, target):
        raise OSError("no")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="no"):
        write_report(make_trace(n_token=20), tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_write_report_where_nothing_can_be_written_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_report(make_trace(n_token=20), tmp_path / "missing" / "report.html")


def test_report_ids_are_the_same_every_time():
    page = report_html(make_trace(n_token=20))
    assert re.findall(r'id="(figure-\d+)"', page) == ["figure-1", "figure-2", "figure-3"]
    assert page == report_html(make_trace(n_token=20))
