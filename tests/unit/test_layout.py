from __future__ import annotations

import hashlib
import shutil

import numpy as np
import pytest

from bmoe_lab.datasets import demo_model
from bmoe_lab.errors import ModelFileError
from bmoe_lab.streaming.layout import read_layout
from tests.unit.tiny_gguf import ARCH, I32, STRING, U16, gguf_bytes, key, tensor, write_moe


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    path = tmp_path_factory.mktemp("layout") / "moe.gguf"
    return path, write_moe(path)


def test_layout_places_every_tensor_where_its_bytes_are(moe):
    path, arrays = moe
    layout = read_layout(path)
    content = path.read_bytes()
    assert set(layout.tensors) == set(arrays)
    for name, entry in layout.tensors.items():
        assert content[entry.offset : entry.offset + entry.n_bytes] == arrays[name].tobytes()
        assert entry.shard == 0


def test_layout_slice_bytes_is_the_stride_of_one_expert(moe):
    path, arrays = moe
    entry = read_layout(path).tensors["blk.1.ffn_down_exps.weight"]
    assert entry.ne == (12, 50, 8, 1)
    assert entry.slice_bytes == arrays["blk.1.ffn_down_exps.weight"].strides[0]


def test_layout_facts_come_from_the_metadata(moe):
    layout = read_layout(moe[0])
    assert (layout.arch, layout.name) == ("qwen3moe", "streaming test")
    assert (layout.n_expert, layout.n_expert_used, layout.n_block) == (8, 2, 3)
    assert layout.context_length == 64
    assert layout.is_moe
    layout.require_moe()
    assert layout.hparam("expert_feed_forward_length") is None
    assert "tokenizer.ggml.tokens" not in layout.metadata  # too long to keep


def test_layout_metadata_keeps_types(tmp_path):
    import gguf

    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_bool("flag", True)
    writer.add_float32("half", 0.5)
    writer.add_int64("large", -(2**40))
    writer.add_array("counts", [0, 8, 8])
    writer.add_array("words", ["a", "é"])
    writer.add_array("flags", [True, False])
    writer.add_tensor("t", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = read_layout(path).metadata
    assert metadata["flag"] is True
    assert metadata["half"] == 0.5
    assert metadata["large"] == -(2**40)
    assert metadata["counts"] == (0, 8, 8)
    assert metadata["words"] == ("a", "é")
    assert metadata["flags"] == (True, False)


def test_layout_of_dense_model_is_not_moe_and_is_refused(tmp_path):
    path = tmp_path / "dense.gguf"
    path.write_bytes(gguf_bytes([ARCH], [tensor("a", (8,), 0)], bytes(32)))
    layout = read_layout(path)
    assert not layout.is_moe
    assert layout.n_expert is None
    with pytest.raises(ModelFileError, match=r"must be a Mixture-of-Experts model; got .*dense"):
        layout.require_moe()


def test_layout_without_architecture_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes([], [tensor("a", (8,), 0)], bytes(32)))
    with pytest.raises(ModelFileError, match="must name its architecture"):
        read_layout(path)


def test_fingerprint_covers_header_first_mebibyte_and_size():
    layout = read_layout(demo_model())
    content = demo_model().read_bytes()
    stop = layout.shards[0].data_offset + 2**20
    expected = hashlib.sha256(content[:stop] + len(content).to_bytes(8, "little")).hexdigest()
    assert layout.fingerprint == expected


def test_fingerprint_does_not_depend_on_the_name(moe, tmp_path):
    other = shutil.copy(moe[0], tmp_path / "other.gguf")
    assert read_layout(other).fingerprint == read_layout(moe[0]).fingerprint


def shard(number: int, count: int, total: int, names: list[str]) -> bytes:
    keys = [key("split.no", U16, number), key("split.count", U16, count)]
    keys += [key("split.tensors.count", I32, total)]
    if number == 0:
        keys += [ARCH, key("qwen3moe.expert_count", 4, 4)]
    tensors = [tensor(name, (8,), 32 * i) for i, name in enumerate(names)]
    return gguf_bytes(keys, tensors, bytes([number + 1]) * 32 * len(names))


