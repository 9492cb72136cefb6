"""Every notebook runs from top to bottom; its committed .ipynb is made from its text."""

import re
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.py"))
WIDGET = "application/vnd.jupyter.widget-view+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"

# Read back by data frames: tables are all that it shows.
WITHOUT_FIGURE = {"04_export_and_read_back"}

pytestmark = pytest.mark.filterwarnings(
    # Jupyter's own deprecations are not ours to mend.
    "ignore::DeprecationWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


def test_notebooks_exist():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_shows_something(path, tmp_path):
    notebook = jupytext.read(path)
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert "text/html" in kinds
    assert path.stem in WITHOUT_FIGURE or "application/vnd.plotly.v1+json" in kinds
    # Without a browser a widget is there all the same, with its state.
    widgets = [o for o in outputs if WIDGET in o.get("data", {})]
    shown = re.findall(r"^(?:\w+ = )?bl\.widgets\.\w+\(", path.read_text(), re.MULTILINE)
    assert len(widgets) == len(shown)
    state = notebook.metadata.get("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    assert {o["data"][WIDGET]["model_id"] for o in widgets} <= set(state)
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [o.text for o in outputs if o.output_type == "stream" and o.name == "stderr"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_file_is_made_from_its_text(path):
    stored = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
    made = jupytext.read(path)
    assert [(c.cell_type, c.source) for c in stored.cells] == [
        (c.cell_type, c.source) for c in made.cells
    ]
    assert not any(cell.get("outputs") for cell in stored.cells)
