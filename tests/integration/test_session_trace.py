"""What a session records: every routing once, at its place, with the values of the graph."""

import json

import numpy as np
import pytest

import bmoe_lab as bl
from bmoe_lab.runtime.loops import TextStream
from bmoe_lab.schema import Action, Phase, Residency, validate
from bmoe_lab.seam.context import Context, Model
from bmoe_lab.streaming.layout import read_layout
from tests.integration.session_tools import TEXT, open_demo

pytestmark = pytest.mark.filterwarnings("ignore::bmoe_lab.errors.CacheBelowCycleWarning")

N_UBATCH = 16


@pytest.fixture(scope="module")
def session():
    with open_demo() as session:
        yield session


@pytest.fixture(scope="module")
def long_run(session):
    """Prefill in four evaluations (the last one narrower), then decode; scores recorded."""
    tokens = session.tokenize(TEXT * 4)[:55]
    return session.generate(tokens, n_predict=10, record="scores")


def plain_logits(path, tokens, pieces, wanted_rows):
    """Return logits of plain llama.cpp after each evaluation in `wanted_rows`."""
    model = Model(path, arch=read_layout(path).arch)
    try:
        context = Context(model, n_ctx=256, n_ubatch=N_UBATCH, n_threads=1)
        try:
            rows = []
            for start, stop in pieces:
                wanted = np.zeros(stop - start, np.bool_)
                wanted[-1] = stop in wanted_rows
                assert context.decode(tokens[start:stop], start, wanted) == 0
                if wanted[-1]:
                    rows.append(context.logits(-1).copy())
            return np.array(rows)
        finally:
            context.close()
    finally:
        model.close()


def log_softmax_at(logits, tokens):
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    norm = np.log(np.exp(shifted).sum(axis=1))
    return shifted[np.arange(len(tokens)), tokens] - norm


def assert_masked(trace, where):
    """Cells that did not route hold nothing that looks like a value."""
    assert (trace.expert_chosen.values[where] == -1).all()
    assert (trace.expert_applied.values[where] == -1).all()
    assert np.isnan(trace.weight_chosen.values[where]).all()
    assert np.isnan(trace.weight_applied.values[where]).all()
    assert (trace.action.values[where] == Action.not_routed).all()
    assert (trace.residency.values[where] == Residency.not_routed).all()
    assert (trace.read_bytes.values[where] == 0).all()


def test_trace_of_long_prompt_holds_every_routing_once(long_run):
    trace = long_run.trace
    n_token = 55 + 10 - 1  # the last token generated is never evaluated
    assert dict(trace.sizes) == {"token": n_token, "layer": 6, "slot": 4, "expert": 32}
    np.testing.assert_array_equal(trace.position, np.arange(n_token))
    np.testing.assert_array_equal(trace.phase, [0] * 55 + [1] * 9)
    expected_batch = [0] * 16 + [1] * 16 + [2] * 16 + [3] * 7 + list(range(4, 13))
    np.testing.assert_array_equal(trace.batch, expected_batch)
    # The last layer routes only the rows whose logits are wanted: the end of the prompt.
    last = np.ones(n_token, bool)
    last[:54] = False
    routed = np.repeat(np.ones((n_token, 1), bool), 6, axis=1)
    routed[:, -1] = last
    np.testing.assert_array_equal((trace.expert_chosen.values >= 0).all(axis=2), routed)
    assert (trace.expert_chosen.values >= 0).sum() == (n_token * 5 + 10) * 4
    assert_masked(trace, ~routed)
    assert np.isnan(trace.router_score.values[~routed]).all()
    assert np.isfinite(trace.router_score.values[routed]).all()
    cells = [
        (int(b), int(p), layer, slot)
        for b, p in zip(trace.batch.values, trace.position.values, strict=True)
        for layer in range(6)
        for slot in range(4)
    ]
    assert len(set(cells)) == len(cells)
    chosen = np.sort(trace.expert_chosen.values[routed], axis=1)
    assert (np.diff(chosen) > 0).all()
    validate(trace)


def test_trace_of_lossless_run_says_that_nothing_was_changed(long_run):
    trace = long_run.trace
    np.testing.assert_array_equal(trace.expert_applied, trace.expert_chosen)
    np.testing.assert_array_equal(
        trace.weight_applied.values.view(np.uint32), trace.weight_chosen.values.view(np.uint32)
    )
    assert np.isin(trace.action, (Action.kept, Action.not_routed)).all()
    assert trace.attrs["lossless"] == 1
    assert trace.attrs["complete"] == 1
    assert "policy_fired" not in trace.attrs


@pytest.mark.parametrize("layout", ["demo", "fused", "shared", "leading_dense", "biased"])
def test_scores_recorded_explain_the_choice(layout, tmp_path):
    path = None
    if layout != "demo":
        path = bl.testing.tiny_model(layout, tmp_path / "tiny.gguf")
    with open_demo(path, cache="1 GiB") as session:
        trace = session.generate(TEXT, n_predict=6, record="scores").trace
    scores, chosen = trace.router_score.values, trace.expert_chosen.values
    routed = chosen[..., 0] >= 0
    width = chosen.shape[-1]
    # Slot by slot: slot 0 is the router's first choice.
    expected = np.argsort(-scores[routed], axis=-1, kind="stable")[:, :width]
    np.testing.assert_array_equal(chosen[routed], expected)


