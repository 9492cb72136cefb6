from __future__ import annotations

import numpy as np

from bmoe_lab.recording import describe_html
from bmoe_lab.recording import html as html_module
from bmoe_lab.schema import Residency
from bmoe_lab.testing.traces import make_trace


def test_describe_html_says_what_the_trace_is():
    text = describe_html(make_trace(40, n_layer=2), title="Run", calls=["run.trace.moe.hit_rate()"])
    for words in ("Run", "synthetic", "40 in 31 evaluations", "2, 16 experts each, 4 used"):
        assert words in text
    assert "<code>run.trace.moe.hit_rate()</code>" in text
    assert "lossless: Lossless()" in text


def test_describe_html_escapes_everything_from_the_file():
    trace = make_trace(8, n_layer=2)
    evil = "<script>alert('x')</script>&"
    trace.attrs |= dict.fromkeys(("model_name", "arch", "policy", "source", "record"), evil)
    trace.attrs |= {"n_expert": evil, "complete": 0, "journal_note": evil}
    text = describe_html(trace, title=evil, calls=[evil])
    assert "<script" not in text
    assert text.count("&lt;script&gt;") == 9


def test_describe_html_lossy_and_incomplete_are_said():
    trace = make_trace(40, policy="drop", budget_frac=0.3)
    trace.attrs["complete"] = 0
    text = describe_html(trace)
    assert "LOSSY: DropCold(0.75)" in text
    assert "Lossy: the policy changed what ran" in text
    assert "Incomplete: it was interrupted" in text


def test_describe_html_hit_rate_counts_single_token_lookups_that_ran():
    trace = make_trace(12, n_layer=1, n_used=2, n_prefill=8, mask_last_layer=False)
    residency = np.full(trace.residency.shape, Residency.miss, dtype=np.uint8)
    residency[:8] = Residency.hit  # a wide prefill tells nothing about lookups
    residency[8, 0, 0] = Residency.hit
    residency[9, 0, 0] = Residency.hit_speculative
    trace = trace.assign(residency=(trace.residency.dims, residency))
    trace.action.values[11, 0, 1] = 1  # dropped: not looked up
    assert "28.6% of 7 lookups" in describe_html(trace)


def test_describe_html_unknown_hit_rate_is_not_a_number(monkeypatch):
    trace = make_trace(12, n_prefill=12)
    assert "unknown: no single-token evaluations" in describe_html(trace)
    assert "residency was not recorded" in describe_html(trace.drop_vars("residency"))
    resident = trace.assign(residency=trace.residency.where(trace.residency == 255, 3))
    assert "unknown: no single-token" in describe_html(resident)
    monkeypatch.setattr(html_module, "_CELLS", 10)
    assert "not computed" in describe_html(trace)


def test_describe_html_without_streaming_says_so():
    trace = make_trace(12, n_prefill=0)
    trace.residency.values[:] = Residency.not_streamed
    assert "not streamed" in describe_html(trace)
