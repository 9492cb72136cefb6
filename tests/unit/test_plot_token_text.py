"""The text in colours: where tokens stand, what their colours say, what is readable."""

from __future__ import annotations

import numpy as np
import pytest

from bmoe_lab import metrics, plots
from bmoe_lab.errors import SchemaError, SettingsError, UnknownNameError
from bmoe_lab.plots import token_text
from bmoe_lab.plots.token_values import VALUES, token_values, values_of
from bmoe_lab.testing.traces import make_trace
from tests.unit.comparison_data import make_tree
from tests.unit.test_plots import contrast


def written(pieces, **shape):
    trace = make_trace(len(pieces), n_layer=2, n_prefill=0, **shape)
    trace.coords["piece"] = ("token", np.array(pieces))
    return trace


def bars(trace, **options):
    return plots.plot_token_text(trace, **options).data[0]


def scored_run():
    return make_tree()["DropCold(frac=0.75)"].to_dataset()


def test_token_text_sets_tokens_one_after_the_other_and_wraps():
    drawn = bars(written(["hello", " world", ",", " again", "!"]), width=13)
    assert list(drawn.base) == [0, 5, 11, 0, 6]
    assert drawn.x.tolist() == [5, 6, 1, 6, 1]
    assert drawn.y.tolist() == [0, 0, 0, 1, 1]
    assert drawn.text == ("hello", " world", ",", " again", "!")


def test_token_text_newline_ends_the_row_and_is_shown():
    drawn = bars(written(["a", "\\x0a", "b", ".\\x0a\\x0a", "\\xc3", "c"]))
    assert drawn.y.tolist() == [0, 0, 1, 1, 2, 2]
    assert drawn.text[1] == "\\x0a"
    assert drawn.x.tolist() == [1, 4, 1, 9, 4, 1]


def test_token_text_makes_room_for_wide_and_empty_pieces():
    drawn = bars(written(["日本", "e\u0301", "", "x" * 30]), width=20)
    assert drawn.x.tolist() == [4, 1, 1, 20]
    assert drawn.text[3] == "x" * 19 + "…"
    assert bars(written(["日" * 30]), width=20).text[0] == "日" * 9 + "…"


def test_token_text_tells_the_token_of_a_bar():
    figure = plots.plot_token_text(make_trace(n_token=40), tokens=(12, 30))
    assert figure.data[0].customdata.tolist() == list(range(12, 30))
    assert len(figure.data[0].x) == 18
    assert "tokens 12 to 29 of 40" in figure.layout.title.subtitle.text
    assert figure.layout.yaxis.ticktext[0] == "12"


def test_token_text_shows_the_first_of_many_and_says_which():
    trace = make_trace(n_token=100)
    figure = plots.plot_token_text(trace, max_tokens=10)
    assert len(figure.data[0].x) == 10
    assert "tokens 0 to 9 of 100" in figure.layout.title.subtitle.text
    lines = written(["\\x0a"] * 100)
    figure = plots.plot_token_text(lines)
    assert "tokens 0 to 59 of 100" in figure.layout.title.subtitle.text
    assert figure.data[0].y.max() == 59


@pytest.mark.parametrize("value", ["misses", "read", "changed"])
def test_token_values_are_sums_over_layers(value):
    trace = make_trace(n_token=20, policy="drop")
    cell = {
        "misses": trace.residency.values == 0,
        "read": trace.read_bytes.values.astype(float),
        "changed": np.isin(trace.action.values, [1, 2]),
    }[value]
    np.testing.assert_allclose(values_of(trace, value, (0, 20)), cell.sum(axis=(1, 2)))


def test_token_values_entropy_is_the_mean_over_layers():
    trace = make_trace(n_token=20)
    expected = metrics.router_entropy(trace, by="token", phase="all")
    np.testing.assert_allclose(values_of(trace, "entropy", (0, 20)), expected)
    assert "over the chosen experts" in (
        plots.plot_token_text(trace, value="entropy").layout.title.subtitle.text
    )


def test_token_values_surprise_is_the_recorded_probability_or_the_score():
    trace = make_trace(n_token=20)
    np.testing.assert_array_equal(values_of(trace, "nll", (3, 9)), -trace.logprob.values[3:9])
    run = scored_run()
    np.testing.assert_array_equal(values_of(run, "nll", (5, 20)), run.nll.values[5:20])


def test_token_values_offer_what_the_trace_can_show():
    assert list(token_values(make_trace(n_token=8))) == ["misses", "read", "entropy", "nll"]
    run = scored_run()
    assert [n for n in token_values(run) if n not in ("misses", "read", "entropy", "changed")] == [
        "nll",
        "kl",
        "top1_agree",
        "routing_agreement",
    ]
    run["delta_nll"] = run["nll"] * 0
    assert "delta_nll" in token_values(run)
    for value in token_values(run):
        plots.plot_token_text(run, value=value).to_json()


