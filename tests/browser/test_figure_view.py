"""The figure in the page: drawn, clicked, zoomed, replaced."""

import pytest

from tests.browser.jupyter_lab import notebook_of

pytestmark = pytest.mark.browser

CELL = """
import numpy as np
import plotly.graph_objects as go
from bmoe_lab.plots import theme
from bmoe_lab.widgets.figure_view import FigureView

def heatmap(n):
    figure = theme.figure(title="A <b> map", x_title="token", y_title="layer")
    figure.add_trace(go.Heatmap(z=np.arange(4 * n, dtype=float).reshape(4, n)))
    figure.update_xaxes(range=[-0.5, n - 0.5])
    return figure

view = FigureView(heatmap(10))
view
"""


def _centre(page):
    box = page.page.locator(".bmoe-figure .nsewdrag").first.bounding_box()
    return box, box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_figure_is_drawn_clicked_zoomed_and_replaced(open_notebook):
    page = open_notebook(notebook_of(CELL, name="figure_view"))
    page.run_all()
    assert page.page.locator(".bmoe-figure .gtitle").text_content() == "A <b> map"

    box, x, y = _centre(page)
    page.page.mouse.click(x + 2, y - 2)
    page.page.wait_for_timeout(300)
    clicked = page.ask("view.clicked")
    row, column = clicked["index"]
    assert (clicked["x"], clicked["y"]) == (column, row)
    assert (column, row) == (5, 2)

    page.page.mouse.move(box["x"] + 0.3 * box["width"], y)
    page.page.mouse.down()
    page.page.mouse.move(box["x"] + 0.7 * box["width"], y, steps=6)
    page.page.mouse.up()
    page.page.wait_for_timeout(300)
    low, high = page.ask("view.view")["xaxis"]
    assert low == pytest.approx(-0.5 + 0.3 * 10, abs=0.2)
    assert high == pytest.approx(-0.5 + 0.7 * 10, abs=0.2)

    page.ask("view.show(heatmap(10))")
    page.settle()
    ranges = page.page.evaluate(
        "document.querySelector('.bmoe-figure .js-plotly-plot').layout.xaxis.range"
    )
    assert ranges == pytest.approx([low, high])  # a new picture leaves the zoom alone
    page.ask("view.show(heatmap(20), keep_view=False)")
    page.settle()
    ranges = page.page.evaluate(
        "document.querySelector('.bmoe-figure .js-plotly-plot').layout.xaxis.range"
    )
    assert ranges == [-0.5, 19.5]
    assert page.trouble() == []


def test_two_figures_share_one_copy_of_plotly(open_notebook):
    page = open_notebook(notebook_of(CELL, "view2 = FigureView(heatmap(3))\nview2", name="shared"))
    page.run_all()
    assert page.figures().count() == 2
    assert page.ask("view.library is view2.library")
    assert page.trouble() == []


def test_a_figure_that_plotly_refuses_is_said_in_the_page(open_notebook):
    page = open_notebook(notebook_of(CELL, name="refused"))
    page.run_all()
    bad = "{'data': [{'y': {'dtype': 'no such', 'bdata': b'12'}}], 'layout': {}, 'config': {}}"
    page.ask(f"setattr(view, 'figure', {bad})")
    page.ask("setattr(view, 'version', view.version + 1)")
    alert = page.page.locator(".bmoe-figure [role=alert]")
    alert.filter(has_text="could not be drawn").wait_for(timeout=5000)
