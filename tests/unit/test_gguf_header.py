from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
import time

import pytest

from bmoe_lab.datasets import demo_model
from bmoe_lab.errors import ModelFileError
from bmoe_lab.seam.gguf import read_gguf
from bmoe_lab.streaming import header as header_module
from bmoe_lab.streaming.header import read_header
from tests.unit.tiny_gguf import (
    ARCH,
    ARRAY,
    I32,
    STRING,
    U16,
    U32,
    gguf_bytes,
    key,
    small,
    tensor,
    text,
)

SIZES = {0: (1, 4), 8: (32, 34)}


def refusal(tmp_path, content: bytes) -> str:
    """Return the one line with which a file of `content` is refused."""
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        read_header(path, type_sizes=SIZES)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("model file must ")
    assert "; got " in message
    return message


def test_header_of_small_file_gives_places_of_tensors(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(small())
    actual = read_header(path, type_sizes=SIZES)
    assert actual.version == 3
    assert actual.scalars == {"general.architecture": "qwen3moe"}
    assert [(t.name, t.ne, t.n_bytes) for t in actual.tensors] == [
        ("a", (10,), 40),
        ("b", (2, 3), 24),
    ]
    assert actual.data_offset % 32 == 0
    assert [t.offset - actual.data_offset for t in actual.tensors] == [0, 64]


def test_header_of_demo_model_agrees_with_ggml():
    ours, theirs = read_header(demo_model()), read_gguf(demo_model())
    assert ours.data_offset == theirs.data_offset
    assert [(t.name, t.type, t.offset, t.n_bytes) for t in ours.tensors] == [
        (t.name, t.type, t.offset, t.n_bytes) for t in theirs.tensors
    ]
    assert all(theirs.metadata[name] == value for name, value in ours.scalars.items())


def test_header_without_tensors_is_read(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes([ARCH], [], b""))
    assert read_header(path, type_sizes=SIZES).tensors == ()


def test_header_with_large_vocabulary_is_read_in_well_under_a_second(tmp_path):
    """150k tokens and as many merges; Python's GGUFReader takes seconds."""
    tokens = b"".join(text(f"token{i}") for i in range(150_000))
    array = text("tokenizer.ggml.tokens") + struct.pack("<IIQ", ARRAY, STRING, 150_000) + tokens
    merges = text("tokenizer.ggml.merges") + struct.pack("<IIQ", ARRAY, STRING, 150_000) + tokens
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes([ARCH, array, merges], [], b""))
    began = time.process_time()
    read_header(path, type_sizes=SIZES)
    assert time.process_time() - began < 1.0


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match=r"must exist; got '.*none\.gguf'\. Check the path"):
        read_header(tmp_path / "none.gguf", type_sizes=SIZES)


def test_path_with_nul_is_refused():
    with pytest.raises(ModelFileError, match="must be readable; got embedded null byte"):
        read_header("a\0b", type_sizes=SIZES)


def test_directory_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match="must be a file; got the folder"):
        read_header(tmp_path, type_sizes=SIZES)


def test_device_is_refused():
    with pytest.raises(ModelFileError, match="must be a regular file; got '/dev/null'"):
        read_header("/dev/null", type_sizes=SIZES)


