"""Route traces of BigMoeOnEdge: what is read, what is refused, what comes back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from bmoe_lab.converters import from_bigmoeonedge, to_bigmoeonedge
from bmoe_lab.errors import SettingsError, TraceFileError, TraceFormatError
from bmoe_lab.recording import open_trace, save_trace
from bmoe_lab.schema import Action
from bmoe_lab.testing import make_trace
from tests.unit.converter_traces import damaged, traces

PREAMBLE = """\
# route_trace v1
# model=/data/my models/tiny.gguf arch=qwen3moe n_layer=3 n_expert=8 n_expert_used=2
# layer=0 expert_bytes=0 dense_bytes=500
# layer=1 expert_bytes=100 dense_bytes=10
# layer=2 expert_bytes=200 dense_bytes=20
"""
NAMES = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
# Two prompt tokens, of which the last layer routes the second only, then two decoded ones.
ROWS = """\
0,0,0,1,0,3,0.75,0,100
0,0,0,1,1,5,0.25,0,100
0,0,1,1,0,3,0.6,0,0
0,0,1,1,1,1,0.4,0,100
0,0,1,2,0,7,0.9,0,200
0,0,1,2,1,0,0.1,0,200
0,1,2,1,0,5,0.5,1,0
0,1,2,1,1,3,0.5,1,0
0,1,2,2,0,0,0.7,1,0
0,1,2,2,1,6,0.3,0,200
0,1,3,1,0,2,0.8,0,100
0,1,3,1,1,3,0.2,2,0
0,1,3,2,0,6,nan,1,0
0,1,3,2,1,7,nan,1,0
"""
FILE = PREAMBLE + NAMES + "\n" + ROWS
N_ABOVE = 6


def write(folder: Path, text: str | bytes, name: str = "a.route.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def rows(text: str) -> str:
    return PREAMBLE + NAMES + "\n" + text


def test_from_bigmoeonedge_puts_rows_into_cells(tmp_path):
    ds = from_bigmoeonedge(write(tmp_path, FILE))
    assert dict(ds.sizes) == {"token": 4, "layer": 2, "slot": 2}
    assert ds.block.values.tolist() == [1, 2]  # layer 0 has no streamed experts
    assert ds.expert_bytes.values.tolist() == [100, 200]
    assert ds.dense_bytes.values.tolist() == [10, 20]
    assert ds.position.values.tolist() == [0, 1, 2, 3]
    assert ds.phase.values.tolist() == [0, 0, 1, 1]
    assert ds.batch.values.tolist() == [0, 0, 1, 2]
    assert ds.expert_chosen.values.tolist() == [
        [[3, 5], [-1, -1]],
        [[3, 1], [7, 0]],
        [[5, 3], [0, 6]],
        [[2, 3], [6, 7]],
    ]
    assert ds.expert_chosen.identical(
        ds.expert_applied.assign_attrs(ds.expert_chosen.attrs).rename("expert_chosen")
    )
    assert ds.residency.values[3].tolist() == [[0, 2], [1, 1]]
    assert ds.residency.values[0, 1].tolist() == [255, 255]
    assert ds.read_bytes.values.sum(axis=(1, 2)).tolist() == [200, 500, 200, 100]
    assert np.isnan(ds.weight_chosen.values[3, 1]).all()


def test_from_bigmoeonedge_keeps_what_the_file_says_of_the_run(tmp_path):
    attrs = from_bigmoeonedge(write(tmp_path, FILE)).attrs
    assert attrs["source"] == "import"
    assert attrs["model_name"] == "tiny.gguf"
    assert attrs["arch"] == "qwen3moe"
    assert attrs["n_expert"] == 8
    assert attrs["instrumented"] == 1
    assert "/data/my models/tiny.gguf" in attrs["bigmoeonedge"]


def test_from_bigmoeonedge_without_proof_of_a_policy_leaves_lossless_out(tmp_path):
    ds = from_bigmoeonedge(write(tmp_path, FILE))
    assert "lossless" not in ds.attrs
    # Said as unknown wherever a trace is shown.
    from bmoe_lab.plots.theme import run_note
    from bmoe_lab.recording import describe_html

    assert run_note(ds.attrs) == "policy unknown"
    assert "policy unknown" in describe_html(ds)
    assert "LOSSY" not in describe_html(ds)
    page = ds.moe.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<span class="mark unknown">policy unknown' in page


@pytest.mark.parametrize(
    "facts",
    [
        "n_expert=8 n_expert_used=2 n_layer=3 arch=qwen3moe model=/data/my models/tiny.gguf",
        "arch=qwen3moe model=/data/my models/tiny.gguf n_layer=3 n_expert_used=2 n_expert=8",
        "model=/data/my models/tiny.gguf arch=qwen3moe n_layer=3 n_expert=8 n_expert_used=2 new=1",
    ],
)
def test_from_bigmoeonedge_reads_keys_in_any_order(tmp_path, facts):
    lines = FILE.splitlines(keepends=True)
    lines[1] = f"# {facts}\n"
    path = write(tmp_path, "".join(lines))
    ds = from_bigmoeonedge(path)
    assert (ds.attrs["model_name"], ds.attrs["arch"]) == ("tiny.gguf", "qwen3moe")
    assert ds.attrs["n_expert"] == 8
    again = to_bigmoeonedge(ds, tmp_path / "b.csv")
    assert again.read_bytes() == path.read_bytes()


def test_from_bigmoeonedge_model_path_may_look_like_keys(tmp_path):
    lines = FILE.splitlines(keepends=True)
    lines[1] = lines[1].replace("my models/tiny.gguf", "a arch=x n_expert=3 b=1")
    path = write(tmp_path, "".join(lines))
    ds = from_bigmoeonedge(path)
    assert ds.attrs["model_name"] == "a arch=x n_expert=3 b=1"
    assert (ds.attrs["arch"], ds.attrs["n_expert"]) == ("qwen3moe", 8)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_to_bigmoeonedge_gives_the_same_bytes(tmp_path, end):
    path = write(tmp_path, FILE.replace("\n", end))
    again = to_bigmoeonedge(from_bigmoeonedge(path), tmp_path / "b.csv")
    assert again.read_bytes() == path.read_bytes()


def test_from_bigmoeonedge_reads_columns_by_name(tmp_path):
    """A reader that goes by place would take slots for experts."""
    table = [line.split(",") for line in (NAMES + "\n" + ROWS).splitlines()]
    order = [8, 5, 0, 1, 7, 2, 3, 6, 4]
    text = "".join(",".join(row[at] for at in order) + "\n" for row in table)
    path = write(tmp_path, PREAMBLE + text)
    ds = from_bigmoeonedge(path)
    plain = from_bigmoeonedge(write(tmp_path, FILE, "plain.csv"))
    assert ds.drop_attrs(deep=False).identical(plain.drop_attrs(deep=False))
    assert to_bigmoeonedge(ds, tmp_path / "b.csv").read_bytes() == path.read_bytes()


def test_from_bigmoeonedge_keeps_unknown_columns(tmp_path):
    lines = (NAMES + ",dropped,gain,note,batch\n" + ROWS).splitlines(keepends=True)
    added = [f",0,{i}.50,t{i} x,{i}\n" for i in range(len(lines) - 1)]
    text = lines[0] + "".join(
        line.rstrip("\n") + more for line, more in zip(lines[1:], added, strict=True)
    )
    path = write(tmp_path, PREAMBLE + text)
    ds = from_bigmoeonedge(path)
    assert ds.gain.dims == ("token", "layer", "slot")
    assert ds.gain.values[0, 0].tolist() == [0.5, 1.5]
    assert np.isnan(ds.gain.values[0, 1]).all()  # no row there: unknown, never 0
    assert ds.note.values[0].tolist() == [["t0 x", "t1 x"], ["", ""]]
    assert ds.column_batch.values[0].tolist() == [[0, 1], [-1, -1]]  # `batch` is a name of ours
    assert to_bigmoeonedge(ds, tmp_path / "b.csv").read_bytes() == path.read_bytes()


def test_from_bigmoeonedge_unknown_column_without_one_format_stays_text(tmp_path):
    lines = (NAMES + ",odd\n" + ROWS).splitlines()
    text = "\n".join(
        [lines[0], *(f"{line},{i}.{'0' * (i % 3)}" for i, line in enumerate(lines[1:]))]
    )
    path = write(tmp_path, PREAMBLE + text + "\n")
    ds = from_bigmoeonedge(path)
    assert ds.odd.dtype.kind == "U"
    assert to_bigmoeonedge(ds, tmp_path / "b.csv").read_bytes() == path.read_bytes()


DROPPED = """\
0,1,2,1,0,5,0.5,1,0,0
0,1,2,1,1,3,0.25,0,0,1
0,1,2,1,2,4,0.25,0,100,0
0,1,2,2,0,0,0.25,1,0,0
0,1,2,2,1,6,0.5,0,200,0
0,1,2,2,2,1,0.25,0,0,1
0,1,3,1,0,5,0.5,1,0,0
0,1,3,1,1,3,0.3,1,0,0
0,1,3,1,2,4,0.2,1,0,0
0,1,3,2,0,0,nan,1,0,1
0,1,3,2,1,6,nan,1,0,0
0,1,3,2,2,1,nan,1,0,0
"""


def dropped_file(folder: Path) -> Path:
    preamble = PREAMBLE.replace("n_expert_used=2", "n_expert_used=3")
    return write(folder, preamble + NAMES + ",dropped\n" + DROPPED)


def test_from_bigmoeonedge_dropped_row_runs_the_best_kept_expert(tmp_path):
    ds = from_bigmoeonedge(dropped_file(tmp_path))
    assert ds.attrs["lossless"] == 0
    assert ds.action.values[0].tolist() == [[0, 1, 0], [0, 0, 1]]
    assert ds.expert_chosen.values[0].tolist() == [[5, 3, 4], [0, 6, 1]]
    assert ds.expert_applied.values[0].tolist() == [[5, 5, 4], [0, 6, 6]]
    # All weights unknown: the first kept one.
    assert ds.expert_applied.values[1, 1].tolist() == [6, 6, 1]


def test_from_bigmoeonedge_does_not_invent_what_survivors_were_scaled_to(tmp_path):
    ds = from_bigmoeonedge(dropped_file(tmp_path))
    applied = ds.weight_applied.values
    assert np.isnan(applied[0, 0, [0, 2]]).all()
    assert applied[0, 0, 1] == 0
    np.testing.assert_array_equal(applied[1, 0], ds.weight_chosen.values[1, 0])


def test_to_bigmoeonedge_dropped_rows_come_back(tmp_path):
    path = dropped_file(tmp_path)
    again = to_bigmoeonedge(from_bigmoeonedge(path), tmp_path / "b.csv")
    assert again.read_bytes() == path.read_bytes()


def test_from_bigmoeonedge_all_rows_dropped_is_refused(tmp_path):
    text = DROPPED.replace("0,1,2,1,0,5,0.5,1,0,0", "0,1,2,1,0,5,0.5,1,0,1").replace(
        "0,1,2,1,2,4,0.25,0,100,0", "0,1,2,1,2,4,0.25,0,100,1"
    )
    preamble = PREAMBLE.replace("n_expert_used=2", "n_expert_used=3")
    with pytest.raises(TraceFormatError, match=r"must keep one expert.*line 7"):
        from_bigmoeonedge(write(tmp_path, preamble + NAMES + ",dropped\n" + text))


def test_from_bigmoeonedge_zero_dropped_column_proves_nothing(tmp_path):
    lines = (NAMES + ",dropped\n" + ROWS).splitlines()
    text = "\n".join([lines[0], *(line + ",0" for line in lines[1:])]) + "\n"
    assert "lossless" not in from_bigmoeonedge(write(tmp_path, PREAMBLE + text)).attrs


TURNS = """\
0,0,0,1,0,3,1,0,100
0,0,0,1,1,5,1,0,100
0,0,0,2,0,3,1,0,200
0,0,0,2,1,5,1,0,200
0,1,1,1,0,3,1,1,0
0,1,1,1,1,5,1,1,0
0,1,1,2,0,3,1,1,0
0,1,1,2,1,5,1,1,0
2,0,2,1,0,3,1,1,0
2,0,2,1,1,5,1,1,0
2,0,2,2,0,3,1,1,0
2,0,2,2,1,5,1,1,0
2,1,3,1,0,3,1,1,0
2,1,3,1,1,5,1,1,0
2,1,3,2,0,3,1,1,0
2,1,3,2,1,5,1,1,0
"""


def test_from_bigmoeonedge_reads_several_turns(tmp_path):
    path = write(tmp_path, rows(TURNS))
    ds = from_bigmoeonedge(path)
    assert ds.turn.values.tolist() == [0, 0, 2, 2]
    assert ds.phase.values.tolist() == [0, 1, 0, 1]
    assert ds.batch.values.tolist() == [0, 1, 2, 3]
    assert to_bigmoeonedge(ds, tmp_path / "b.csv").read_bytes() == path.read_bytes()
    one = from_bigmoeonedge(path, turn=2)
    assert one.position.values.tolist() == [2, 3]
    text = to_bigmoeonedge(one, tmp_path / "c.csv").read_text()
    assert text == rows("".join(TURNS.splitlines(keepends=True)[8:]))


def test_from_bigmoeonedge_unknown_turn_lists_those_there(tmp_path):
    with pytest.raises(SettingsError, match=r"turn must be one of \[0, 2\]; got 1"):
        from_bigmoeonedge(write(tmp_path, rows(TURNS)), turn=1)


WIDE = "".join(
    f"0,0,{step},{layer},{slot},{(step + slot) % 8},0.5,0,0\n"
    for ubatch in (range(3), range(3, 5))
    for layer in (1, 2)
    for step in ubatch
    for slot in (0, 1)
)


def test_from_bigmoeonedge_layers_that_start_again_begin_an_evaluation(tmp_path):
    path = write(tmp_path, rows(WIDE))
    ds = from_bigmoeonedge(path)
    assert ds.batch.values.tolist() == [0, 0, 0, 1, 1]
    assert to_bigmoeonedge(ds, tmp_path / "b.csv").read_bytes() == path.read_bytes()


def test_from_bigmoeonedge_n_ubatch_splits_the_prompt(tmp_path):
    ds = from_bigmoeonedge(write(tmp_path, rows(WIDE)), n_ubatch=2)
    assert ds.batch.values.tolist() == [0, 0, 1, 1, 2]
    ds = from_bigmoeonedge(
        write(
            tmp_path,
            rows(
                WIDE + "0,1,5,1,0,1,1,0,0\n0,1,5,1,1,2,1,0,0\n"
                "0,1,5,2,0,1,1,0,0\n0,1,5,2,1,2,1,0,0\n"
            ),
        ),
        n_ubatch=8,
    )
    assert ds.batch.values.tolist() == [0, 0, 0, 0, 0, 1]
    with pytest.raises(SettingsError, match="n_ubatch must be a whole number from 1; got 0"):
        from_bigmoeonedge(write(tmp_path, rows(WIDE)), n_ubatch=0)


def test_from_bigmoeonedge_rows_in_another_order_make_the_prompt_one_evaluation(tmp_path):
    lines = FILE.splitlines(keepends=True)
    mixed = np.random.default_rng(0).permutation(lines[N_ABOVE:]).tolist()
    ds = from_bigmoeonedge(write(tmp_path, "".join([*lines[:N_ABOVE], *mixed])))
    plain = from_bigmoeonedge(write(tmp_path, FILE, "plain.csv"))
    assert ds.identical(plain)


def test_from_bigmoeonedge_unknown_steps_follow_the_order(tmp_path):
    lines = [line.split(",") for line in WIDE.splitlines()]
    text = "".join(",".join([*row[:2], "-1", *row[3:]]) + "\n" for row in lines)
    path = write(tmp_path, rows(text))
    ds = from_bigmoeonedge(path)
    known = from_bigmoeonedge(write(tmp_path, rows(WIDE), "known.csv"))
    assert "position" not in ds.coords  # unknown for all: absent
    np.testing.assert_array_equal(ds.expert_chosen, known.expert_chosen)
    np.testing.assert_array_equal(ds.batch, known.batch)
    assert to_bigmoeonedge(ds, tmp_path / "b.csv").read_bytes() == path.read_bytes()


def test_from_bigmoeonedge_unknown_step_of_a_masked_layer_is_refused(tmp_path):
    lines = [line.split(",") for line in ROWS.splitlines()[:6]]
    text = "".join(",".join([*row[:2], "-1", *row[3:]]) + "\n" for row in lines)
    with pytest.raises(TraceFormatError, match=r"step must be known.*line 11"):
        from_bigmoeonedge(write(tmp_path, rows(text)))


def replaced(line: int, old: str, new: str) -> str:
    lines = FILE.splitlines(keepends=True)
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new, 1)
    return "".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold a trace; got the empty file"),
        (PREAMBLE, "must have a line of column names; got 5 lines of comments"),
        (PREAMBLE + NAMES + "\n", "must have rows; got none below the column names"),
        (ROWS, "first line must be '# route_trace v1'; got b'0,0,0,1,0"),
        (FILE.replace("v1", "v2"), "first line must be '# route_trace v1'; got '# route_trace v2'"),
        (FILE.replace("n_expert=8", "experts=8"), "comment lines must give n_expert; got"),
        (FILE.replace(",slot", ",slots"), r"must include .* got none of \['slot'\].*line 6"),
        (FILE.replace(",slot", ",turn"), r"column names must differ; got \['turn'\].*line 6"),
        (replaced(9, "0.6", "zero"), "weight must be a number or nan; got 'zero'.*line 9"),
        (replaced(9, ",3,", ",three,"), "expert must be a whole number; got 'three'.*line 9"),
        (replaced(9, ",3,", ",3.5,"), "expert must be a whole number; got '3.5'.*line 9"),
        (replaced(9, ",3,", ",0x3,"), "expert must be a whole number; got '0x3'.*line 9"),
        (replaced(9, ",3,", ", 3,"), "expert must be a whole number; got ' 3'.*line 9"),
        (replaced(9, ",3,", ",,"), "expert must be a whole number; got ''.*line 9"),
        (replaced(9, ",3,", ",99999999999999999999,"), "expert must be a whole number.*line 9"),
        (replaced(9, "0.6", "inf"), "weight must be a number or nan; got 'inf'.*line 9"),
        (replaced(9, "0.6", "1e60"), "weight must fit float32.*line 9"),
        (replaced(9, ",3,", ",-3,"), "expert must be from 0 to n_expert - 1 = 7; got -3.*line 9"),
        (replaced(9, ",3,", ",8,"), "expert must be from 0 to n_expert - 1 = 7; got 8.*line 9"),
        (replaced(9, ",1,0,3", ",1,2,3"), "slot must be from 0 to n_expert_used - 1 = 1.*line 9"),
        (replaced(9, "0,0,1", "0,2,1"), r"phase must be 0 \(prefill\) or 1.*got 2.*line 9"),
        (replaced(9, "0,0,1", "0,0,-2"), "step must be from -1; got -2.*line 9"),
        (replaced(9, "0.6,0", "0.6,3"), "residency must be 0, 1 or 2; got 3.*line 9"),
        (replaced(9, "0,0\n", "0,4294967296\n"), "expert_bytes must be from 0.*line 9"),
        (replaced(9, "0.6", "0.6,1"), "rows must have 9 cells.*line 9"),
        (replaced(9, "\n", "\r\n"), r"line ends must be all of one kind; got '\\r\\n'.*line 9"),
        (replaced(9, "0.6", "0.6\r"), r"line ends must be all of one kind; got '\\r'.*line 9"),
        (replaced(9, "0,0,1", "# 0,0,1"), "comments must stand above the column names.*line 9"),
        (replaced(9, "0,0,1", "\n0,0,1"), "rows must have 9 cells; got ''.*line 9"),
        (FILE.removesuffix("\n"), "last line must end with a line end.*line 20"),
        (FILE.removesuffix("7,nan,1,0\n"), "last line must end.*line 20.*cut short"),
        (FILE.removesuffix(",0\n") + "\n", "rows must have 9 cells.*line 20.*cut short"),
        ("".join(FILE.splitlines(keepends=True)[:-1]), "must have n_expert_used = 2.*got 1.*19"),
        ("".join(FILE.splitlines(keepends=True)[:-2]), "rows in every layer.*none in layer 2.*18"),
        (FILE + ROWS.splitlines(keepends=True)[-1], r"rows must differ.*'step': 3.*line 21"),
        (replaced(8, "1,5", "0,5"), r"rows must differ in .*'slot': 0.*line 8"),
        (replaced(10, ",1,0.4", ",3,0.4"), "an expert must appear once.*got 3.*line 10"),
        (FILE.replace("# layer=2 expert_bytes=200 dense_bytes=20\n", ""),
         "must have a comment line with their expert_bytes; got 'layer=2 without one'.*line 10"),
        (FILE.replace("expert_bytes=200", "expert_bytes=0"), "got 'layer=2 without one'.*line 11"),
        (FILE.replace("expert_bytes=200 ", ""), "got 'layer=2 without one'.*line 11"),
        (FILE.replace("expert_bytes=200", "expert_bytes=x"), "expert_bytes must be a.*line 5"),
        (FILE.replace("layer=2 e", "layer=1 e"), "must be named once.*layer=1 again.*line 5"),
        (FILE.replace("n_expert_used=2", "n_expert_used=9"), "1 <= n_expert_used <= n_expert"),
        (FILE.replace("n_expert=8", "n_expert=eight"), "n_expert must be a whole number.*line 2"),
    ],
)  # fmt: skip
def test_from_bigmoeonedge_malformed_file_is_one_clear_error(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(TraceFormatError, match=f"(?s){message}") as caught:
        from_bigmoeonedge(path)
    assert str(path) in str(caught.value)


def test_from_bigmoeonedge_impossible_width_needs_no_memory(tmp_path):
    """The width comes from the file: a table of that size must not be made before it is checked."""
    text = FILE.replace("n_expert=8", "n_expert=32767").replace("used=2", "used=32767")
    with pytest.raises(TraceFormatError, match=r"must have n_expert_used = 32767 rows.*got 2"):
        from_bigmoeonedge(write(tmp_path, text))


def test_from_bigmoeonedge_largest_numbers_do_not_overflow(tmp_path):
    last = TURNS.replace("\n2,", "\n2147483647,")
    text = rows(last.replace("\n2147483647,1,3,", "\n2147483647,1,2147483647,"))
    ds = from_bigmoeonedge(write(tmp_path, text))
    assert ds.turn.values.tolist() == [0, 0, 2147483647, 2147483647]
    assert ds.position.values.tolist() == [0, 1, 2, 2147483647]


def test_from_bigmoeonedge_falling_turn_is_refused(tmp_path):
    lines = TURNS.splitlines(keepends=True)
    with pytest.raises(TraceFormatError, match=r"turn must not fall; got 0.*line 15"):
        from_bigmoeonedge(write(tmp_path, rows("".join(lines[8:] + lines[:8]))))


def test_from_bigmoeonedge_bytes_that_are_not_text_are_refused(tmp_path):
    data = FILE.encode().replace(b"tiny", b"\xff\xfe")
    with pytest.raises(TraceFormatError, match=r"text must be UTF-8.*line 2"):
        from_bigmoeonedge(write(tmp_path, data))


@settings(derandomize=True, deadline=None, max_examples=100)
@given(raw=damaged(FILE.encode()))
def test_from_bigmoeonedge_any_damage_gives_our_error_or_a_valid_trace(tmp_path_factory, raw):
    """Whatever is wrong, it is one error of ours; what is returned passed validation."""
    path = tmp_path_factory.mktemp("damage") / "a.csv"
    path.write_bytes(raw)
    try:
        ds = from_bigmoeonedge(path)
    except TraceFormatError:
        return
    again = to_bigmoeonedge(ds, path.with_name("b.csv"))
    assert from_bigmoeonedge(again).identical(ds)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(ds=traces())
def test_bigmoeonedge_round_trip_is_exact(tmp_path_factory, ds):
    folder = tmp_path_factory.mktemp("trip")
    back = from_bigmoeonedge(to_bigmoeonedge(ds, folder / "a.csv"))
    for name in ("turn", "phase", "position", "batch", "block", "expert_chosen", "residency",
                 "read_bytes", "action", "expert_bytes"):  # fmt: skip
        np.testing.assert_array_equal(back[name], ds[name], err_msg=name)
    assert ("dense_bytes" in back) == ("dense_bytes" in ds)
    if "weight_chosen" in back:
        same = back.weight_chosen.values.view(np.uint32) == ds.weight_chosen.values.view(np.uint32)
        assert (same | np.isnan(ds.weight_chosen.values)).all()
    else:
        assert np.isnan(ds.weight_chosen.values).all()
    again = to_bigmoeonedge(back, folder / "b.csv")
    assert again.read_bytes() == (folder / "a.csv").read_bytes()
    assert from_bigmoeonedge(again).identical(back)


def test_to_bigmoeonedge_synthetic_trace_keeps_its_hit_rate(tmp_path):
    trace = make_trace(n_token=40, n_layer=4, n_prefill=20, n_ubatch=7, policy="drop")
    back = from_bigmoeonedge(to_bigmoeonedge(trace, tmp_path / "a.csv"))
    np.testing.assert_array_equal(back.batch, trace.batch)
    np.testing.assert_array_equal(back.weight_chosen, trace.weight_chosen)
    assert (back.action == Action.dropped).sum() == (trace.action == Action.dropped).sum()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: make_trace(policy="substitute"), r"chosen and applied alike; got \d+ substituted"),
        (lambda: make_trace().drop_vars("residency"), "must have 'residency'"),
        (lambda: make_trace().drop_vars("read_bytes"), "must have 'read_bytes'"),
        (lambda: make_trace().drop_vars("expert_bytes"), "must have 'expert_bytes'"),
        (lambda: make_trace(n_layer=1, n_prefill=4, mask_last_layer=False, n_ubatch=2),
         "cannot tell apart"),
        (lambda: make_trace(n_layer=1), "tokens that route somewhere"),
        (lambda: make_trace().assign_attrs(model_name="two\nlines"), "model on one line"),
        (lambda: make_trace().assign_attrs(model_name="a arch=x").assign_attrs(arch="q w"),
         "model's name that can be told"),
    ],
)  # fmt: skip
def test_to_bigmoeonedge_refuses_what_the_format_cannot_hold(tmp_path, change, message):
    with pytest.raises(TraceFormatError, match=message):
        to_bigmoeonedge(change(), tmp_path / "a.csv")
    assert list(tmp_path.iterdir()) == []


def test_to_bigmoeonedge_refuses_two_groups_drafts_and_widths(tmp_path):
    trace = make_trace(n_layer=4, mask_last_layer=False)
    groups = trace.copy(deep=True)
    groups.group.values[1] = 1
    draft = trace.copy(deep=True)
    draft.phase.values[-1] = 2
    still = trace.copy(deep=True)
    still.residency.values[0] = 3
    narrow = trace.copy(deep=True)
    narrow.n_expert_used.values[1] = 2
    for ds, message in (
        (groups, "one expert group per block"),
        (draft, "prefill and decode only"),
        (still, "streamed experts only"),
        (narrow, "one width for all layers"),
    ):
        with pytest.raises(TraceFormatError, match=message):
            to_bigmoeonedge(ds, tmp_path / "a.csv")


def test_to_bigmoeonedge_repeated_position_is_refused(tmp_path):
    trace = make_trace(n_token=8, n_prefill=2, mask_last_layer=False)
    trace.position.values[-1] = trace.position.values[-2]
    with pytest.raises(TraceFormatError, match="what its reader accepts"):
        to_bigmoeonedge(trace, tmp_path / "a.csv")


def test_to_bigmoeonedge_part_of_a_trace_writes_its_own_layers(tmp_path):
    ds = from_bigmoeonedge(write(tmp_path, FILE)).isel(layer=[0])
    back = from_bigmoeonedge(to_bigmoeonedge(ds, tmp_path / "b.csv"))
    assert back.block.values.tolist() == [1]
    assert "layer=2" not in json.loads(back.attrs["bigmoeonedge"])["preamble"][-1]


def test_to_bigmoeonedge_failed_write_leaves_the_old_file(tmp_path):
    path = write(tmp_path, FILE)
    with pytest.raises(TraceFormatError):
        to_bigmoeonedge(make_trace(policy="substitute"), path)
    assert path.read_text() == FILE
    with pytest.raises(TraceFileError, match="must be in a folder that exists"):
        to_bigmoeonedge(from_bigmoeonedge(path), tmp_path / "none" / "a.csv")


@pytest.mark.parametrize("ending", ["nc", "zarr"])
def test_from_bigmoeonedge_unknown_columns_survive_our_own_files(tmp_path, ending):
    lines = (NAMES + ",gain,note\n" + ROWS).splitlines()
    text = "\n".join([lines[0], *(f"{line},{i}.50,t{i}" for i, line in enumerate(lines[1:]))])
    path = write(tmp_path, PREAMBLE + text + "\n")
    saved = save_trace(from_bigmoeonedge(path), tmp_path / f"a.{ending}")
    again = to_bigmoeonedge(open_trace(saved), tmp_path / "b.csv")
    assert again.read_bytes() == path.read_bytes()
