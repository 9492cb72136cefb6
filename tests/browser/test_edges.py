"""Traces at the edges: each widget shows a picture or a sentence, and the page stays quiet."""

import pytest

from tests.browser.jupyter_lab import notebook_of
from tests.unit.edge_traces import EDGE_TRACES

pytestmark = pytest.mark.browser

SETUP = """
import sys
sys.path.insert(0, {root!r})
import bmoe_lab as bl
from tests.unit.edge_traces import EDGE_TRACES
"""


@pytest.mark.parametrize("widget", ["PolicyLab"])
def test_widgets_take_every_edge(widget, open_notebook, pytestconfig):
    cells = [SETUP.format(root=str(pytestconfig.rootpath))]
    cells += [f"bl.widgets.{widget}(EDGE_TRACES[{name!r}]())" for name in EDGE_TRACES]
    page = open_notebook(notebook_of(*cells, name=f"edges_{widget}"))
    page.run_all()
    outputs = page.page.locator(".jp-CodeCell")
    for number, name in enumerate(EDGE_TRACES, 1):
        outputs.nth(number).scroll_into_view_if_needed()
        page.picture(f"{widget} {name}", outputs.nth(number))
    assert page.trouble() == []
