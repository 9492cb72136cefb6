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
from tests.unit.edge_traces import EDGE_TRACES


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


def figures_of(parsed: Page) -> list[dict[str, str | None]]:
    return [attrs for _, attrs in parsed.tags if attrs.get("class") == "plotly-graph-div"]


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
    listed = re.compile(r"experts \d")
    # 80 x 3 cells, fewer by the prompt's tokens that the last layer did not route.
    assert len(listed.findall(without_library(report_html(tree)))) == 80 * 3 - 7
    monkeypatch.setattr("bmoe_lab.report.page._HOVER_CELLS", 239)
    assert listed.findall(without_library(report_html(tree))) == []


def test_report_of_a_comparison_shows_table_figures_and_marks():
    tree = make_tree(warnings=json.dumps(["Idle() never fired: it looked at 8 slots"]))
    parsed = Page(report_html(tree))
    figures = figures_of(parsed)
    # Quality, text, hit rate, misses, two policies; eight about the routing.
    assert len(figures) == 14
    assert len({figure["id"] for figure in figures}) == 14
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
    assert len(figures_of(parsed)) == 11
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
    assert re.findall(r'id="(figure-\d+)"', page) == [f"figure-{number}" for number in range(1, 11)]
    assert page == report_html(make_trace(n_token=20))


@pytest.mark.parametrize("name", EDGE_TRACES)
def test_report_of_a_trace_at_the_edges_has_a_figure_or_a_sentence_in_each_section(name):
    trace = EDGE_TRACES[name]()
    parsed = Page(report_html(trace))
    headings = sum(tag == "h2" for tag, _ in parsed.tags) - 1  # the settings
    instead = sum(attrs.get("class") == "instead" for _, attrs in parsed.tags)
    assert len(figures_of(parsed)) + instead == headings >= 10
    assert ("No figure:" in parsed.text) == (instead > 0)
    assert instead < headings or name == "empty"


def test_report_says_what_a_trace_lacks_in_the_place_of_the_figure():
    trace = make_trace(n_token=20).drop_vars(["residency", "piece"])
    text = Page(report_html(trace)).text
    place = text[text.index("What it missed") : text.index("Hit rate per layer")]
    assert "No figure:" in place
    assert "residency" in place
    assert "'piece'" in text[text.index("Along the text") :]


def test_report_leaves_out_a_figure_that_is_too_large_and_says_so(monkeypatch):
    monkeypatch.setattr("bmoe_lab.report.figures.MAX_FIGURE_BYTES", 100)
    parsed = Page(report_html(make_trace(n_token=20)))
    assert figures_of(parsed) == []
    assert parsed.text.count("MB to the page; draw it in a notebook.") == 10


def test_report_of_512_experts_stays_small():
    trace = make_trace(n_token=60, n_layer=4, n_expert=512, n_used=10, scores=True)
    assert len(report_html(trace).encode()) < 6.5 * 10**6


def test_report_of_several_compares_them_first_and_embeds_plotly_once():
    data = {
        "short": make_trace(n_token=20, seed=1),
        "cut": make_trace(n_token=40, policy="drop", seed=2),
        "priced": make_tree(),
    }
    data["cut"].attrs["complete"] = 0
    page = report_html(data)
    assert page.count("plotly.js v") == 1
    assert len(page.encode()) < 8 * 10**6
    parsed = Page(page)
    ids = [attrs["id"] for attrs in figures_of(parsed)]
    assert len(set(ids)) == len(ids) == 10 + 11 + 14
    links = [attrs["href"] for tag, attrs in parsed.tags if tag == "a"]
    assert links == ["#part-1", "#part-2", *["#part-3"] * 5]
    assert {"part-1", "part-2", "part-3"} <= {attrs.get("id") for _, attrs in parsed.tags}
    first = parsed.text.index("What it missed")
    table = parsed.text[:first]
    rate = f"{100 * float(data['short'].moe.hit_rate()):.1f} %"
    for words in ("short", "cut", "priced: lossless again", rate, "incomplete run"):
        assert words in table


def test_report_of_several_shows_unknown_as_unknown():
    known = make_trace(n_token=20, n_prefill=4)
    unknown = known.drop_vars(["residency", "read_bytes", "expert_bytes", "weight_chosen"])
    del unknown.attrs["cache_budget_bytes"]
    page = report_html({"known": known, "unknown": unknown})
    row = page[page.index(">unknown</a>") :]
    cells = re.findall(r"<td>(.*?)</td>", row[: row.index("</tr>")])
    assert cells[4:8] == ["–"] * 4  # budget, cycle, hit rate, bytes
    assert not any(cell.startswith(("0 B", "0.0", "nan")) for cell in cells)


def test_report_of_several_says_that_models_differ():
    one, two = make_trace(n_token=20), make_trace(n_token=20)
    assert "models differ" not in report_html([one, two])
    two.attrs["model_fingerprint"] = "other"
    assert "models differ" in report_html([one, two])


def test_report_of_one_in_a_list_is_that_of_the_trace():
    trace = make_trace(n_token=20)
    assert report_html([trace]) == report_html(trace) == report_html({"x": trace})


def test_report_of_several_escapes_their_names():
    nasty = "<img src=x onerror=alert(1)>"
    page = without_library(report_html({nasty: make_trace(20), "b": make_trace(20, seed=1)}))
    assert "<img" not in page
    assert page.count("&lt;img src=x onerror=alert(1)&gt;") == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "at least one trace or comparison; got none"),
        ({}, "at least one trace or comparison; got none"),
        ("trace.nc", "data must be a trace or a comparison; got str"),
        ({"good": make_trace(20), "bad": 3}, r"data\['bad'\] must be a trace .* got int"),
    ],
)
def test_report_of_several_refuses_what_is_no_trace(data, message):
    with pytest.raises(SchemaError, match=message):
        report_html(data)
