"""The baseline's logits: exact, nameless, refused where the disk is too small."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest

from bmoe_lab.comparison.logit_store import LogitStore
from bmoe_lab.errors import SettingsError


def test_store_rows_come_back_bit_for_bit(tmp_path):
    rows = np.random.default_rng(0).normal(size=(5, 1001)).astype(np.float32)
    rows[2, 7] = -np.inf
    with LogitStore(5, 1001, folder=str(tmp_path)) as store:
        for row in rows:
            store.append(row)
        for i in (4, 0, 2):
            assert store.row(i).tobytes() == rows[i].tobytes()


def test_store_leaves_no_file_even_while_open(tmp_path):
    with LogitStore(2, 8, folder=str(tmp_path)) as store:
        store.append(np.zeros(8, dtype=np.float32))
        assert list(tmp_path.iterdir()) == []


def test_store_larger_than_the_disk_is_refused_with_both_numbers(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=70 << 20))
    with pytest.raises(SettingsError, match=r"= 7\.6 MiB; got 70\.0 MiB free"):
        LogitStore(200, 10_000, folder=str(tmp_path))


def test_store_disk_that_fills_at_once_is_refused(tmp_path, monkeypatch):
    """The space is reserved: a mapped file on a full disk would kill the process instead."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SettingsError, match="must have room for the baseline's logits"):
        LogitStore(2, 8, folder=str(tmp_path))


def test_store_row_beyond_those_written_is_refused(tmp_path):
    with LogitStore(2, 8, folder=str(tmp_path)) as store:
        store.append(np.zeros(8, dtype=np.float32))
        with pytest.raises(SettingsError, match="index must be a row written before, 0 to 0"):
            store.row(1)


def test_store_row_of_another_shape_is_refused(tmp_path):
    with (
        LogitStore(2, 8, folder=str(tmp_path)) as store,
        pytest.raises(SettingsError, match="must be row 0 of 2"),
    ):
        store.append(np.zeros(9, dtype=np.float32))


def test_store_close_twice_does_nothing(tmp_path):
    store = LogitStore(1, 1, folder=str(tmp_path))
    store.close()
    store.close()
