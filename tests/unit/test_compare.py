"""compare(): paired, honest about what did not happen, and nothing finished is lost.

The session here is a stand-in whose "model" is a seeded table of logits: what compare does with
a session can be checked to the last bit without one. The real one is compared in the integration
tests.
"""

from __future__ import annotations

import json
import tempfile
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xarray as xr

from bmoe_lab.comparison import statistics
from bmoe_lab.comparison.comparing import Comparison, compare
from bmoe_lab.comparison.tree import COLUMNS, is_comparison, node_name, runs
from bmoe_lab.errors import (
    BmoeLabError,
    ComparisonError,
    ComparisonInterrupted,
    PolicyError,
    SchemaError,
    SettingsError,
    UnknownNameError,
)
from bmoe_lab.routing import DropCold, RandomDrop, RandomSubstitute, RoutingPolicy
from bmoe_lab.routing.counters import Counters
from bmoe_lab.schema import Phase, validate
from bmoe_lab.testing.traces import make_trace

N_VOCAB = 50
CONTEXT = 4


class Shift(RoutingPolicy):
    """A policy of the stand-in: moves the logits by noise of a given size."""

    def __init__(self, size: float, *, drops: str | None = "drop", fails_at: int | None = None):
        self.size = size
        self.drops = drops
        self.fails_at = fails_at


class Broken(ValueError):
    """What a user's policy raises."""


def text_of(n_token: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, N_VOCAB, n_token).astype(np.int32)


def logits_of(window: int, index: int, policy: Any) -> np.ndarray:
    """Return the logits that predict token `index`; the same for equal arguments."""
    logits = np.random.default_rng((window, index)).normal(scale=3, size=N_VOCAB)
    size = {"RandomDrop": 1.5, "RandomSubstitute": 1.5}.get(type(policy).__name__)
    size = getattr(policy, "size", size)
    if size:
        logits += size * np.random.default_rng((window, index, 7)).normal(size=N_VOCAB)
    return logits.astype(np.float32)


class FakeSession:
    """Scores windows with made-up logits and traces."""

    n_vocab = N_VOCAB

    def __init__(self, *, interrupt_in: str | None = None, noisy: bool = False) -> None:
        self.interrupt_in = interrupt_in
        self.noisy = noisy
        self.policies: list[Any] = []

    def check(self, policy: Any) -> None:
        if isinstance(policy, type):
            raise PolicyError(f"policy must be an instance; got {policy}.")

    def windows(self, text: Any, *, n_context: int) -> list[np.ndarray]:
        texts = text if isinstance(text, list) else [text]
        return [w for w in texts if len(w) > n_context + 1]

    def score(self, text, *, policy, n_context, observe, record, seed) -> Any:
        self.policies.append(policy)
        drops = getattr(policy, "drops", "drop") if policy is not None else None
        parts = []
        batch = 0
        for number, window in enumerate(text):
            trace = make_trace(
                len(window),
                n_layer=2,
                n_expert=8,
                n_used=2,
                n_prefill=n_context,
                seed=number,
                policy=drops,
            )
            trace["turn"].values[:] = number
            trace["batch"].values[:] += batch
            batch = int(trace.batch[-1]) + 1
            trace["token_id"].values[:] = window
            parts.append(trace)
            for index in range(n_context + 1, len(window)):
                if getattr(policy, "fails_at", None) == index:
                    raise Broken("the user's own words")
                logits = logits_of(number, index, policy)
                if self.noisy and len(self.policies) == 2 and index == n_context + 3:
                    logits[0] += 1e-3
                observe(number, index, int(window[index]), logits)
                if type(policy).__name__ == self.interrupt_in and index == n_context + 2:
                    raise KeyboardInterrupt
        trace = xr.concat(parts, dim="token", data_vars="minimal", coords="minimal")
        trace.attrs["lossless"] = int(policy is None)
        trace.attrs["policy"] = repr(policy)
        decode = trace.action.values[trace.phase.values == Phase.decode]
        counters = Counters(
            routings=decode.shape[0] * 2,
            examined=decode.size,
            eligible=decode.size,  # as if nothing were pinned: the control pins one slot
            changed=int(np.isin(decode, (1, 2)).sum()),
            dropped=int((decode == 1).sum()),
            substituted=int((decode == 2).sum()),
        )
        return SimpleNamespace(trace=trace, summary=SimpleNamespace(counters=counters))


