import os
import signal
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_state_folder(tmp_path_factory, monkeypatch):
    """Journals of recordings go to a folder of the test, never to the user's."""
    monkeypatch.setenv("BMOE_LAB_STATE_DIR", str(tmp_path_factory.mktemp("state")))


@pytest.fixture(scope="session")
def reference_data() -> Path:
    """Return the folder of recorded traces of other engines, where it is at hand."""
    folder = os.environ.get("BMOE_LAB_REFERENCE_DATA")
    if not folder:
        pytest.skip("BMOE_LAB_REFERENCE_DATA is not set: no recorded traces of other engines")
    return Path(folder)


def pytest_configure():
    """Let Ctrl-C be tested whatever started the tests.

    A shell starts background jobs with SIGINT ignored, Python keeps it so, and then no test could
    interrupt anything.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure():
    """Close what llama_cpp opens at import; else every run ends with a warning about it."""
    import sys

    module = sys.modules.get("llama_cpp._utils")
    for name in ("outnull_file", "errnull_file"):
        file = getattr(module, name, None)
        if file is not None:
            file.close()
