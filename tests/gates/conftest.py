import functools
from pathlib import Path

import pytest

import bmoe_lab as bl
from tests.gates.harness import Case, plain_case

TEXT = (
    "And it came to pass in those days, that there went out a decree. "
    "def read(path):\n    return open(path).read()\n"
    "SCENE II. A room in the castle. Enter the King, and attendants. "
    "En el principio crió Dios los cielos y la tierra. "
) * 6


@pytest.fixture(scope="session")
def demo_case() -> Case:
    return plain_case(bl.datasets.demo_model(), TEXT)


@pytest.fixture(scope="session")
def tiny_case(tmp_path_factory):
    """Return the case of a generated layout; each is made once per worker."""
    folder = tmp_path_factory.mktemp("tiny")

    @functools.cache
    def make(layout: str) -> Case:
        path = bl.testing.tiny_model(layout, Path(folder) / f"{layout}.gguf")
        return plain_case(path, TEXT)

    return make