def run(policies=(), session=None, text=None, **kwargs) -> xr.DataTree:
    kwargs = {"progress": False, "n_context": CONTEXT} | kwargs
    return compare(
        FakeSession() if session is None else session,
        text_of(60) if text is None else text,
        policies=policies,
        **kwargs,
    )


def expected_rows(policy: Any, windows: list[np.ndarray]) -> list[tuple[float, float, bool]]:
    """Return nll, kl and agreement of every scored token, in plain numpy."""
    rows = []
    for number, window in enumerate(windows):
        for index in range(CONTEXT + 1, len(window)):
            base = logits_of(number, index, None).astype(np.float64)
            other = logits_of(number, index, policy).astype(np.float64)
            log_p = base - np.log(np.exp(base).sum())
            log_q = other - np.log(np.exp(other).sum())
            kl = (np.exp(log_p) * (log_p - log_q)).sum()
            rows.append((-log_q[window[index]], kl, base.argmax() == other.argmax()))
    return rows


# ---------------------------------------------------------------- what is measured


def test_compare_runs_lossless_first_then_floor_then_policies():
    tree = run([Shift(1.0), Shift(2.0)])
    assert list(tree.children) == [
        "lossless",
        "lossless again",
        "Shift(size=1.0)",
        "Shift(size=2.0)",
    ]
    assert tree["arm_kind"].values.tolist() == ["lossless", "noise floor", "policy", "policy"]
    assert tree["arm_name"].values.tolist() == list(tree.children)
    assert tree.attrs["complete"] == 1


def test_compare_per_token_values_equal_plain_numpy():
    windows = [text_of(40, seed=1), text_of(30, seed=2)]
    policy = Shift(0.5)
    tree = run([policy], text=windows)
    node = tree["Shift(size=0.5)"]
    scored = ~np.isnan(node["nll"].values)
    nll, kl, agree = zip(*expected_rows(policy, windows), strict=True)
    np.testing.assert_allclose(node["nll"].values[scored], nll, rtol=1e-12)
    np.testing.assert_allclose(node["kl"].values[scored], kl, rtol=1e-9)
    np.testing.assert_array_equal(node["top1_agree"].values[scored], np.array(agree, float))
    assert 0 < np.mean(agree) < 1


def test_compare_values_stand_on_the_token_that_they_belong_to():
    windows = [text_of(20, seed=1), text_of(25, seed=2)]
    node = run([Shift(0.5)], text=windows)["Shift(size=0.5)"]
    expected = np.concatenate([np.arange(len(w)) > CONTEXT for w in windows])
    np.testing.assert_array_equal(~np.isnan(node["nll"].values), expected)
    np.testing.assert_array_equal(~np.isnan(node["kl"].values), expected)
    # The first decoded token ran under the policy, though its own loss did not depend on it.
    agreement = ~np.isnan(node["routing_agreement"].values)
    np.testing.assert_array_equal(agreement, node["phase"].values == Phase.decode)


