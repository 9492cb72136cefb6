"""The shape of the package: what is public, what importing it costs, which way the arrows go."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import bmoe_lab

PACKAGE = Path(bmoe_lab.__file__).parent
HEAVY = (
    "numba",
    "llama_cpp",
    "plotly",
    "anywidget",
    "ipywidgets",
    "pyarrow",
    "zarr",
    "h5netcdf",
    "rich",
    "typer",
    "dask",
    "distributed",
)


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("name", bmoe_lab.__all__)
def test_public_name_exists(name):
    assert getattr(bmoe_lab, name) is not None


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = bmoe_lab.nothing


def test_public_functions_are_functions_whatever_was_imported_before():
    """A submodule of the same name would hide the function once it is imported."""
    code = (
        "import importlib, pkgutil, bmoe_lab\n"
        "for m in pkgutil.walk_packages(bmoe_lab.__path__, 'bmoe_lab.'): "
        "importlib.import_module(m.name)\n"
        "assert callable(bmoe_lab.compare), bmoe_lab.compare\n"
        "names = [n for n in bmoe_lab.__all__ if n[0].islower() and n not in bmoe_lab._MODULES]\n"
        "wrong = [n for n in names if not callable(getattr(bmoe_lab, n))]\n"
        "assert not wrong and len(names) > 10, wrong\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_import_loads_nothing_heavy():
    """Heavy packages load on first use, so that `import bmoe_lab` costs little beside xarray."""
    code = (
        "import sys, xarray; before = set(sys.modules); import bmoe_lab; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True
    )
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not loaded & set(HEAVY)


def test_only_the_seam_knows_llama_cpp():
    leaks = [
        str(path.relative_to(PACKAGE))
        for path in modules()
        if path.parent.name != "seam"
        and any(name.split(".")[0] in ("ctypes", "llama_cpp") for name in imports(path))
    ]
    assert leaks == []


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("residency", ("xarray", "bmoe_lab.seam", "bmoe_lab.streaming", "bmoe_lab.schema")),
        ("routing", ("xarray", "bmoe_lab.seam", "bmoe_lab.streaming", "bmoe_lab.schema")),
        ("streaming", ("xarray", "bmoe_lab.routing", "bmoe_lab.recording", "bmoe_lab.runtime")),
        ("recording", ("bmoe_lab.seam", "bmoe_lab.streaming", "bmoe_lab.runtime")),
        ("plots", ("bmoe_lab.seam", "bmoe_lab.streaming", "bmoe_lab.runtime", "bmoe_lab.session")),
        ("metrics", ("bmoe_lab.simulation", "bmoe_lab.plots", "bmoe_lab.residency")),
        (
            "simulation",
            ("bmoe_lab.seam", "bmoe_lab.streaming", "bmoe_lab.runtime", "bmoe_lab.session"),
        ),
        ("converters", ("bmoe_lab.seam", "bmoe_lab.streaming", "bmoe_lab.simulation")),
        ("seam", ("xarray", "bmoe_lab.routing", "bmoe_lab.streaming", "bmoe_lab.runtime")),
    ],
)
def test_arrows_go_one_way(folder, forbidden):
    wrong = {
        f"{path.name}: {name}"
        for path in (PACKAGE / folder).glob("*.py")
        for name in imports(path)
        if any(name == word or name.startswith(word + ".") for word in forbidden)
    }
    assert wrong == set()


def test_schema_imports_nothing_of_ours_but_errors():
    ours = {name for name in imports(PACKAGE / "schema.py") if name.startswith("bmoe_lab")}
    assert ours <= {"bmoe_lab.errors", "bmoe_lab", "bmoe_lab.validation"}


def test_every_module_says_its_idea():
    silent = [
        str(path.relative_to(PACKAGE))
        for path in modules()
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []
