"""Draw the README's picture: the routing of a streamed run as a heat map.

    python tools/readme_picture.py docs/images/routing.png

Needs a headless Chromium on the PATH (plotly draws in a browser).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import bmoe_lab as bl

WIDTH, HEIGHT = 1000, 420


def draw(target: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        sys.exit("chromium must be on the PATH; install it with the system's package manager")
    text = "\n".join(bl.datasets.heldout(domain)[0].text[:300] for domain in bl.datasets.DOMAINS)
    with bl.Session(bl.datasets.demo_model(), cache="2 MiB", n_threads=1) as session:
        run = session.score(text)
    figure = run.trace.moe.plot.heatmap()
    figure.update_layout(width=WIDTH, height=HEIGHT)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "figure.html"
        figure.write_html(page, include_plotlyjs=True, config={"displayModeBar": False})
        subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--hide-scrollbars",
                f"--user-data-dir={folder}/profile",
                f"--window-size={WIDTH + 20},{HEIGHT + 20}",
                "--virtual-time-budget=5000",
                f"--screenshot={target.absolute()}",
                page.as_uri(),
            ],
            check=True,
            capture_output=True,
        )


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
