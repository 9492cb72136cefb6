import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_lab.recording import display_piece
from bmoe_lab.recording.text import CONTROL


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b" word", " word"),
        ("né 中 🙂".encode(), "né 中 🙂"),
        (b"\xe2\x82", "\\xe2\\x82"),
        (b"\xac tail", "\\xac tail"),
        (b"ok" + "🙂".encode()[:3], "ok\\xf0\\x9f\\x99"),
        (b"\x00", "\\x00"),
        (b"a\n\tb\x7f", "a\\x0a\\x09b\\x7f"),
        ("\x85".encode(), "\\xc2\\x85"),
        (b"\xed\xa0\x80", "\\xed\\xa0\\x80"),
        (b"", ""),
    ],
)
def test_display_piece_writes_what_cannot_be_shown_as_bytes(raw, expected):
    assert display_piece(raw) == expected


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.binary(max_size=20))
def test_display_piece_of_any_bytes_is_safe_text(raw):
    text = display_piece(raw)
    assert not CONTROL.search(text)
    text.encode("utf-8")