def test_scores16_are_the_scores_in_half_precision(session, long_run):
    half = session.generate(long_run.prompt, n_predict=10, record="scores16").trace
    assert half.router_score.dtype == np.float16
    assert half.attrs["score_exact"] == 0
    assert long_run.trace.attrs["score_exact"] == 1
    np.testing.assert_array_equal(
        half.router_score.values, long_run.trace.router_score.values.astype(np.float16)
    )


def test_weights_recorded_are_the_softmax_of_the_chosen_scores(long_run):
    """In this architecture the weights are the chosen probabilities, normalised to 1."""
    trace = long_run.trace
    routed = trace.expert_chosen.values[..., 0] >= 0
    scores = trace.router_score.values[routed].astype(np.float64)
    np.testing.assert_allclose(scores.sum(axis=1), 1, rtol=1e-5)
    picked = np.take_along_axis(scores, trace.expert_chosen.values[routed].astype(int), axis=1)
    expected = picked / picked.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(trace.weight_chosen.values[routed], expected, rtol=1e-5)


def test_logprob_of_generate_equals_plain_log_softmax(long_run):
    tokens = np.concatenate([long_run.prompt, long_run.tokens])
    pieces = [(0, 16), (16, 32), (32, 48), (48, 55), *((i, i + 1) for i in range(55, 64))]
    logits = plain_logits(bl.datasets.demo_model(), tokens, pieces, set(range(55, 65)))
    np.testing.assert_array_equal(logits.argmax(axis=1), long_run.tokens)
    expected = log_softmax_at(logits, long_run.tokens)
    np.testing.assert_allclose(long_run.logprob, expected, rtol=1e-12, atol=1e-12)
    recorded = long_run.trace.logprob.values
    assert np.isnan(recorded[:55]).all()
    # The trace holds the tokens that were evaluated: all but the last one generated.
    np.testing.assert_array_equal(recorded[55:], expected[:-1].astype(np.float32))


def test_logprob_of_score_equals_plain_log_softmax(session):
    tokens = session.tokenize(TEXT)
    run = session.score(TEXT, n_context=5)
    n = len(tokens)
    pieces = [(0, 5), *((i, i + 1) for i in range(5, n))]
    logits = plain_logits(bl.datasets.demo_model(), tokens, pieces, set(range(6, n)))
    expected = log_softmax_at(logits, tokens[6:])
    np.testing.assert_array_equal(run.tokens, tokens[6:])
    np.testing.assert_allclose(run.logprob, expected, rtol=1e-12, atol=1e-12)
    recorded = run.trace.logprob.values
    assert np.isnan(recorded[:6]).all()
    np.testing.assert_array_equal(recorded[6:], expected.astype(np.float32))
    assert run.nll == pytest.approx(-expected.mean(), rel=1e-12)


def test_pieces_joined_are_the_text(session):
    text = "Hello, world: the quick brown fox."
    run = session.generate(text, n_predict=12)
    trace = run.trace
    head = len(run.prompt) - len(session.tokenize(text, add_special=False))
    pieces = [str(x) for x in trace.piece.values]
    assert "".join(pieces[head : len(run.prompt)]) == text
    n_generated = trace.sizes["token"] - len(run.prompt)
    np.testing.assert_array_equal(trace.token_id, [*run.prompt, *run.tokens[:n_generated]])
    stream = TextStream(session._model.model.piece)
    for token in run.tokens[:n_generated]:
        stream.add(int(token))
    assert stream.text.isascii()  # so no piece is a part of a character
    shown = stream.text.replace("\n", "\\x0a")  # control characters are written out
    assert "".join(pieces[len(run.prompt) :]) == shown
    assert run.text.startswith(stream.text)


def test_text_in_other_scripts_comes_back_through_ids_and_pieces(session):
    text = "crió Dios los cielos – 語 🙂 \x01 end"
    trace = session.generate(text, n_predict=1).trace
    ids = session.tokenize(text)
    np.testing.assert_array_equal(trace.token_id, ids)
    raw = b"".join(session._model.model.piece(int(x)) for x in trace.token_id.values)
    assert raw.decode().endswith(text)
    joined = "".join(str(x) for x in trace.piece.values)
    assert "\x01" not in joined
    assert joined.isprintable()


def test_generate_one_token_records_the_prompt_only(session):
    run = session.generate("In the beginning", n_predict=1)
    assert len(run.tokens) == len(run.logprob) == 1
    assert run.trace.sizes["token"] == len(run.prompt)
    assert (run.trace.phase.values == Phase.prefill).all()
    assert run.summary.decode.n_token == 0
    assert np.isnan(run.summary.tokens_per_s)
    assert "decode" not in str(run.summary).replace("prefill", "")


