"""A recording killed at random moments loses nothing that was flushed.

One helper process imports the package once. For each kill it forks a child that records synthetic
evaluations as fast as it can through Recorder and Journal, and reports over a pipe how many tokens
the journal has taken; after a random time the child gets SIGKILL. A fork instead of a new
interpreter, so that fifty kills take seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from bmoe_lab.errors import TraceFileError
from bmoe_lab.recording import find_leftovers, open_trace, recover
from bmoe_lab.testing.traces import make_trace

N_KILLS = 60
TOKENS = {"n_token": 200, "n_prefill": 60, "n_ubatch": 40}
# In turn: frames smaller than any buffer would be, frames of many pages that a kill may halve.
SHAPES = [
    TOKENS | {"n_layer": 1, "n_expert": 8, "n_used": 2},
    TOKENS | {"n_layer": 4, "n_expert": 64, "n_used": 4, "scores": True},
]

_HELPER = """
import json, os, random, signal, struct, sys, time
import pyarrow
from bmoe_lab.recording import Journal, Recorder, recorder as recorder_module
from bmoe_lab.testing.recording import feed, spec_of
from bmoe_lab.testing.traces import make_trace

folder, n_kills = sys.argv[1], int(sys.argv[2])
traces = [make_trace(**shape) for shape in json.loads(sys.argv[3])]
random.seed(20)
for index in range(n_kills):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        small = index % 2 == 0
        trace = traces[0 if small else 1]
        recorder_module.FLUSH_TOKENS = 8 if small else 64
        n_batch = int(trace.batch.values[-1]) + 1
        journal = Journal(f"{folder}/{index:03}.journal", spec_of(trace))
        append = journal.append

        def acknowledged(columns):
            append(columns)
            os.write(writer, struct.pack("<q", journal.n_token))

        journal.append = acknowledged
        recorder = Recorder(journal.spec, journal)
        turn = 0
        while True:  # until the kill
            feed(recorder, trace, first_batch=turn * n_batch)
            turn += 1
    os.close(writer)
    received = b""
    for _ in range(random.randint(1, 12)):  # flushes to live through, whatever the machine's speed
        received += os.read(reader, 8)
    time.sleep(random.uniform(0.0, 0.01))  # less than a flush takes, to die anywhere in it
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    while part := os.read(reader, 1 << 16):
        received += part
    os.close(reader)
    n_token = struct.unpack(f"<{len(received) // 8}q", received)[-1]
    print(json.dumps([index, n_token]), flush=True)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> tuple[Path, dict[int, int]]:
    """Return the folder of journals, the tokens that each child had acknowledged."""
    folder = tmp_path_factory.mktemp("killed")
    arguments = [sys.executable, "-c", _HELPER, str(folder), str(N_KILLS), json.dumps(SHAPES)]
    helper = subprocess.run(arguments, capture_output=True, text=True, timeout=400)
    assert helper.returncode == 0, helper.stderr
    return folder, dict(json.loads(line) for line in helper.stdout.splitlines())


def test_kill_at_random_moments_loses_nothing_that_was_flushed(killed):
    folder, acknowledged = killed
    assert len(acknowledged) == N_KILLS >= 50
    traces = [make_trace(**shape) for shape in SHAPES]
    for index, n_flushed in acknowledged.items():
        expected = traces[index % 2]
        n_batch = int(expected.batch[-1]) + 1
        actual = open_trace(folder / f"{index:03}.journal")
        n_token = actual.sizes["token"]
        # At most one flush, of 64 tokens and a whole evaluation, was written but not acknowledged.
        assert n_flushed <= n_token <= n_flushed + 64 + TOKENS["n_ubatch"], index
        assert actual.attrs["complete"] == 0
        assert f"{n_token} tokens survived" in actual.attrs["journal_note"]
        which = np.arange(n_token) % TOKENS["n_token"]
        fed = expected.isel(token=which)
        batch = fed.batch + np.arange(n_token) // TOKENS["n_token"] * n_batch
        fed = fed.assign_coords(batch=("token", batch.values.astype(np.int32), fed.batch.attrs))
        fed.attrs = actual.attrs
        xr.testing.assert_identical(actual, fed)
        # Whole evaluations only: the next row would have begun another one.
        widths = expected.batch.values
        assert n_token % TOKENS["n_token"] == 0 or widths[which[-1]] != widths[which[-1] + 1]


def test_kill_moments_differ(killed):
    _, acknowledged = killed
    assert len(set(acknowledged.values())) > 10


def test_kill_leaves_leftovers_that_recover_turns_into_files(killed, tmp_path):
    folder, _ = killed
    leftovers = find_leftovers(folder)
    assert len(leftovers) == N_KILLS
    assert not any(leftover.running or leftover.complete for leftover in leftovers)
    path = tmp_path / "copy.journal"
    path.write_bytes(leftovers[0].path.read_bytes())
    expected = open_trace(path)
    xr.testing.assert_identical(recover(path, save=tmp_path / "a.nc"), expected)


def test_kill_before_the_first_flush_says_that_nothing_survived(killed, tmp_path):
    folder, _ = killed
    data = (folder / "000.journal").read_bytes()
    header = data.index(b"SCHM") - 4
    path = tmp_path / "early.journal"
    path.write_bytes(data[:header])
    with pytest.raises(TraceFileError, match=r"at least one token; got none.* 0 tokens survived"):
        open_trace(path)
