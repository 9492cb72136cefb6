import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_lab.errors import SettingsError
from bmoe_lab.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4 MiB", 4 << 20),
        ("2GiB", 2 << 30),
        ("1.5 KiB", 1536),
        ("0 B", 0),
        (17, 17),
        (" 8 KiB ", 8192),
    ],
)
def test_parse_size_valid_gives_bytes(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "value",
    [
        "12 XB",
        "4 MB",
        "",
        "MiB",
        "-1 MiB",
        "1e3 B",
        "0.3 B",
        "nan GiB",
        -1,
        True,
        1.5,
        None,
        b"1 B",
    ],
)
def test_parse_size_invalid_says_what_was_given(value):
    with pytest.raises(SettingsError, match="cache must be a size") as caught:
        parse_size(value, name="cache")
    assert repr(value) in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.integers(0, 1 << 60))
def test_parse_size_bytes_round_trip(n_bytes):
    assert parse_size(f"{n_bytes} B") == n_bytes


def test_format_size_picks_largest_unit():
    assert [format_size(x) for x in (0, 1023, 1024, 5 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 MiB",
        "3.0 TiB",
    ]


def test_numpy_integers_are_sizes():
    size = parse_size(np.int64(4096))
    assert size == 4096
    assert type(size) is int


@pytest.mark.parametrize("value", [2**63, "8388608 TiB", np.uint64(2**63)])
def test_size_beyond_signed_64_bits_is_refused(value):
    with pytest.raises(SettingsError, match="less than 8 EiB"):
        parse_size(value)
    assert parse_size(2**63 - 1) == 2**63 - 1
