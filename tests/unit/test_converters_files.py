"""What no converter opens, and what a failed write leaves."""

from __future__ import annotations

import pickle
import zipfile

import numpy as np
import pytest

from bmoe_lab import converters
from bmoe_lab.converters.files import written_aside
from bmoe_lab.converters.number_text import float32_texts
from bmoe_lab.errors import BmoeLabError, TraceFileError, TraceFormatError

READERS = {
    "from_bigmoeonedge": {},
    "from_moe_trace": {"n_expert": 4, "n_expert_used": 2},
    "from_parquet": {"n_expert": 4},
    "from_routed_experts": {"n_expert": 4, "n_prompt": 1},
}


class Bomb:
    """Would raise if it were unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["a.pkl", "a.pickle", "a.pt", "a.PTH", "a.csv", "a.npy", "a.zip"])
def test_readers_refuse_pickles_with_the_reason(tmp_path, reader, name):
    path = tmp_path / name
    if name == "a.zip":  # what torch.save writes
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Bomb()))
    else:
        path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(TraceFormatError, match=r"must not be a pickle.*runs the code in it"):
        getattr(converters, reader)(path, **READERS[reader])


@pytest.mark.parametrize("reader", READERS)
def test_readers_refuse_a_pickle_by_its_name_alone(tmp_path, reader):
    """The oldest protocol is plain text, so only the name tells."""
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps(Bomb(), protocol=0))
    with pytest.raises(TraceFormatError, match="must not be a pickle"):
        getattr(converters, reader)(path, **READERS[reader])


@pytest.mark.parametrize("reader", READERS)
def test_readers_refuse_what_cannot_be_a_file(tmp_path, reader):
    read = getattr(converters, reader)
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(TraceFormatError, match="got the empty file"):
        read(tmp_path / "empty", **READERS[reader])
    with pytest.raises(TraceFileError, match="must be a file that exists"):
        read(tmp_path / "none", **READERS[reader])
    if reader != "from_parquet":
        with pytest.raises(TraceFileError, match="must be a file; got the folder"):
            read(tmp_path, **READERS[reader])
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 4)
    with pytest.raises(BmoeLabError, match="noise"):
        read(tmp_path / "noise", **READERS[reader])


def test_written_aside_failed_block_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("old")

    def interrupted():
        with written_aside(path) as aside:
            aside.write_text("new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["a.csv"]


def test_written_aside_target_that_cannot_be_written_is_our_error(tmp_path):
    with (
        pytest.raises(TraceFileError, match="must be a file; got the folder"),
        written_aside(tmp_path),
    ):
        pass
    with (
        pytest.raises(TraceFileError, match=r"must be written to .*No space"),
        written_aside(tmp_path / "a"),
    ):
        raise OSError(28, "No space left on device")


def test_float32_texts_give_back_every_bit():
    bits = np.random.default_rng(0).integers(0, 2**32, 20000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    back = np.array([float(text) for text in float32_texts(values)]).astype(np.float32)
    np.testing.assert_array_equal(back.view(np.uint32), values.view(np.uint32))


def test_public_names_exist():
    assert all(callable(getattr(converters, name)) for name in converters.__all__)