def test_prompt_of_one_token_routes_in_every_layer(session):
    tokens = session.tokenize("beginning", add_special=False)[:1]
    run = session.generate(tokens, n_predict=3)
    assert run.trace.sizes["token"] == 3
    assert (run.trace.expert_chosen.values >= 0).all()


@pytest.mark.parametrize("n_prompt", [15, 16, 17, 32])
def test_prompt_at_the_edge_of_a_micro_batch_is_split_right(session, n_prompt):
    tokens = session.tokenize(TEXT * 2)[:n_prompt]
    run = session.generate(tokens, n_predict=2)
    _, widths = np.unique(run.trace.batch.values, return_counts=True)
    expected = [16] * (n_prompt // 16) + [n_prompt % 16] * bool(n_prompt % 16) + [1]
    assert widths.tolist() == expected
    last_layer = (run.trace.expert_chosen.values[:, -1, 0] >= 0).nonzero()[0]
    assert last_layer.tolist() == [n_prompt - 1, n_prompt]


def test_record_off_gives_the_same_run_without_a_trace(session, long_run):
    run = session.generate(long_run.prompt, n_predict=10, record="off")
    assert run.trace is None
    assert not run.summary.instrumented
    assert long_run.summary.instrumented
    np.testing.assert_array_equal(run.tokens, long_run.tokens)
    np.testing.assert_array_equal(run.logprob, long_run.logprob)
    for phase in ("prefill", "decode"):
        off, on = getattr(run.summary, phase), getattr(long_run.summary, phase)
        assert (off.lookups, off.hits, off.read_bytes, off.evictions, off.n_token) == (
            on.lookups,
            on.hits,
            on.read_bytes,
            on.evictions,
            on.n_token,
        )


def test_record_ids_is_record_scores_without_the_scores(session, long_run):
    trace = session.generate(long_run.prompt, n_predict=10, record="ids").trace
    assert "router_score" not in trace
    assert "expert" not in trace.dims
    for name in ("expert_chosen", "weight_chosen", "residency", "read_bytes", "logprob"):
        np.testing.assert_array_equal(trace[name], long_run.trace[name])


def test_record_without_text_leaves_no_text_anywhere(session, tmp_path):
    secret = "Xyzzy plugh"
    target = tmp_path / "x.nc"
    trace = session.generate(secret, n_predict=4, record_text=False, save=target).trace
    assert "piece" not in trace.coords
    assert "token_id" not in trace.coords
    assert trace.sizes["token"] > 4
    everything = json.dumps({k: str(v) for k, v in trace.attrs.items()})
    assert "Xyzzy" not in everything
    assert "plugh" not in everything
    assert b"plugh" not in target.read_bytes()
    assert "piece" not in bl.open_trace(target).coords


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_saved_trace_equals_the_one_in_hand_and_leaves_no_journal(session, tmp_path, suffix):
    run = session.generate(TEXT, n_predict=3, record="scores", save=tmp_path / f"x{suffix}")
    opened = bl.open_trace(tmp_path / f"x{suffix}")
    assert opened.identical(run.trace)
    assert [p.name for p in tmp_path.iterdir()] == [f"x{suffix}"]


def test_text_streamed_to_the_caller_is_the_text_of_the_run(session):
    parts = []
    run = session.generate("In the beginning", n_predict=12, on_text=parts.append)
    assert "".join(parts) == run.text


def test_stop_word_ends_the_run(session):
    free = session.generate("In the beginning", n_predict=12)
    word = free.text.strip().split()[1]
    run = session.generate("In the beginning", n_predict=12, stop=word)
    assert run.summary.ended_by == "stop word"
    assert run.text.endswith(word) or word in run.text
    assert len(run.tokens) < 12


def test_sampling_with_a_seed_repeats_itself(session):
    def draw(seed):
        run = session.generate("In the", n_predict=16, temperature=1.0, seed=seed, record="off")
        return run.tokens.tolist()

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


@pytest.mark.parametrize("seed", [2**32 - 1, 2**32])
def test_seed_that_llama_cpp_would_not_take_as_given_is_refused(session, seed):
    """Seeds once lost their high bits; 2**32 - 1 made llama.cpp draw another one each time."""
    with pytest.raises(bl.errors.SettingsError, match=f"seed must be in .* got {seed}"):
        session.generate("In the", n_predict=1, temperature=1.0, seed=seed)


def test_costs_add_up_and_stand_on_the_first_token_of_an_evaluation(long_run):
    trace = long_run.trace
    first = np.unique(trace.batch.values, return_index=True)[1]
    others = np.setdiff1d(np.arange(trace.sizes["token"]), first)
    for name in ("wall_s", "io_s", "manage_s", "callback_s", "evictions", "rss_bytes"):
        values = trace[name].values
        assert np.isfinite(values[first]).all()
        assert np.isnan(values[others]).all()
    wall = trace.wall_s.values[first]
    parts = sum(trace[name].values[first] for name in ("io_s", "manage_s", "callback_s"))
    assert (parts <= wall).all()
    decode = trace.phase.values[first] == Phase.decode
    assert wall[decode].sum() == pytest.approx(long_run.summary.decode.wall_s)
