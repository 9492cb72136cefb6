"""JupyterLab on the loopback address, in a headless Chromium, with a look into its kernel."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError

import nbformat
from jupyter_client import BlockingKernelClient
from playwright.sync_api import sync_playwright

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
START_S = 60
CELLS_S = 120
DRAW_S = 60
POLL_MS = 250
QUIET_POLLS = 12

# A cell shows its number once it has run: [*] until then, [ ] before.
PROGRESS = """() => {
    const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')]
        .map(e => e.textContent);
    const status = document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status;
    return {
        waiting: prompts.filter(text => !/\\[\\d+\\]/.test(text)).length,
        busy: status !== 'idle' || prompts.some(text => text.includes('*')),
    };
}"""


def find_chromium():
    """Return the path of the system's Chromium, None without one."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class LabServer:
    """A JupyterLab of its own: settings, runtime files and notebooks lie in `folder`."""

    def __init__(self, folder, *, theme="JupyterLab Light"):
        self.folder = folder
        self.root = folder / "notebooks"
        self.runtime = folder / "runtime"
        self.root.mkdir()
        settings = folder / "settings" / "@jupyterlab"
        for name, values in {
            # Nothing is asked from outside, and no question covers the page.
            "apputils-extension/notification": {
                "fetchNews": "false",
                "checkForUpdates": False,
                "doNotDisturbMode": True,
            },
            "apputils-extension/themes": {"theme": theme},
            # Every cell is in the page, seen or not.
            "notebook-extension/tracker": {"windowingMode": "none"},
        }.items():
            file = settings / f"{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(values))
        environment = os.environ | {
            "HOME": str(folder),
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTER_DATA_DIR": str(folder / "data"),
            "JUPYTER_RUNTIME_DIR": str(self.runtime),
            "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
            "IPYTHONDIR": str(folder / "ipython"),
        }
        self.log = folder / "server.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "jupyterlab",
                    "--no-browser",
                    "--allow-root",
                    "--ip=127.0.0.1",
                    "--port=0",
                    "--IdentityProvider.token=test",
                    f"--ServerApp.root_dir={self.root}",
                    "--LabApp.extension_manager=readonly",
                ],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.url = self._wait()

    def _wait(self):
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            for file in self.runtime.glob("jpserver-*.json"):
                try:
                    url = json.loads(file.read_text())["url"]
                    urllib.request.urlopen(f"{url}api?token=test").close()
                except (URLError, ValueError, OSError):
                    continue
                return url
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        raise AssertionError(f"JupyterLab did not start:\n{self.log.read_text()}")

    def get(self, path):
        """Return what the server's interface answers."""
        with urllib.request.urlopen(f"{self.url}{path}?token=test") as answer:
            return json.load(answer)

    def stop(self):
        """End the server with its kernels."""
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def browser(folder, *, width=1200, height=1400, dark=False):
    """Open a Chromium with a fresh profile; yields the context."""
    with sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            folder / "profile",
            executable_path=find_chromium(),
            headless=True,
            args=list(FLAGS),
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
        )
        try:
            yield context
        finally:
            context.close()