def test_unreadable_file_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    path.write_bytes(small())

    def denied(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", denied)
    with pytest.raises(ModelFileError, match="must be readable; got Permission denied"):
        read_header(path, type_sizes=SIZES)


def test_empty_file_is_refused(tmp_path):
    assert "the empty file" in refusal(tmp_path, b"")


def test_other_format_is_refused(tmp_path):
    message = refusal(tmp_path, b"PK\x03\x04" + bytes(100))
    assert "got b'PK\\x03\\x04' at byte 0" in message


def test_file_of_three_bytes_is_refused(tmp_path):
    assert "got b'GGU' at byte 0" in refusal(tmp_path, b"GGU")


@pytest.mark.parametrize("version", [0, 1, 4])
def test_other_version_is_refused(tmp_path, version):
    message = refusal(tmp_path, gguf_bytes([ARCH], [], b"", version=version))
    assert f"version 2 or 3; got version {version} at byte 4" in message


def test_big_endian_file_is_refused(tmp_path):
    message = refusal(tmp_path, b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    assert "must be little endian" in message


def test_file_cut_at_every_byte_of_its_header_is_refused(tmp_path):
    content = small()
    stop = read_header_end(tmp_path, content)
    for length in range(1, stop):
        message = refusal(tmp_path, content[:length])
        assert "download" in message or "Name a .gguf" in message


def read_header_end(tmp_path, content: bytes) -> int:
    path = tmp_path / "whole.gguf"
    path.write_bytes(content)
    return read_header(path, type_sizes=SIZES).data_offset


def test_file_cut_in_tensor_data_is_refused(tmp_path):
    content = small()
    message = refusal(tmp_path, content[:-1])
    assert "hold the data of 'b'" in message
    assert "cut short: download it again" in message


def test_padding_after_last_tensor_may_be_missing(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(small())
    last = read_header(path, type_sizes=SIZES).tensors[-1]
    assert last.offset + last.n_bytes == path.stat().st_size


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0) + bytes(99), "tensors in its"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63) + bytes(99), "keys in its"),
        (gguf_bytes([text("k") + struct.pack("<I", 13)], [], bytes(9)), "known type for 'k'"),
        (gguf_bytes([ARCH, ARCH], [], b""), "'general.architecture' twice"),
        (gguf_bytes([key("", U32, 1)], [], b""), "an empty name for key 0"),
        (gguf_bytes([key("a\0b", U32, 1)], [], b""), "without NUL bytes"),
        (gguf_bytes([text("k" * 70000) + bytes(8)], [], b""), "at most 65535 bytes"),
        (
            gguf_bytes([text("k") + struct.pack("<IIQ", ARRAY, ARRAY, 1) + bytes(64)], [], b""),
            "an array of numbers or strings",
        ),
        (
            gguf_bytes([text("k") + struct.pack("<IIQ", ARRAY, U32, 2**61) + bytes(64)], [], b""),
            "hold its whole header",
        ),
        (
            gguf_bytes([text("k") + struct.pack("<IIQ", ARRAY, STRING, 2**61)], [], b""),
            "hold its whole header",
        ),
        (
            gguf_bytes(
                [text("k") + struct.pack("<IIQ", ARRAY, STRING, 2) + text("x") + b"\xff" * 8],
                [],
                b"",
            ),
            "2 strings of 'k' that reach past",
        ),
        (
            gguf_bytes([text("k") + struct.pack("<IQ", STRING, 2**40)], [], b""),
            "the text of 'k'",
        ),
        (gguf_bytes([key("general.alignment", U32, 48)], [], b""), "power of two"),
        (gguf_bytes([key("general.alignment", U32, 0)], [], b""), "power of two"),
        (gguf_bytes([key("general.alignment", U16, 32)], [], b""), "u32 for 'general.alignment'"),
        (gguf_bytes([key("split.no", U32, 0)], [], b""), "u16 for 'split.no'; got u32"),
        (gguf_bytes([key("split.tensors.count", U32, 0)], [], b""), "i32 for"),
        (gguf_bytes([], [tensor("", (1,), 0)], bytes(4)), "an empty name for tensor 0"),
        (gguf_bytes([], [tensor("n" * 64, (1,), 0)], bytes(4)), "at most 63 bytes"),
        (gguf_bytes([], [tensor("n", (), 0)], bytes(99)), "1 to 4 dimensions"),
        (gguf_bytes([], [tensor("n", (1,) * 5, 0)], bytes(4)), "1 to 4 dimensions"),
        (gguf_bytes([], [tensor("n", (4, 0), 0)], bytes(4)), "elements in 'n'"),
        (gguf_bytes([], [tensor("n", (2**32, 2**32), 0)], bytes(4)), "elements in 'n'"),
        (gguf_bytes([], [tensor("n", (2**63 - 1,), 0)], bytes(4)), "hold the data of 'n'"),
        (gguf_bytes([], [tensor("n", (1,), 0, kind=4)], bytes(4)), "type that the installed"),
        (gguf_bytes([], [tensor("n", (33,), 0, kind=8)], bytes(68)), "whole blocks of 32"),
        (gguf_bytes([], [tensor("n", (1,), 1)], bytes(99)), "at offset 0 of the data; got"),
        (
            gguf_bytes([], [tensor("n", (1,), 0), tensor("m", (1,), 64)], bytes(99)),
            "at offset 32 of the data; got offset 64",
        ),
        (
            gguf_bytes([], [tensor("n", (1,), 0), tensor("n", (1,), 32)], bytes(99)),
            "'n' twice",
        ),
    ],
)  # fmt: skip
def test_inconsistent_header_is_refused_with_byte_and_reason(tmp_path, content, expected):
    message = refusal(tmp_path, content)
    assert expected in message
    assert "at byte " in message


