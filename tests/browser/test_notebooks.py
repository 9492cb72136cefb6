"""Every notebook in a real browser: all cells run, every widget draws, nothing complains."""

import re
from pathlib import Path

import jupytext
import pytest

pytestmark = pytest.mark.browser

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.py"))


@pytest.fixture
def run_notebook(open_notebook):
    def run(path):
        notebook = jupytext.read(path)
        notebook.metadata["name"] = path.stem
        page = open_notebook(notebook)
        page.run_all()
        return page

    return run


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_draws_without_a_complaint(path, run_notebook):
    page = run_notebook(path)
    cells = page.page.locator(".jp-CodeCell")
    for index in range(cells.count()):
        cell = cells.nth(index)
        if cell.locator(".jp-OutputArea-output").count():
            cell.scroll_into_view_if_needed()
            page.settle()
            page.picture(f"{path.stem} cell {index:02}", cell)
    assert page.trouble() == []
    source = path.read_text()
    shown = re.findall(r"^(?:\w+ = )?bl\.widgets\.\w+\(", source, re.MULTILINE)
    assert page.figures().count() >= len(shown)
