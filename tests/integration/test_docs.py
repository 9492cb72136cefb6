"""The Python of the README and the docs runs, and what they list exists."""

import re
from pathlib import Path

import pytest

import bmoe_lab as bl

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "docs/lab.md", "docs/replay.md"]
BLOCKS = [
    (page, number, block)
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.S)
    )
]


@pytest.mark.parametrize("page", PAGES)
def test_page_has_python(page):
    assert any(block[0] == page for block in BLOCKS)


@pytest.mark.parametrize(
    ("page", "number", "block"), BLOCKS, ids=[f"{page}-{number}" for page, number, _ in BLOCKS]
)
def test_block_runs(page, number, block, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"bl": bl}
    exec(compile(block, f"{page} block {number}", "exec"), names)
    shown = capsys.readouterr().out
    assert shown or "class " in block


def test_replay_page_lists_every_policy():
    text = (ROOT / "docs/replay.md").read_text()
    missing = [
        name
        for name in bl.residency.names()
        if f"| `{name}` | `{bl.residency.get(name).__name__}` |" not in text
    ]
    missing += [
        bl.routing.get(name).__name__
        for name in bl.routing.names()
        if f"`{bl.routing.get(name).__name__}" not in text and name != "lossless"
    ]
    assert missing == []


def test_replay_page_lists_every_figure_of_a_sweep():
    grid = bl.sweep(
        bl.testing.make_trace(40, n_layer=2, seed=0),
        residency="lru",
        budgets="200 KiB",
        routing=bl.routing.DropCold(1.0),
        phase="decode",
        progress=False,
    )
    page = (ROOT / "docs/replay.md").read_text()
    figures = {f"`{name.removesuffix('decode')}<phase>`" for name in grid.data_vars}
    names = figures | {f"`{name}`" for name in (*grid.coords, *grid.attrs)}
    assert {name for name in names if name not in page} == set()


@pytest.mark.parametrize(
    "page", ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    targets = [t for t in re.findall(r"\]\(([^)#]+)", text) if not t.startswith("http")]
    assert targets or page != "README.md"
    assert [t for t in targets if not ((ROOT / page).parent / t).exists()] == []


@pytest.mark.parametrize("widget", ["LiveRun", "PolicyLab", "RouteExplorer"])
def test_lab_page_lists_a_widget_and_its_traits(widget):
    """Those of its own class: ipywidgets has many more."""
    page = (ROOT / "docs/lab.md").read_text()
    assert f"| `bl.widgets.{widget}(" in page
    section = page.split(f"\n## {widget}\n")[1].split("\n## ")[0]
    traits = getattr(bl.widgets, widget).class_own_traits()
    missing = [name for name in traits if not name.startswith("_") and f"`{name}`" not in section]
    assert missing == []


def test_every_command_is_in_the_readme_or_help():
    from bmoe_lab.cli import app

    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    readme = (ROOT / "README.md").read_text()
    assert [name for name in names if f"| `bmoe-lab {name}" not in readme] == []
    assert names == {
        "demo", "record", "score", "compare", "replay", "sweep", "report", "recover", "info",
        "doctor",
    }  # fmt: skip