def test_compare_table_is_paired_and_bootstrapped_over_windows():
    windows = [text_of(40, seed=1), text_of(50, seed=2)]
    policy = Shift(0.5)
    tree = run([policy], text=windows, seed=11)
    difference = [
        a[0] - b[0]
        for a, b in zip(expected_rows(policy, windows), expected_rows(None, windows), strict=True)
    ]
    segment = np.repeat([0, 1], [40 - CONTEXT - 1, 50 - CONTEXT - 1])
    expected = statistics.mean_interval(difference, segment=segment, seed=11)
    row = tree.to_dataset().isel(arm=2)
    assert float(row.delta_nll) == pytest.approx(expected.mean, rel=1e-9)
    assert float(row.delta_nll_low) == pytest.approx(expected.low, rel=1e-9)
    assert float(row.delta_nll_high) == pytest.approx(expected.high, rel=1e-9)
    base = float(tree["perplexity"][0])
    assert float(row.perplexity) == pytest.approx(base * np.exp(expected.mean), rel=1e-9)
    assert float(row.perplexity_low) == pytest.approx(base * np.exp(expected.low), rel=1e-9)
    assert float(row.n_scored) == len(difference)


def test_compare_noise_floor_of_equal_runs_is_exactly_zero():
    tree = run()
    row = tree.to_dataset().isel(arm=1)
    for name in ("delta_nll", "delta_nll_low", "delta_nll_high", "kl_mean", "kl_max"):
        assert float(row[name]) == 0.0
    assert float(row.top1_agreement) == 1.0
    assert float(row.routing_agreement) == 1.0


def test_compare_noise_floor_above_zero_is_said():
    with pytest.warns(UserWarning, match="two lossless runs differ"):
        tree = run(session=FakeSession(noisy=True))
    assert "two lossless runs differ" in json.loads(tree.attrs["warnings"])[0]


def test_compare_lossless_distance_to_itself_is_not_claimed():
    tree = run()
    row = tree.to_dataset().isel(arm=0)
    assert np.isnan(row.delta_nll)
    assert np.isnan(row.kl_mean)
    assert "kl" not in tree["lossless"]


def test_compare_streaming_numbers_come_from_the_decode():
    tree = run([Shift(1.0)])
    table = tree.to_dataset()
    trace = tree["Shift(size=1.0)"].to_dataset()
    decode = trace.isel(token=trace.phase.values == Phase.decode)
    expected = decode.read_bytes.values.astype(float).sum() / decode.sizes["token"]
    assert float(table.read_bytes_per_token[2]) == pytest.approx(expected)
    assert float(table.wall_s[2]) == pytest.approx(float(np.nansum(decode.wall_s)))
    assert float(table.drop_rate[2]) > 0
    assert float(table.weight_discarded_frac[2]) > 0
    assert float(table.drop_rate[0]) == 0


def test_compare_unknown_weights_stay_unknown():
    class NoWeights(FakeSession):
        def score(self, text, **kwargs):
            result = super().score(text, **kwargs)
            result.trace = result.trace.drop_vars(["weight_chosen", "weight_applied"])
            return result

    table = run([Shift(1.0)], session=NoWeights()).to_dataset()
    assert np.isnan(table.weight_discarded_frac.values).all()


def test_compare_nodes_are_valid_traces_with_described_variables():
    tree = run([Shift(1.0)])
    for name, trace in runs(tree):
        validate(trace)
        assert trace.nll.attrs["units"] == "nat", name
    assert set(COLUMNS) == set(tree.data_vars)
    assert all("long_name" in tree[name].attrs for name in COLUMNS)


def test_compare_does_not_touch_the_run_of_the_session():
    kept = []

    class Keeps(FakeSession):
        def score(self, text, **kwargs):
            kept.append(super().score(text, **kwargs))
            return kept[-1]

    run([Shift(1.0)], session=Keeps())
    assert all("nll" not in result.trace for result in kept)


def test_compare_same_seed_same_tree():
    first, second = run([Shift(1.0)], seed=5), run([Shift(1.0)], seed=5)
    xr.testing.assert_identical(first, second)


# ---------------------------------------------------------------- controls


