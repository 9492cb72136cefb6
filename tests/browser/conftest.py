import os

import pytest

from tests.browser.jupyter_lab import LabPage, LabServer, browser, find_chromium, pictures_folder

pytestmark = pytest.mark.browser


@pytest.fixture(scope="session")
def chromium():
    path = find_chromium()
    if path is None:
        if os.environ.get("CI"):
            pytest.fail(
                "chromium must be on the PATH in continuous integration; .ci/run installs it"
            )
        pytest.skip("no chromium on the PATH: install the system's package to see the widgets")
    return path


@pytest.fixture(scope="session")
def lab_server(chromium, tmp_path_factory):
    server = LabServer(tmp_path_factory.mktemp("lab"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def lab_browser(lab_server):
    with browser(lab_server.folder) as context:
        yield context


@pytest.fixture
def open_notebook(lab_server, lab_browser):
    opened = []

    def open_(notebook):
        page = LabPage(lab_server, lab_browser, notebook, pictures_folder())
        opened.append(page)
        return page

    yield open_
    for page in opened:
        page.picture(f"{page.name.removesuffix('.ipynb')} at the end")
        page.close()