def test_token_text_of_tokens_without_a_value_is_outlined_in_the_color_of_text():
    run = scored_run()
    figure = plots.plot_token_text(run, value="kl")
    unknown = np.isnan(run["kl"].values)
    colors = np.array(figure.data[0].marker.color)
    assert set(colors[unknown]) == {"rgba(0,0,0,0)"}
    assert "rgba(0,0,0,0)" not in colors[~unknown]
    assert set(np.array(figure.data[0].textfont.color)[unknown]) == {"#808690"}
    assert "outlined: unknown" in figure.layout.title.subtitle.text
    assert "unknown" in figure.data[0].hovertext[0]


def test_token_text_with_no_value_at_all_has_no_color_bar():
    assert len(plots.plot_token_text(make_trace(n_token=20), value="nll", tokens=(0, 4)).data) == 1
    assert len(plots.plot_token_text(make_trace(n_token=20), value="nll").data) == 2


def test_token_text_differences_have_colors_around_zero():
    run = scored_run()
    run["delta_nll"] = ("token", np.r_[np.zeros(60), -1.0, 2.0, np.zeros(18)])
    figure = plots.plot_token_text(run, value="delta_nll")
    colors = figure.data[0].marker.color
    assert colors[0] == "rgb(242,242,242)"
    assert figure.data[1].marker.cmin == -figure.data[1].marker.cmax
    assert figure.data[0].hovertext[61].endswith("+2 nat")


def test_token_text_agreement_has_two_colors_with_names():
    run = scored_run()
    figure = plots.plot_token_text(run, value="top1_agree")
    known = ~np.isnan(run["top1_agree"].values)
    agree = run["top1_agree"].values[known] == 1
    colors = np.array(figure.data[0].marker.color)[known]
    assert set(colors[agree]) == {"rgb(86,180,233)"}
    assert not set(colors[~agree]) & {"rgb(86,180,233)"}
    assert figure.data[1].marker.colorbar.ticktext == ("another token", "the same token")


def test_token_text_one_extreme_token_does_not_darken_the_others():
    run = scored_run()
    run["kl"].values[40] = 1000.0
    figure = plots.plot_token_text(run, value="kl")
    assert figure.data[1].marker.cmax < 2
    assert "colours end at 98 % of the tokens" in figure.layout.title.subtitle.text


@pytest.mark.parametrize("scale", ["sequential", "signed", "agreement"])
def test_token_text_is_readable_on_every_background(scale):
    background, ink = token_text._palette(scale)
    for back, text in zip(background[:-1], ink[:-1], strict=True):
        r, g, b = (int(part) for part in back[4:-1].split(","))
        assert contrast(text, f"#{r:02x}{g:02x}{b:02x}") > 4.5
    assert len(background) == 256
    assert ink[-1] == "#808690"


def test_token_text_fits_a_page_of_700_pixels():
    for width in (80, 100, 140):
        assert 0.602 * token_text._font_size(width) * width <= 700 - 56 - 10


def test_token_text_marks_a_lossy_run_and_escapes_its_text():
    trace = written(["<b>x</b>", "&amp;"])
    trace.attrs.update(lossless=0, policy="DropCold(0.75)")
    figure = plots.plot_token_text(trace)
    assert figure.data[0].text == ("&lt;b&gt;x&lt;/b&gt;", "&amp;amp;")
    assert "&lt;b&gt;" in figure.data[0].hovertext[0]
    assert "lossy: DropCold(0.75)" in figure.layout.title.subtitle.text


def test_token_text_impossible_requests_are_refused():
    trace = make_trace(n_token=8)
    with pytest.raises(SchemaError, match=r"coordinate 'piece' to show its text.*record_text=True"):
        plots.plot_token_text(trace.drop_vars("piece"))
    with pytest.raises(SchemaError, match=r"'kl' to show 'kl'; got none.*\['entropy', 'misses'"):
        plots.plot_token_text(trace, value="kl")
    with pytest.raises(SchemaError, match="'residency' to show 'misses'; got none"):
        plots.plot_token_text(trace.drop_vars("residency"))
    with pytest.raises(UnknownNameError, match="value must be one of"):
        plots.plot_token_text(trace, value="loss")
    with pytest.raises(SettingsError, match="width must be at least 10"):
        plots.plot_token_text(trace, width=4)
    with pytest.raises(SettingsError, match="max_tokens must be at least 1"):
        plots.plot_token_text(trace, max_tokens=0)
    assert set(VALUES) > set(token_values(trace))


def test_token_text_entropy_has_colors_over_what_most_tokens_hold():
    figure = plots.plot_token_text(make_trace(n_token=200), value="entropy")
    values = values_of(make_trace(n_token=200), "entropy", (0, 200))
    key = figure.data[1].marker
    # Beyond both ends they have the colour of the end, not that of the unknown.
    assert "rgba(0,0,0,0)" not in figure.data[0].marker.color
    lowest, highest = int(values.argmin()), int(values.argmax())
    assert figure.data[0].marker.color[lowest] == "rgb(68,1,84)"
    assert figure.data[0].marker.color[highest] == "rgb(253,231,37)"
    assert (key.cmin, key.cmax) == pytest.approx(np.quantile(values, (0.02, 0.98)))
    assert "colours: 96 % of tokens" in figure.layout.title.subtitle.text
    same = plots.plot_token_text(make_trace(n_token=200), value="entropy", tokens=(7, 8))
    assert same.data[1].marker.cmin < values[7] < same.data[1].marker.cmax
