"""llama.cpp's moe-trace CSV: tokens told by the order, or refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from bmoe_lab.converters import from_moe_trace, to_moe_trace
from bmoe_lab.errors import SettingsError, TraceFormatError
from bmoe_lab.testing import make_trace
from tests.unit.converter_traces import damaged, traces

# One evaluation of two tokens, of which the last layer routes one, then one token.
TEXT = """\
0,3
0,1
0,2
0,0
3,1
3,2
3,0
3,3
5,0
5,1
0,1
0,2
3,1
3,3
5,3
5,0
"""


def write(folder, text):
    path = folder / "moe_trace.csv"
    path.write_bytes(text.encode())
    return path


def read(folder, text, n_expert=4, n_expert_used=2):
    return from_moe_trace(write(folder, text), n_expert=n_expert, n_expert_used=n_expert_used)


@pytest.mark.parametrize("head", ["", "layer,expert\n"])
def test_from_moe_trace_tells_tokens_by_the_order(tmp_path, head):
    ds = read(tmp_path, head + TEXT)
    assert ds.block.values.tolist() == [0, 3, 5]
    assert ds.batch.values.tolist() == [0, 0, 1]
    assert ds.phase.values.tolist() == [0, 0, 1]
    assert ds.expert_chosen.values.tolist() == [
        [[3, 1], [1, 2], [-1, -1]],
        [[2, 0], [0, 3], [0, 1]],  # a lone row of the last layer is the last token's
        [[1, 2], [1, 3], [3, 0]],
    ]
    assert to_moe_trace(ds, tmp_path / "b.csv").read_text() == head + TEXT


def test_from_moe_trace_prompt_in_two_evaluations(tmp_path):
    """The first wants no logits, so its last layer is not there at all."""
    first = "".join(TEXT.splitlines(keepends=True)[:8])
    ds = read(tmp_path, first + TEXT)
    assert ds.batch.values.tolist() == [0, 0, 1, 1, 2]
    assert (ds.expert_chosen.values[:2, 2] == -1).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty file"),
        ("layer,expert\n", "must have rows; got none"),
        ("# a comment\n", "must have rows"),
        (TEXT.replace("3,2\n", "3,x\n"), "expert must be a whole number; got 'x'.*line 6"),
        ("layer,expert\n" + TEXT.replace("3,2\n", "3,x\n"), "got 'x'.*line 7"),
        ("layer;expert\n" + TEXT, "rows must have 2 cells; got 'layer;expert'.*line 1"),
        ("layer,slot\n" + TEXT, "layer must be a whole number; got 'layer'.*line 1"),
        (TEXT.replace("3,2\n", "3,2,1\n"), "rows must have 2 cells.*line 6"),
        (TEXT.replace("3,2\n", "3,-2\n"), "expert must be from 0 to n_expert - 1 = 3; got -2.*6"),
        (TEXT.replace("3,2\n", "3,4\n"), "expert must be from 0 to n_expert - 1 = 3; got 4.*6"),
        (TEXT.replace("3,2\n", "-3,2\n"), "layer must be from 0; got -3.*line 6"),
        (TEXT.replace("3,2\n", "3,2\r\n"), "line ends must be all of one kind.*line 6"),
        (TEXT[:-1], "last line must end with a line end.*line 16"),
        (TEXT[:-2], "last line must end with a line end.*line 16"),
        (TEXT[:-4], "multiple of n_expert_used = 2 rows.*got 1.*line 15.*cut short"),
        (TEXT[:-8], "must have all 3 layers; got 2.*cut short"),
        (TEXT.replace("3,0\n3,3\n", ""), "must have equally many tokens.*got '1 of 2'.*line 5"),
        (TEXT.replace("3,1\n3,2\n3,0\n3,3\n", ""), "must have all 3 layers; got 2"),
        (TEXT.replace("0,3\n0,1\n", "0,3\n0,3\n"), r"appear once in a row; got \[3, 3\].*token 0"),
        ("0,1\n0,2\n0,3\n0,1\n", "must have two layers or more; got 'layer 0 alone'"),
        ("0,1\n0,2\n0,3\n0,1\n1,0\n1,1\n", "second of two layers must have as many tokens"),
        ("0,1\n0,2\n1,3\n1,1\n0,0\n0,1\n", "must have all 2 layers"),
    ],
)  # fmt: skip
def test_from_moe_trace_malformed_or_ambiguous_is_one_clear_error(tmp_path, text, message):
    with pytest.raises(TraceFormatError, match=f"(?s){message}"):
        read(tmp_path, text)


def test_from_moe_trace_wrong_width_is_refused(tmp_path):
    with pytest.raises(TraceFormatError, match="multiple of n_expert_used = 3"):
        read(tmp_path, TEXT, n_expert_used=3)
    with pytest.raises(SettingsError, match="n_expert_used must be a whole number from 1 to 4"):
        read(tmp_path, TEXT, n_expert_used=5)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(ds=traces(dropped=False, n_turn=1, mask=False))
def test_moe_trace_round_trip_is_exact(tmp_path_factory, ds):
    path = to_moe_trace(ds, tmp_path_factory.mktemp("moe") / "a.csv")
    back = from_moe_trace(path, n_expert=ds.attrs["n_expert"], n_expert_used=ds.sizes["slot"])
    for name in ("expert_chosen", "batch", "block"):
        np.testing.assert_array_equal(back[name], ds[name])
    again = to_moe_trace(back, path.with_name("b.csv"))
    assert again.read_bytes() == path.read_bytes()


def test_to_moe_trace_of_a_prompt_with_a_masked_layer_comes_back(tmp_path):
    trace = make_trace(n_token=24, n_layer=4, n_prefill=16, n_ubatch=16)
    path = to_moe_trace(trace, tmp_path / "a.csv")
    back = from_moe_trace(path, n_expert=16, n_expert_used=4)
    np.testing.assert_array_equal(back.expert_chosen, trace.expert_chosen)
    np.testing.assert_array_equal(back.batch, trace.batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda: make_trace(policy="drop", budget_frac=0.3),
            r"got \d+ slots that a policy changed",
        ),
        (lambda: make_trace(n_layer=1, mask_last_layer=False), "what its reader accepts"),
        (lambda: make_trace(n_layer=2), "what its reader accepts"),
        (lambda: make_trace(n_layer=3).isel(token=slice(0, 15)), "tokens that its order tells"),
    ],
)
def test_to_moe_trace_refuses_what_the_format_cannot_hold(tmp_path, change, message):
    with pytest.raises(TraceFormatError, match=message):
        to_moe_trace(change(), tmp_path / "a.csv")
    assert list(tmp_path.iterdir()) == []


@settings(derandomize=True, deadline=None, max_examples=100)
@given(raw=damaged(TEXT.encode()))
def test_from_moe_trace_any_damage_gives_our_error_or_the_same_file(tmp_path_factory, raw):
    folder = tmp_path_factory.mktemp("damage")
    try:
        ds = read(folder, raw.decode("latin-1"))
    except TraceFormatError:
        return
    again = from_moe_trace(to_moe_trace(ds, folder / "b.csv"), n_expert=4, n_expert_used=2)
    assert again.identical(ds)
