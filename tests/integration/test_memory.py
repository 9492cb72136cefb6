"""Memory while streaming a model far larger than its budget, measured by the kernel's own peak."""

import json

import pytest

import bmoe_lab as bl
from tests.integration.session_tools import run_child

MIB = 2**20

CHILD = """
import json, sys
import numpy as np
import bmoe_lab as bl
from bmoe_lab.seam import memory

MIB = 2**20

def status(name):
    with open("/proc/self/status") as file:
        return next(int(x.split()[1]) * 1024 for x in file if x.startswith(name + ":"))

def mapped(path):
    '''Return the resident bytes of llama.cpp's mapping of the file.'''
    total, inside = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            head = line.split()
            if "-" in head[0] and ":" not in head[0]:
                inside = line.rstrip().endswith(path)
            elif inside and head[0] == "Rss:":
                total += int(head[1]) * 1024
    return total

path, cache, dense = sys.argv[1], sys.argv[2], sys.argv[3]
n_ctx, n_ubatch, lanes = 256, int(sys.argv[4]), 4
# What is loaded once per process is not the model's: libraries, compiled functions.
with bl.Session(bl.datasets.demo_model(), cache="1 MiB", n_ctx=64, n_threads=1) as session:
    session.generate("In the beginning", n_predict=4)
before = status("VmRSS")
session = bl.Session(
    path, cache=cache, n_ctx=n_ctx, n_ubatch=n_ubatch, n_threads=1, io_lanes=lanes, dense=dense
)
info = session.info()
opened = status("VmRSS")
mapped_after_open = mapped(path)
rng = np.random.default_rng(0)
prompt = rng.integers(3, session.n_vocab, 150)
run = session.generate(prompt, n_predict=40)
peak = status("VmHWM")
trace = run.trace
widest = 0
for batch in np.unique(trace.batch.values):
    ids = trace.expert_applied.values[trace.batch.values == batch]
    for layer in range(ids.shape[1]):
        chosen = np.unique(ids[:, layer])
        widest = max(widest, int((chosen >= 0).sum()) * int(trace.expert_bytes.values[layer]))
print(json.dumps({
    "before": before, "opened": opened, "peak": peak, "mapped_after_open": mapped_after_open,
    "mapped_after_run": mapped(path), "widest": widest,
    "dense": info["dense_bytes_total"], "experts": info["expert_bytes_total"],
    "budget": session.cache_budget_bytes, "released": info["released_bytes"],
    "n_vocab": session.n_vocab, "hits": run.summary.decode.hits,
    "evictions": run.summary.decode.evictions,
}))
session.close()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = bl.testing.memory_model(tmp_path_factory.mktemp("large") / "large.gguf")
    yield path
    path.unlink()  # half a GiB


@pytest.mark.parametrize("dense", ["mmap", "anon"])
@pytest.mark.parametrize("n_ubatch", [4, 64])
def test_peak_memory_of_a_streamed_model_is_bounded_by_its_budget(model, dense, n_ubatch):
    child = run_child(CHILD, str(model), "64 MiB", dense, str(n_ubatch))
    assert child.returncode == 0, child.stderr
    got = json.loads(child.stdout)
    assert got["experts"] >= 512 * MIB
    assert got["budget"] == 64 * MIB
    assert got["evictions"] > 0

    # llama.cpp maps the file populated: opening raised RSS by all of it. It is given back.
    assert got["released"] >= 0.95 * got["experts"]
    assert got["mapped_after_open"] <= got["dense"] + 2 * MIB
    assert got["mapped_after_run"] <= got["dense"] + 2 * MIB
    assert got["opened"] - got["before"] < got["dense"] + 64 * MIB

    # A wide micro-batch asks one layer for more than the budget; a narrow one never does.
    assert (got["widest"] > got["budget"]) == (n_ubatch == 64)
    n_ctx = 256
    kv = 4 * n_ctx * 2 * 2 * 64 * 2  # layers, positions, keys and values, heads, width, float16
    logits = n_ubatch * got["n_vocab"] * 4
    # Activations of one micro-batch: the widest are the experts' (slots, width) and the scores of
    # attention (heads, positions).
    compute = n_ubatch * (4 * 1344 * 4 + 8 * n_ctx + 16 * 512) * 4
    lanes = 4 * 4 * MIB
    bound = max(got["budget"], got["widest"]) + got["dense"] + kv + compute + logits + lanes
    growth = got["peak"] - got["before"]
    assert growth <= bound + 64 * MIB
    # The bound means something: it is far from the model's size.
    assert growth < got["experts"] / 2