@pytest.mark.parametrize(
    ("what", "control"), [("drop", RandomDrop), ("substitute", RandomSubstitute)]
)
def test_compare_control_runs_at_the_measured_rate(what, control):
    session = FakeSession()
    tree = run([Shift(1.0, drops=what)], session=session, controls=True)
    assert tree["arm_kind"].values.tolist()[2:] == ["policy", "control"]
    assert tree["control_of"].values.tolist() == [-1, -1, -1, 2]
    used = session.policies[-1]
    assert isinstance(used, control)
    action = tree[tree["arm_name"].values[2]]["action"].values
    decode = action[tree["lossless"]["phase"].values == Phase.decode]
    changed = np.isin(decode, (1, 2)).sum()
    assert used.rate == pytest.approx(changed / (decode.size - decode.shape[0] * 2), rel=1e-3)


def test_compare_control_difference_is_paired():
    tree = run([Shift(0.2)], controls=True)
    policy, control = tree[tree["arm_name"].values[2]], tree[tree["arm_name"].values[3]]
    expected = np.nanmean(policy["nll"].values - control["nll"].values)
    assert float(tree["delta_nll_control"][2]) == pytest.approx(expected)
    assert np.isnan(tree["delta_nll_control"].values[[0, 1, 3]]).all()


def test_compare_policy_that_never_fired_says_so_and_gets_no_control():
    with pytest.warns(UserWarning, match="never fired: it looked at 224 slots and changed none"):
        tree = run([Shift(0.0, drops=None)], controls=True)
    assert tree["fired"].values.tolist() == [-1, -1, 0]
    assert "never fired" in json.loads(tree.attrs["warnings"])[0]
    assert float(tree["kl_max"][2]) == 0.0


# ---------------------------------------------------------------- what goes wrong


def test_compare_interrupt_keeps_the_finished_runs():
    session = FakeSession(interrupt_in="DropCold")
    with pytest.raises(ComparisonInterrupted, match=r"3 finished runs are in \.tree") as caught:
        run([Shift(1.0), DropCold(0.5), Shift(2.0)], session=session)
    tree = caught.value.tree
    assert list(tree.children) == ["lossless", "lossless again", "Shift(size=1.0)"]
    assert tree.attrs["complete"] == 0
    assert tree.attrs["failed_arm"] == "DropCold(frac=0.5)"
    assert float(tree["delta_nll"][2]) != 0


def test_compare_interrupt_stops_code_that_waits_for_one():
    """A notebook's "run all" and a script's ``except KeyboardInterrupt`` both see it."""
    with pytest.raises(KeyboardInterrupt):
        run([DropCold(0.5)], session=FakeSession(interrupt_in="DropCold"))
    assert not issubclass(ComparisonInterrupted, Exception)


def test_compare_interrupt_before_anything_finished_is_a_plain_one():
    with pytest.raises(KeyboardInterrupt) as caught:
        run(session=FakeSession(interrupt_in="NoneType"))
    assert caught.type is KeyboardInterrupt


def test_compare_failing_policy_keeps_the_finished_runs_and_the_users_exception():
    with pytest.raises(ComparisonError, match=r"failed \(Broken: the user's own words\)") as caught:
        run([Shift(1.0), Shift(2.0, fails_at=9)])
    assert isinstance(caught.value.__cause__, Broken)
    assert isinstance(caught.value, BmoeLabError)
    assert caught.value.tree.attrs["failed_arm"] == "Shift(size=2.0, fails_at=9)"
    assert caught.value.tree.sizes["arm"] == 3


def test_compare_leaves_no_temporary_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run([Shift(1.0)])
    with pytest.raises(ComparisonError):
        run([Shift(2.0, fails_at=9)])
    assert list(tmp_path.iterdir()) == []


def test_compare_short_text_warns_and_gives_no_bounds():
    with pytest.warns(UserWarning, match="only 15 tokens are scored, too few for intervals"):
        tree = run([Shift(1.0)], text=text_of(20))
    assert np.isnan(tree["delta_nll_low"].values).all()
    assert float(tree["delta_nll"][2]) != 0


