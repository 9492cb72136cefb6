"""What a caller may hand to a session: checked once, at the door, in words."""

import json

import pytest

import bmoe_lab as bl
from bmoe_lab.errors import PolicyError, SettingsError
from tests.integration.session_tools import open_demo


@pytest.fixture(scope="module")
def session():
    with open_demo() as opened:
        yield opened


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda s: s.generate("In", n_predict=1, on_text=3), "on_text must be a function"),
        (lambda s: s.generate("In", n_predict=1, stop=3), "stop must be a text"),
        (lambda s: s.generate("In", n_predict=1, save=3), "save must be a path"),
        (lambda s: s.generate("In", n_predict=1, record_text="x"), "record_text must be True"),
        (lambda s: s.generate("a\ud800", n_predict=1), "lone surrogate at character 1"),
        (lambda s: s.score("a b c", observe=3), "observe must be a function"),
        (lambda s: s.score("a b c", progress=3), "progress must be a function"),
        (lambda s: s.score(["a", 3]), "text must be text or a row of token ids; got int"),
        (lambda s: s.tokenize(3), "text must be a str; got int"),
        (lambda s: bl.compare(s, "a", policies=bl.routing.DropCold(0.5)), "Put it in a list"),
        (lambda s: bl.Session(3), "path must be a path to a GGUF file"),
    ],
)
def test_session_wrong_type_is_one_line(session, call, part):
    with pytest.raises(SettingsError) as caught:
        call(session)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_compare_policy_class_is_refused_before_a_bar_is_drawn(session, capfd):
    with pytest.raises(PolicyError, match="got the class DropCold"):
        bl.compare(session, "a b c", policies=[bl.routing.DropCold])
    assert capfd.readouterr() == ("", "")


def test_session_width_other_than_the_models_is_told_everywhere():
    """It is lossless relative to llama.cpp with the same override, and another model's output."""
    with bl.Session(
        bl.datasets.demo_model(), cache="2 MiB", n_ctx=64, n_threads=1, n_expert_used=1
    ) as narrow:
        run = narrow.generate("In the beginning", n_predict=2)
        assert "n_expert_used 1 of the model's 4" in repr(narrow)
        assert "n_expert_used 1 of the model&#x27;s 4" in narrow._repr_html_()
    assert "n_expert_used=1" in repr(run)
    assert "the model file asks for 4" in str(run.summary)
    assert run.trace.attrs["n_expert_used_model"] == 4
    assert run.trace["n_expert_used"].values.tolist() == [1] * 6
    note = run.trace.moe.plot.heatmap().layout.title.subtitle.text
    assert "n_expert_used=1 of the model" in note


def test_session_of_the_models_own_width_says_nothing_of_it(session):
    run = session.generate("In the beginning", n_predict=1)
    assert "n_expert_used" not in repr(session) + repr(run)
    assert not run.summary.width_changed


def test_trace_tells_what_low_bits_depend_on(session):
    run = session.generate("In the beginning", n_predict=1)
    settings = json.loads(run.trace.attrs["session_settings"])
    assert settings["kv_type_k"] == settings["kv_type_v"] == "f16"
    assert settings["flash_attention"] == "auto"
    assert settings["direct_asked"] is True


def test_windows_of_a_tokenizer_that_appends_an_end_start_as_the_text_does(session, monkeypatch):
    """What was appended used to be taken for a beginning, and a token of the text was doubled."""
    model = session._model.model
    real = model.tokenize

    def appending(text, *, add_special=True):
        tokens = real(text, add_special=add_special)
        return [*tokens, 0] if add_special else tokens

    monkeypatch.setattr(model, "tokenize", appending)
    text = "In the beginning God created the heaven and the earth. " * 40
    windows = session.windows(text, n_context=4)
    plain = real(text, add_special=False)
    assert len(windows) > 1
    assert all(window[0] == model.bos for window in windows)
    assert [int(t) for w in windows for t in w[1:]] == plain.tolist()


def test_policy_that_claims_to_be_lossless_and_acts_is_refused(session):
    class Claims(bl.routing.RoutingPolicy):
        lossless = True

        def weigh(self, routing):
            return routing.ids > 0

    with pytest.raises(PolicyError, match="must not be lossless"):
        session.generate("In the beginning", n_predict=2, policy=Claims())


def test_policy_that_alters_a_parameter_is_refused(session):
    """The run's clone would be another policy than the one that the trace names."""

    class Alters(bl.routing.RoutingPolicy):
        def __init__(self, n=0):
            self.n = n + 1

        def weigh(self, routing):
            return None

    with pytest.raises(PolicyError, match="must store 'n' as given"):
        session.generate("In the beginning", n_predict=2, policy=Alters())


@pytest.mark.parametrize(
    ("attribute", "value"), [("needs", frozenset({"score"})), ("phases", {"decode"})]
)
def test_policy_with_an_unknown_need_or_phase_is_refused(session, attribute, value):
    kind = type(
        "Odd", (bl.routing.RoutingPolicy,), {attribute: value, "weigh": lambda self, routing: None}
    )
    with pytest.raises(PolicyError, match=f"{attribute} must be of"):
        session.generate("In the beginning", n_predict=2, policy=kind())


def test_compare_policy_that_never_fires_warns_once(session):
    text = bl.datasets.heldout("kjv")[0].text[:260]
    with pytest.warns(bl.errors.PolicyNeverFiredWarning) as caught:
        bl.compare(
            session,
            text,
            policies=[bl.routing.CachePrior(0.0), bl.routing.Lossless()],
            progress=False,
        )
    never = [w for w in caught if "never fired" in str(w.message)]
    assert len(never) == 1


def test_run_that_never_fires_warns_at_the_callers_line(session):
    with pytest.warns(bl.errors.PolicyNeverFiredWarning) as caught:
        session.generate("In the beginning", n_predict=3, policy=bl.routing.CachePrior(0.0))
    assert caught[0].filename == __file__


def test_open_trace_of_zarr_with_a_missing_chunk_is_an_error(session, tmp_path):
    """It used to read as zeros: no bytes read where there were misses."""
    target = tmp_path / "run.zarr"
    session.generate("In the beginning", n_predict=3, save=target)
    chunk = next((target / "read_bytes").glob("0*"))
    chunk.unlink()
    with pytest.raises(bl.errors.TraceFileError, match=r"must have all its chunks.*read_bytes"):
        bl.open_trace(target)