class LabPage:
    """One notebook, open in the browser.

    Attributes
    ----------
    complaints : list of str
        Errors of the browser's console, exceptions of its scripts, requests that failed.
    """

    def __init__(self, server, context, notebook, pictures):
        self.server = server
        self.pictures = pictures
        self.name = f"{notebook.metadata.get('name', 'notebook')}.ipynb"
        notebook.metadata["kernelspec"] = {
            "name": "python3",
            "display_name": "Python 3",
            "language": "python",
        }
        nbformat.write(notebook, server.root / self.name)
        self.page = context.new_page()
        self.complaints = []
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(f"exception: {error}"))
        self.page.on("requestfailed", self._failed)
        self.page.goto(f"{server.url}doc/tree/{self.name}?token=test")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=1000 * START_S)
        self._kernel = None

    def _console(self, message):
        if message.type == "error":
            self.complaints.append(f"console: {message.text} ({message.location.get('url', '')})")

    def _failed(self, request):
        # A page that is left breaks off what it was loading; that is no error.
        if "ERR_ABORTED" not in str(request.failure):
            self.complaints.append(f"request: {request.url} {request.failure}")

    def run_all(self):
        """Run every cell; wait until the kernel is idle and every figure in the page drawn."""
        self._wait_for_idle(START_S)
        deadline = time.monotonic() + CELLS_S
        quiet = QUIET_POLLS
        while (state := self.page.evaluate(PROGRESS))["waiting"]:
            assert time.monotonic() < deadline, f"cells were not run: {self.trouble()}"
            # The menu is there before what it does, and cells asked for while the page still
            # connects to its kernel are forgotten: then nothing runs, and they are asked for again.
            quiet = 0 if state["busy"] else quiet + 1
            if quiet > QUIET_POLLS:
                quiet = 0
                self.page.keyboard.press("Escape")
                self.page.locator(".lm-MenuBar-itemLabel", has_text=re.compile("^Run$")).click()
                self.page.locator(".lm-Menu-itemLabel", has_text="Run All Cells").first.click()
            self.page.wait_for_timeout(POLL_MS)
        self.settle()

    def settle(self):
        """Wait until the kernel is idle and every figure that is shown has been drawn."""
        self._wait_for_idle(CELLS_S)
        self.page.wait_for_function(
            """() => [...document.querySelectorAll('.bmoe-figure')]
                .filter(e => e.offsetParent !== null)
                .every(e => e.querySelector('[role=alert]').textContent
                    || e.dataset.drawn !== undefined && e.dataset.drawn === e.dataset.shown)""",
            timeout=1000 * DRAW_S,
        )

    def _wait_for_idle(self, seconds):
        self.page.wait_for_function(
            """() => document.querySelector('.jp-Notebook-ExecutionIndicator')
                ?.dataset.status === 'idle'""",
            timeout=1000 * seconds,
        )

    def trouble(self):
        """Return what a person would see of errors: in outputs, in widgets, in the console."""
        said = self.page.locator(
            '.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.stderr"], '
            '.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.error"], '
            ".bmoe-figure [role=alert]:not(:empty)"
        ).all_inner_texts()
        broken = self.page.get_by_text(re.compile("Error displaying widget|Loading widget")).count()
        return [*self.complaints, *said, *(["a widget is missing"] if broken else [])]

    def figures(self):
        """Return the locator of the figures in the page."""
        return self.page.locator(".bmoe-figure")

    def picture(self, name, locator=None):
        """Keep a screenshot of the page, or of one element, among the artefacts."""
        self.pictures.mkdir(exist_ok=True)
        target = self.page if locator is None else locator
        target.screenshot(path=self.pictures / f"{name}.png")

    def ask(self, expression):
        """Return the value of a Python expression in the notebook's kernel, by way of JSON."""
        if self._kernel is None:
            (session,) = [
                session
                for session in self.server.get("api/sessions")
                if session["notebook"]["path"] == self.name
            ]
            file = self.server.runtime / f"kernel-{session['kernel']['id']}.json"
            self._kernel = BlockingKernelClient(connection_file=str(file))
            self._kernel.load_connection_file()
            self._kernel.start_channels()
            self._kernel.wait_for_ready(timeout=CELLS_S)
        answer = self._kernel.execute(
            "",
            silent=True,
            user_expressions={"value": f"__import__('json').dumps({expression})"},
            reply=True,
            timeout=CELLS_S,
        )
        value = answer["content"]["user_expressions"]["value"]
        assert value["status"] == "ok", value
        return json.loads(eval(value["data"]["text/plain"]))

    def close(self):
        """Close the page and end its kernel."""
        if self._kernel is not None:
            self._kernel.stop_channels()
        self.page.close()
        for session in self.server.get("api/sessions"):
            if session["notebook"]["path"] == self.name:
                request = urllib.request.Request(
                    f"{self.server.url}api/sessions/{session['id']}?token=test", method="DELETE"
                )
                urllib.request.urlopen(request).close()


def notebook_of(*cells, name):
    """Return a notebook with these code cells."""
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    notebook.metadata["name"] = name
    return notebook


def pictures_folder():
    """Return where screenshots are kept."""
    return Path(__file__).parent / "screenshots"
