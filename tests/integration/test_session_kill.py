"""A recording session killed at random moments leaves whole evaluations of the undisturbed run."""

import json
import subprocess
import sys

import numpy as np
import pytest

import bmoe_lab as bl
from bmoe_lab.errors import SchemaError, TraceFileError
from bmoe_lab.recording import find_leftovers, recover
from bmoe_lab.schema import validate
from tests.integration.session_tools import REPOSITORY, TEXT, open_demo

N_KILLS = 50
N_PREDICT = 90

# One helper imports everything once; each child that it forks opens the model afresh.
HELPER = """
import json, os, random, select, signal, sys, time
import bmoe_lab as bl
from bmoe_lab.recording import recorder
from tests.integration.session_tools import TEXT, open_demo

folder, n_kills, n_predict = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
recorder.FLUSH_TOKENS = 7  # more moments that differ than in the usual half second
draw = random.Random(5)
ended = []
with open_demo() as session:  # compiled functions are loaded; its threads end with it
    session.generate(TEXT, n_predict=2, record="scores")
for index in range(n_kills):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        session = open_demo()
        os.write(writer, b"x")
        save = f"{folder}/{index:02}.nc" if index % 2 else None
        os.environ["BMOE_LAB_STATE_DIR"] = f"{folder}/state{index:02}"
        session.generate(
            TEXT * 2, n_predict=n_predict, record="scores" if index % 3 else "ids", save=save
        )
        os._exit(0)
    os.close(writer)
    select.select([reader], [], [])  # the model is open
    time.sleep(draw.uniform(0.0, 1.0) * float(sys.argv[4]))
    os.kill(child, signal.SIGKILL)
    ended.append(os.waitpid(child, 0)[1])
    os.close(reader)
print(json.dumps(ended))
"""


@pytest.fixture(scope="module")
def whole():
    with open_demo() as session:
        return session.generate(TEXT * 2, n_predict=N_PREDICT, record="scores")


def test_killed_sessions_leave_whole_evaluations(tmp_path, whole):
    length = whole.summary.prefill.wall_s + whole.summary.decode.wall_s
    result = subprocess.run(
        [sys.executable, "-c", HELPER, str(tmp_path), str(N_KILLS), str(N_PREDICT), str(length)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    n_killed = sum(status == 9 for status in json.loads(result.stdout))
    assert n_killed >= N_KILLS // 2

    trace = whole.trace
    lengths, n_empty = set(), 0
    for index in range(N_KILLS):
        folder = tmp_path if index % 2 else tmp_path / f"state{index:02}"
        journals = [
            x.path
            for x in find_leftovers(folder)
            if x.path.parent == folder and (index % 2 == 0 or x.path.name.startswith(f"{index:02}"))
        ]
        assert len(journals) <= 1
        if not journals:  # killed before the run began, or the run had ended
            continue
        try:
            left = bl.open_trace(journals[0])
        except (TraceFileError, SchemaError):  # killed before the first flush: nothing to give
            n_empty += 1
            continue
        n = left.sizes["token"]
        lengths.add(n)
        validate(left)
        assert left.attrs["complete"] == 0 or n == trace.sizes["token"]
        assert n == trace.sizes["token"] or trace.batch.values[n] != trace.batch.values[n - 1]
        for name, variable in left.variables.items():
            if name in trace.variables and not str(name).endswith(("_s", "faults", "rss_bytes")):
                np.testing.assert_array_equal(
                    variable.values, trace[name].values[: len(variable)], err_msg=name
                )
        assert left.attrs["model_fingerprint"] == trace.attrs["model_fingerprint"]
        target = tmp_path / f"recovered{index:02}.nc"
        recover(journals[0], save=target)
        assert bl.open_trace(target).sizes["token"] == n
    assert n_empty < N_KILLS / 2
    assert len(lengths) >= 4, "the kills must come at different moments"
