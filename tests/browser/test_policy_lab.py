"""PolicyLab in the page: a slider moves, and the numbers shown are those that replay returns."""

import os
import statistics

import pytest

from tests.browser.jupyter_lab import notebook_of

pytestmark = pytest.mark.browser

CELL = """
import bmoe_lab as bl
trace = {trace}
lab = bl.widgets.PolicyLab(trace)
lab.routing = "drop_cold"
lab
"""
MADE = "bl.testing.make_trace(n_token=156, n_layer=48, n_expert=128, n_used=8, seed=1)"
N_MOVES = 20
LIMIT_MS = 300

TIMER = """() => {
    const figure = document.querySelector('.bmoe-figure');
    window.waited = [];
    let pressed = 0;
    document.addEventListener('keydown', () => { pressed = performance.now(); }, true);
    new MutationObserver(() => { window.waited.push(performance.now() - pressed); })
        .observe(figure, {attributes: true, attributeFilter: ['data-drawn']});
}"""


def _slider(page, description):
    slider = page.page.locator(".widget-slider", has_text=description).first
    return slider.locator(".noUi-handle").first


def _press(page, key):
    n = page.page.evaluate("window.waited.length")
    page.page.keyboard.press(key)
    page.page.wait_for_function(f"window.waited.length > {n}", timeout=20_000)


def test_a_slider_move_shows_what_replay_returns(open_notebook):
    page = open_notebook(notebook_of(CELL.format(trace=MADE), name="policy_lab"))
    page.run_all()
    page.page.evaluate(TIMER)
    _slider(page, "frac").focus()
    before = page.ask("lab.parameters['frac']")
    _press(page, "ArrowRight")
    page.settle()
    after = page.ask("lab.parameters['frac']")
    assert after > before
    replayed = (
        "bl.replay(trace, residency='lru', budget=lab.budget, "
        f"routing=bl.routing.DropCold({after}))"
    )
    rate = page.ask(f"float({replayed}.moe.hit_rate())")
    assert f"{100 * rate:.2f} %" in page.page.locator(".jp-OutputArea").last.inner_text()
    assert "counterfactual" in page.page.locator(".jp-OutputArea").last.inner_text()
    page.picture("policy_lab", page.page.locator(".jp-OutputArea").last)
    assert page.trouble() == []


def test_a_slider_move_is_on_screen_in_time(open_notebook):
    """The recorded trace where it is at hand, else a made one of its size."""
    folder = os.environ.get("BMOE_LAB_REFERENCE_DATA")
    file = f"{folder}/bigmoeonedge/2026-07-15-route-trace/qwen.route.csv"
    trace = f"bl.from_bigmoeonedge({file!r})" if folder else MADE
    page = open_notebook(notebook_of(CELL.format(trace=trace), name="latency"))
    page.run_all()
    assert page.ask("[trace.sizes['token'], trace.sizes['layer']]") == [156, 48]
    page.page.evaluate(TIMER)
    _slider(page, "frac").focus()
    _press(page, "ArrowRight")  # the first one compiles
    page.settle()
    page.page.evaluate("window.waited = []")
    for move in range(N_MOVES):
        _press(page, "ArrowRight" if move % 4 < 2 else "ArrowLeft")
    waited = page.page.evaluate("window.waited")
    (page.pictures / "latency.txt").write_text(
        f"median {statistics.median(waited):.0f} ms, {sorted(round(one) for one in waited)}\n"
    )
    assert statistics.median(waited) <= LIMIT_MS
