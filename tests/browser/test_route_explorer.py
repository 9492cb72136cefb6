"""RouteExplorer as a person uses it: slider, click, zoom, and what the page then shows."""

import re

import numpy as np
import pytest

from tests.browser.jupyter_lab import notebook_of

pytestmark = pytest.mark.browser

CELL = """
import bmoe_lab as bl
from bmoe_lab.testing import make_trace
trace = make_trace(n_token=80, n_layer=5, n_expert=32, n_used=4, policy="drop", scores=True, seed=1)
explorer = bl.widgets.RouteExplorer(trace)
explorer
"""


def _map(page):
    box = page.figures().first.locator(".nsewdrag").first.bounding_box()

    def at(x, y):
        return box["x"] + x * box["width"], box["y"] + y * box["height"]

    return at


def _table(page):
    """Return the rows of the table of slots, as text."""
    table = page.page.locator("table", has_text="weight").filter(has_text="residency").last
    return [row.split("\t") for row in table.inner_text().strip().splitlines()]


def test_a_click_shows_the_cell_that_the_trace_holds(open_notebook):
    page = open_notebook(notebook_of(CELL, name="explorer_click"))
    page.run_all()
    # 80 tokens wide, 5 layers high: the cell of token 60, layer 3.
    page.page.mouse.click(*_map(page)(60.5 / 80, 1 - 3.5 / 5))
    page.page.wait_for_function("document.body.innerText.includes('token 60')")
    page.settle()
    assert page.ask("explorer.cell") == [60, 3]
    expected = page.ask("trace.expert_chosen.values[60, 3].tolist()")
    head, *rows = _table(page)
    place = next(i for i, name in enumerate(head) if name.startswith("expert"))
    assert [int(re.match(r"\d+", row[place])[0]) for row in rows] == expected
    page.picture("explorer_click", page.page.locator(".jp-OutputArea").last)
    assert page.trouble() == []


def test_a_slider_moves_the_map_and_a_zoom_moves_the_slider(open_notebook):
    page = open_notebook(notebook_of(CELL, name="explorer_zoom"))
    page.run_all()
    slider = page.page.locator(".widget-slider", has_text="tokens")
    slider.locator(".noUi-handle-lower").focus()
    for _ in range(3):
        page.page.keyboard.press("ArrowRight")
    page.page.wait_for_function("document.body.innerText.includes('tokens 3 to 79 of 80')")
    page.settle()
    assert page.ask("explorer.tokens") == [3, 80]
    drawn = page.page.evaluate(
        "document.querySelector('.bmoe-figure .js-plotly-plot').data[0].z.map(row => [...row])"
    )
    expected = page.ask("trace.moe.plot.heatmap(tokens=(3, 80)).data[0].z.tolist()")
    np.testing.assert_array_equal(drawn, expected)

    at = _map(page)
    page.page.mouse.move(*at(0.25, 0.5))
    page.page.mouse.down()
    page.page.mouse.move(*at(0.75, 0.5), steps=6)
    page.page.mouse.up()
    page.page.wait_for_function("!document.body.innerText.includes('tokens 3 to 79 of 80')")
    page.settle()
    first, stop = page.ask("explorer.tokens")
    assert first == pytest.approx(3 + 0.25 * 77, abs=1.5)
    assert stop == pytest.approx(3 + 0.75 * 77, abs=1.5)
    shown = slider.locator(".widget-readout").inner_text()
    assert [int(number) for number in re.findall(r"\d+", shown)] == [first, stop - 1]
    ranges = page.page.evaluate(
        "document.querySelector('.bmoe-figure .js-plotly-plot').layout.xaxis.range"
    )
    assert ranges == [first - 0.5, stop - 0.5]
    assert page.trouble() == []


def test_the_tabs_draw_when_they_are_opened(open_notebook):
    page = open_notebook(notebook_of(CELL, name="explorer_tabs"))
    page.run_all()
    for number, title in enumerate(("Expert", "Layers"), 1):
        page.page.locator(".lm-TabBar-tabLabel", has_text=title).click()
        page.settle()
        assert page.ask("explorer.tab") == number
        page.picture(f"explorer {title}", page.page.locator(".jp-OutputArea").last)
    rate = page.ask("float(trace.moe.hit_rate())")
    assert f"{100 * rate:.1f} %" in page.page.locator("body").text_content()
    assert page.trouble() == []
