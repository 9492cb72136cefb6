from pathlib import Path

import pytest

from bmoe_lab.cores import physical_cores
from bmoe_lab.errors import SettingsError, UnknownNameError
from bmoe_lab.residency import LRU
from bmoe_lab.runtime.settings import Settings

DEFAULTS = {
    "cache": "auto",
    "cache_floor": "1.5 GiB",
    "cache_ceiling": None,
    "n_ctx": None,
    "n_ubatch": 512,
    "n_threads": None,
    "io_lanes": 4,
    "direct": True,
    "dense": "mmap",
    "n_expert_used": None,
    "overlap": "off",
    "poison": None,
}


def resolve(**changes):
    return Settings.resolve("model.gguf", **(DEFAULTS | changes))


def test_settings_defaults_resolve():
    settings = resolve()
    assert settings.n_threads == physical_cores()
    assert settings.path == Path("model.gguf").absolute()


@pytest.mark.parametrize(("cache", "expected"), [("4 MiB", 4 << 20), (0, 0), (1000, 1000)])
def test_settings_cache_size_becomes_bytes(cache, expected):
    assert resolve(cache=cache).cache == expected


@pytest.mark.parametrize(
    ("trained", "n_ctx", "expected"),
    [(512, None, 512), (40960, None, 2048), (None, None, 2048), (512, 900, 900)],
)
def test_settings_context_left_open_fits_the_model(trained, n_ctx, expected):
    assert resolve(n_ctx=n_ctx).fitted(trained).n_ctx == expected


def test_settings_evaluations_are_no_wider_than_the_context():
    assert resolve(n_ctx=100).fitted(512).n_ubatch == 100


@pytest.mark.parametrize(
    "change",
    [
        {"cache": "12 XB"},
        {"cache": -1},
        {"cache": True},
        {"cache": False},
        {"cache": None},
        {"cache": LRU()},
        {"n_ctx": 0},
        {"n_ctx": 2.0},
        {"n_ubatch": 0},
        {"n_threads": 0},
        {"io_lanes": 33},
        {"io_lanes": True},
        {"direct": 1},
        {"n_expert_used": 0},
        {"overlap": "hook"},
        {"overlap": "auto"},
        {"cache_floor": "much"},
        {"poison": 256},
    ],
)
def test_settings_impossible_value_is_one_line(change):
    with pytest.raises(SettingsError) as caught:
        resolve(**change)
    message = str(caught.value)
    assert "\n" not in message
    assert " must " in message
    assert "got" in message


@pytest.mark.parametrize(
    ("change", "hint"), [({"dense": "anno"}, "anon"), ({"overlap": "of"}, "off")]
)
def test_settings_misspelt_word_suggests(change, hint):
    with pytest.raises(UnknownNameError, match=f"Did you mean '{hint}'"):
        resolve(**change)
