"""The Python of the README runs."""

import re
from pathlib import Path

import pytest

import bmoe_lab as bl

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)


def test_readme_has_python():
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_readme_block_runs(number, capsys):
    names = {"bl": bl}
    exec(compile(BLOCKS[number], f"README block {number}", "exec"), names)
    shown = capsys.readouterr().out
    assert shown or "class " in BLOCKS[number]


def test_readme_links_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    targets = [t for t in re.findall(r"\]\(([^)]+)\)", text) if not t.startswith("http")]
    assert targets
    assert [t for t in targets if not (ROOT / t).exists()] == []


def test_every_command_is_in_the_readme_or_help():
    from bmoe_lab.cli import app

    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert names == {"demo", "record", "score", "compare", "recover", "info", "doctor"}
