"""One expert along the text: every use once, by what became of it."""

from __future__ import annotations

import numpy as np
import pytest

from bmoe_lab import plots
from bmoe_lab.errors import SchemaError, SettingsError
from bmoe_lab.schema import Action, Residency
from bmoe_lab.testing.traces import make_trace


def groups(figure):
    return {marks.name: np.asarray(marks.x).tolist() for marks in figure.data}


def subtitle(figure) -> str:
    return figure.layout.title.subtitle.text


def test_expert_use_draws_each_use_by_its_residency():
    trace = make_trace(n_token=60)
    expert = int(trace.expert_chosen.values[30, 1, 0])
    figure = plots.plot_expert_use(trace, layer=1, expert=expert)
    token, slot = np.nonzero(trace.expert_chosen.values[:, 1] == expert)
    missed = trace.residency.values[token, 1, slot] == Residency.miss
    drawn = groups(figure)
    assert drawn.get("resident", []) == token[~missed].tolist()
    assert drawn.get("missed", []) == token[missed].tolist()
    weight = trace.weight_chosen.values[token, 1, slot]
    heights = {x: y for marks in figure.data for x, y in zip(marks.x, marks.y, strict=True)}
    np.testing.assert_allclose([heights[t] for t in token], weight)
    share = f"chosen for {token.size} of 60 tokens ({100 * token.size / 60:.3g} %)"
    assert share in subtitle(figure)
    assert f"{(slot == 0).sum()} as first choice" in subtitle(figure)
    assert f"{missed.sum()} not resident" in subtitle(figure)
    assert figure.layout.yaxis.title.text == "router's weight"


def test_expert_use_tells_what_a_policy_did():
    trace = make_trace(n_token=6, n_layer=1, n_used=2, n_prefill=0)
    trace["expert_chosen"].values[:, 0] = [[1, 2], [1, 2], [3, 4], [1, 5], [6, 7], [8, 9]]
    trace["expert_applied"].values[:, 0] = [[1, 2], [1, 2], [3, 1], [9, 5], [6, 7], [8, 1]]
    trace["residency"].values[:] = Residency.hit
    action = trace["action"].values
    action[0, 0] = [Action.kept, Action.kept]
    action[1, 0] = [Action.dropped, Action.kept]
    action[2, 0] = [Action.kept, Action.substituted]
    action[3, 0] = [Action.substituted, Action.kept]
    # A dropped slot runs a stand-in: expert 1 does not serve token 5.
    action[5, 0] = [Action.kept, Action.dropped]
    figure = plots.plot_expert_use(trace, layer=0, expert=1)
    assert groups(figure) == {
        "resident": [0],
        "missed and dropped": [1],
        "run as a substitute": [2],
        "replaced by another": [3],
    }
    assert "1 as a substitute" in subtitle(figure)
    # The residency of a substituted slot is that of the expert that ran instead.
    trace["residency"].values[3, 0, 0] = Residency.miss
    trace["residency"].values[1, 0, 0] = Residency.miss
    assert "1 not resident" in subtitle(plots.plot_expert_use(trace, layer=0, expert=1))


def test_expert_use_window_and_phase_keep_the_numbers_of_the_whole():
    trace = make_trace(n_token=60, n_expert=4)
    whole = plots.plot_expert_use(trace, layer=0, expert=1)
    part = plots.plot_expert_use(trace, layer=0, expert=1, tokens=(20, 40))
    for name, tokens in groups(part).items():
        assert tokens == [t for t in groups(whole)[name] if 20 <= t < 40]
    assert tuple(part.layout.xaxis.range) == (19.5, 39.5)
    assert "of 20 tokens" in subtitle(part)
    decode = plots.plot_expert_use(trace, layer=0, expert=1, phase="decode")
    assert min(t for tokens in groups(decode).values() for t in tokens) >= 15
    assert decode.layout.title.text.endswith("in layer 0, decode")


def test_expert_use_without_weights_shows_slots_without_residency_uses():
    trace = make_trace(n_token=20, n_expert=4).drop_vars(["weight_chosen", "weight_applied"])
    figure = plots.plot_expert_use(trace.drop_vars(["residency"]), layer=0, expert=1)
    assert list(groups(figure)) == ["used"]
    assert figure.layout.yaxis.title.text == "slot (0: the router's first choice)"
    assert "resident" not in subtitle(figure)


def test_expert_use_of_very_many_is_shares_that_add_up():
    trace = make_trace(n_token=3000, n_layer=1, n_expert=4, n_used=4)
    figure = plots.plot_expert_use(trace, layer=0, expert=1)
    assert {marks.type for marks in figure.data} == {"bar"}
    assert figure.layout.yaxis.title.text == "tokens that use it (%)"
    total = np.sum([marks.y for marks in figure.data], axis=0)
    routed = (trace.expert_chosen.values[:, 0] >= 0).any(-1)
    step = 12
    expected = [100.0 if routed[i : i + step].any() else np.nan for i in range(0, 3000, step)]
    np.testing.assert_allclose(total, expected)
    assert "shares of 12 tokens per bar" in subtitle(figure)
    assert figure.data[0].x[1] == 17.5


def test_expert_use_of_an_expert_that_is_never_used_says_so():
    trace = make_trace(n_token=12, n_expert=400)
    unused = set(range(400)) - set(trace.expert_chosen.values[:, 0].ravel().tolist())
    figure = plots.plot_expert_use(trace, layer=0, expert=min(unused))
    assert not figure.data
    assert "not used here" in [note.text for note in figure.layout.annotations]
    assert "chosen for 0 of 12 tokens" in subtitle(figure)


def test_expert_use_escapes_text_and_marks_lossy_runs():
    trace = make_trace(n_token=20, n_expert=4, policy="drop")
    trace.coords["piece"] = ("token", np.array(["<i>x</i>"] * 20))
    figure = plots.plot_expert_use(trace, layer=0, expert=1)
    assert "<i>" not in figure.to_json().replace("\\u003c", "<")
    assert "lossy: DropCold(0.75)" in subtitle(figure)


def test_expert_use_impossible_requests_are_refused():
    trace = make_trace(n_token=20)
    with pytest.raises(SettingsError, match="expert must be a whole number from 0 to 15; got 16"):
        plots.plot_expert_use(trace, layer=0, expert=16)
    with pytest.raises(SettingsError, match="layer must be a whole number from 0 to 3"):
        plots.plot_expert_use(trace, layer=4, expert=0)
    with pytest.raises(SchemaError, match="must have routed a token of phase 'draft' from token 0"):
        plots.plot_expert_use(trace, layer=0, expert=0, phase="draft")
