"""Kernels on disk: taken from the cache as long as all that was compiled into them is the same."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

HELPER = """
from bmoe_lab.kernels import {how}

STEP = {step}

@{how}
def add(number):
    return number + {plus}
"""

CALLER = """
from bmoe_lab.kernels import compiled
from kernels_of_a_test.helper import STEP, add

@compiled
def call(number):
    return _more(number) * STEP

@compiled
def _more(number):
    return add(number)
"""


class Package:
    """A package of two modules, written again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "kernels_of_a_test"
        self.folder.mkdir()
        (self.folder / "__init__.py").touch()
        (self.folder / "caller.py").write_text(CALLER)

    def caller(self, **helper: object) -> ModuleType:
        """Return the calling module as a new process would import it."""
        text = HELPER.format(**{"how": "compiled", "plus": 1, "step": 1, **helper})
        (self.folder / "helper.py").write_text(text)
        self.forget()
        importlib.invalidate_caches()
        return importlib.import_module("kernels_of_a_test.caller")

    def forget(self) -> None:
        """Take the modules out of this process."""
        for name in [name for name in sys.modules if name.startswith("kernels_of_a_test")]:
            del sys.modules[name]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    monkeypatch.syspath_prepend(str(tmp_path))
    # Python's own cache tells files apart by seconds.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    made = Package(tmp_path)
    yield made
    made.forget()


def test_kernel_is_taken_from_the_disk_if_nothing_changed(package: Package) -> None:
    package.caller().call(1)
    again = package.caller()
    assert again.call(1) == 2
    assert sum(again.call.stats.cache_hits.values()) == 1


@pytest.mark.parametrize("how", ["compiled", "inlined"])
def test_kernel_whose_helper_in_another_module_changed_is_compiled_again(
    package: Package, how: str
) -> None:
    """numba looks at the kernel's own file only: the old helper would have gone on inside it."""
    assert package.caller(how=how).call(1) == 2
    assert package.caller(how=how, plus=2).call(1) == 3


def test_kernel_whose_constant_in_another_module_changed_is_compiled_again(
    package: Package,
) -> None:
    assert package.caller().call(1) == 2
    assert package.caller(step=10).call(1) == 20