@pytest.fixture
def split(tmp_path):
    """Three shards with four tensors."""
    names = [["a"], ["b", "c"], ["d"]]
    paths = [tmp_path / f"m-{i + 1:05d}-of-00003.gguf" for i in range(3)]
    for i, path in enumerate(paths):
        path.write_bytes(shard(i, 3, 4, names[i]))
    return paths


def test_split_model_is_read_as_one(split):
    layout = read_layout(split[0])
    assert [entry.path for entry in layout.shards] == split
    assert {name: entry.shard for name, entry in layout.tensors.items()} == {
        "a": 0, "b": 1, "c": 1, "d": 2,
    }  # fmt: skip
    assert layout.file_bytes == sum(path.stat().st_size for path in split)
    entry = layout.tensors["c"]
    assert split[1].read_bytes()[entry.offset : entry.offset + entry.n_bytes] == b"\2" * 32
    assert layout.path == split[0]
    assert len(layout.fingerprint) == 64
    assert layout.fingerprint not in [entry.fingerprint for entry in layout.shards]


def test_split_model_opened_by_another_shard_names_the_first(split):
    with pytest.raises(ModelFileError, match=r"got shard 2 of 3, .*Name 'm-00001-of-00003\.gguf'"):
        read_layout(split[1])


def test_split_model_without_first_shard_names_it(split):
    split[0].unlink()
    with pytest.raises(ModelFileError, match=r"'m-00001-of-00003\.gguf' is missing: download it"):
        read_layout(split[2])


def test_first_shard_missing_is_refused_as_missing(split):
    split[0].unlink()
    with pytest.raises(ModelFileError, match="must exist"):
        read_layout(split[0])


def test_split_model_with_missing_shards_names_them(split):
    split[1].unlink()
    split[2].unlink()
    with pytest.raises(
        ModelFileError, match=r"2 missing \(m-00002-of-00003\.gguf, m-00003-of-00003\.gguf\)"
    ):
        read_layout(split[0])


def test_split_model_that_was_renamed_is_refused(split, tmp_path):
    renamed = split[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match=r"must be named '<name>-00001-of-00003\.gguf'"):
        read_layout(renamed)
    split[1].rename(tmp_path / "part.gguf")
    with pytest.raises(ModelFileError, match="Name the first shard instead"):
        read_layout(tmp_path / "part.gguf")


def test_split_model_with_swapped_shards_is_refused(split):
    split[2].write_bytes(split[1].read_bytes())
    with pytest.raises(ModelFileError, match=r"must be shard 3 of 3; got split\.no 1"):
        read_layout(split[0])


def test_split_model_with_cut_shard_is_refused(split):
    split[1].write_bytes(split[1].read_bytes()[:-40])
    with pytest.raises(ModelFileError, match=r"hold the data of 'b'.*00002-of-00003"):
        read_layout(split[0])


def test_split_model_with_repeated_tensor_is_refused(split):
    split[2].write_bytes(shard(2, 3, 4, ["a"]))
    with pytest.raises(ModelFileError, match=r"got 'a' again in .*00003-of-00003"):
        read_layout(split[0])


def test_split_model_with_wrong_total_is_refused(split):
    split[2].write_bytes(shard(2, 3, 4, ["d", "e"]))
    with pytest.raises(ModelFileError, match="must have all 4 tensors of the split model; got 5"):
        read_layout(split[0])


def test_key_text_that_is_no_utf8_survives(tmp_path):
    path = tmp_path / "model.gguf"
    latin = b"\x0c\0\0\0\0\0\0\0general.name\x08\0\0\0\x01\0\0\0\0\0\0\0\xe9"
    path.write_bytes(gguf_bytes([ARCH, latin], [], b""))
    assert read_layout(path).name.encode("utf-8", "surrogateescape") == b"\xe9"
    assert STRING == 8