def test_header_larger_than_the_limit_is_refused(tmp_path, monkeypatch):
    """A wrong count inside a large file must not send the walk through gigabytes of weights."""
    monkeypatch.setattr(header_module, "MAX_HEADER_BYTES", 4096)
    array = text("k") + struct.pack("<IIQ", ARRAY, U32, 1000) + bytes(4000)
    message = refusal(tmp_path, gguf_bytes([ARCH, array, key("x", U32, 1)], [], bytes(9000)))
    assert "header smaller than 4096 bytes" in message


def test_refused_file_leaves_no_descriptor(tmp_path):
    before = os.listdir("/proc/self/fd")
    refusal(tmp_path, small()[:-1])
    assert len(os.listdir("/proc/self/fd")) == len(before)


_CHILD = """
import resource, sys
from pathlib import Path
from bmoe_lab.errors import ModelFileError
from bmoe_lab.seam.gguf import type_sizes
from bmoe_lab.streaming.layout import read_layout
type_sizes()
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
accepted = 0
for path in sorted(Path(sys.argv[1]).iterdir()):
    print(path.name, flush=True)
    try:
        read_layout(path)
        accepted += 1
    except ModelFileError as error:
        assert "\\n" not in str(error), error
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
assert grown < 64 * 1024, grown
print("accepted", accepted)
"""


def test_mutated_headers_never_crash_hang_or_take_memory(tmp_path):
    """ggml gets every file that the check accepts: neither may fall over, in a child to see it."""
    rng = random.Random(7)
    keys = [
        ARCH,
        key("general.alignment", U32, 32),
        key("split.count", U16, 1),
        key("split.no", U16, 0),
        key("split.tensors.count", I32, 2),
        key("general.name", STRING, "fuzz"),
        text("tokens") + struct.pack("<IIQ", ARRAY, STRING, 3) + text("a") + text("b") + text(""),
        text("numbers") + struct.pack("<IIQ3I", ARRAY, U32, 3, 1, 2, 3),
    ]
    tensors = [tensor("a", (10,), 0), tensor("b", (2, 3), 64), tensor("c", (32, 2, 2), 96, kind=8)]
    content = gguf_bytes(keys, tensors, bytes(300))
    stop = len(content) - 300
    folder = tmp_path / "fuzz"
    folder.mkdir()
    edges = [0, 1, 2, 4, 8, 13, 31, 63, 64, 127, 128, 255]
    for number in range(250):
        mutated = bytearray(content)
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            at = rng.randrange(4, stop)
            how = rng.randrange(5)
            if how == 0:
                mutated[at] = rng.choice(edges)
            elif how == 1:
                mutated[at] ^= 1 << rng.randrange(8)
            elif how == 2:
                width = rng.choice([4, 8])
                value = rng.choice([0, 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1, 1 << 20])
                mutated[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
            elif how == 3:
                del mutated[at : at + rng.randrange(1, 9)]
            else:
                mutated[at:at] = rng.randbytes(rng.randrange(1, 9))
        (folder / f"{number:04d}.gguf").write_bytes(mutated)
    (folder / "9999.gguf").write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-2000:]
    accepted = int(done.stdout.split()[-1])
    assert 1 <= accepted < 200  # the sound file is read, and the mutations do bite