def test_compare_unknown_record_level_lists_the_known_ones():
    with pytest.raises(UnknownNameError, match="record must be one of"):
        run(record="off")


def test_compare_folder_that_does_not_exist_is_refused_before_any_run(tmp_path):
    session = FakeSession()
    with pytest.raises(SettingsError, match="save must lie in a folder"):
        run(session=session, save=tmp_path / "missing" / "tree.nc")
    assert session.policies == []


def test_compare_save_is_written_once_per_run(monkeypatch, tmp_path):
    """A killed process loses one run at most, and no run is written twice for nothing."""
    import bmoe_lab.recording

    written = []

    def remember(tree, path):
        written.append((list(tree.children), tree.attrs["complete"], path))

    monkeypatch.setattr(bmoe_lab.recording, "save_trace", remember)
    run([Shift(1.0)], controls=True, save=tmp_path / "tree.nc")
    assert [len(names) for names, _, _ in written] == [1, 2, 3, 4]
    assert [complete for _, complete, _ in written] == [0, 0, 0, 1]
    assert {path for _, _, path in written} == {tmp_path / "tree.nc"}


def test_compare_full_disk_on_save_keeps_the_tree(monkeypatch, tmp_path):
    import bmoe_lab.recording

    def full(tree, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bmoe_lab.recording, "save_trace", full)
    with pytest.raises(ComparisonError, match="No space left") as caught:
        run([Shift(1.0)], save=tmp_path / "tree.nc")
    assert list(caught.value.tree.children) == ["lossless"]


def test_compare_run_that_scores_other_tokens_is_refused():
    class Stops(FakeSession):
        def score(self, text, **kwargs):
            cut = [w[:-3] for w in text] if self.policies else text
            return super().score(cut, **kwargs)

    with pytest.raises(ComparisonError, match="must score the same 55 tokens; got 52"):
        run(session=Stops())


def test_comparison_first_run_must_be_lossless():
    with (
        Comparison(FakeSession(), text_of(60), n_context=CONTEXT) as comparison,
        pytest.raises(SettingsError, match="the first run must be lossless"),
    ):
        comparison.run(Shift(1.0), name="x", kind="policy")


def test_comparison_without_a_run_has_no_tree():
    with (
        Comparison(FakeSession(), text_of(60), n_context=CONTEXT) as comparison,
        pytest.raises(SettingsError, match="must hold the lossless run"),
    ):
        comparison.tree()


# ---------------------------------------------------------------- progress, names


def test_compare_progress_counts_every_token_of_every_run():
    seen = []
    run([Shift(1.0)], progress=seen.append)
    assert [p.arm for p in seen if p.done == 0] == [
        "lossless",
        "lossless again",
        "Shift(size=1.0)",
    ]
    assert {p.n_arm for p in seen} == {3}
    assert {p.total for p in seen} == {55}
    assert max(p.done for p in seen if p.index == 2) == 55


def test_compare_progress_bar_is_quiet_in_the_end(capsys):
    run([Shift(1.0)], progress=True)
    assert capsys.readouterr().out == ""


def test_compare_equal_policies_get_their_own_nodes():
    tree = run([Shift(1.0), Shift(1.0)])
    assert list(tree.children)[2:] == ["Shift(size=1.0)", "Shift(size=1.0) (2)"]


def test_node_name_has_no_slash():
    assert node_name("Path('a/b')", set()) == "Path('a_b')"
    assert node_name("..", set()) == "run"


def test_runs_of_something_else_is_refused():
    with pytest.raises(SchemaError, match="tree must be a comparison"):
        runs(xr.DataTree())
    assert not is_comparison(xr.Dataset())


def test_compare_policy_that_cannot_run_is_refused_before_anything_runs():
    """It used to be noticed only after both lossless runs."""
    session = FakeSession()
    with pytest.raises(PolicyError, match="must be an instance"):
        run([dict], session)
    assert session.policies == []
