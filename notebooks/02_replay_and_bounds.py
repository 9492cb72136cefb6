# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # How much could a better cache gain, and where is the cliff?
#
# A recorded trace holds every expert that a model asked for, in order. That is enough to ask what any
# cache of any size would have done with it, without the model: **replay**. This notebook sweeps cache
# policies over sizes, for a trace recorded here and for one imported from another engine, and draws the
# picture to look at before building anything: LRU, the best online policy, and two bounds that no online
# policy can know.

# %%
import os
import tempfile
from pathlib import Path

import numpy as np

import bmoe_lab as bl

# %% [markdown]
# ## A trace recorded here
#
# The bundled model is small; what is measured here is this model and this text, no more.

# %%
text = "In the beginning God created the heaven and the earth. And the earth was without form."
with bl.Session(bl.datasets.demo_model(), cache="2 MiB", n_threads=1) as session:
    run = session.generate(text, n_predict=160)
demo = run.trace
demo.moe.diagnose()

# %% [markdown]
# ### Replay equals the run
#
# Before believing any simulated number: the recorded cache, replayed, must give the recorded residency,
# row for row, and the same bytes.

# %%
again = bl.replay(demo, residency=bl.residency.LRU("2 MiB"))
rows_equal = bool((again.residency == demo.residency).all())
bytes_equal = bool((again.read_bytes == demo.read_bytes).all())
assert rows_equal
assert bytes_equal
{"rows": demo.residency.size, "residency equal": rows_equal, "bytes equal": bytes_equal}

# %% [markdown]
# ### The central figure
#
# `budgets` chooses sizes from a part of the token cycle up to everything that was touched, closer
# together around the cycle. Below it a global LRU hits nothing: each layer's experts are evicted by the
# layers that follow, before the next token comes back.

# %%
policies = [
    "lru",
    "fifo",
    "clock",
    "sieve",
    "s3fifo",
    "arc",
    "slru",
    "lfu",
    "w_tinylfu",
    "gdsf",
    "least_stale",
    bl.residency.PerLayer(bl.residency.LFU()),
    "belady",
    "stationary_oracle",
]
grid = bl.sweep({"demo": demo}, residency=policies, budgets=bl.budgets(demo, n=20), progress=False)
grid.moe.plot.budget_curve()

# %% [markdown]
# The same numbers as a table. A cell is one replay; dims and units are labelled.

# %%
rates = grid.hit_rate_decode.sel(trace="demo", routing="none")
(100 * rates.to_pandas()).round(1)

# %% [markdown]
# How much of the way from LRU to Belady does the best online policy go?

# %%
online = rates.sel(residency=(rates.online == 1) & (rates.keeps_budget == 1))
lru, belady = rates.sel(residency="lru"), rates.sel(residency="belady")
gap = belady - lru
closed = ((online.max("residency") - lru) / gap).where(gap > 0)
{
    f"{int(size) / 2**20:.2f} MiB": round(float(share), 2)
    for size, share in zip(closed.budget, closed, strict=True)
}

# %% [markdown]
# ## A trace of another engine
#
# BigMoeOnEdge writes its routing as CSV; `from_bigmoeonedge` reads it into the same schema, so
# everything above works on it. Set `BMOE_LAB_ROUTE_CSV` to a file of yours. Without one, this notebook
# writes its own trace in that format and reads it back, to show the way.

# %%
folder = tempfile.TemporaryDirectory()
csv = os.environ.get("BMOE_LAB_ROUTE_CSV")
reference = os.environ.get("BMOE_LAB_REFERENCE_DATA")
if csv is None and reference is not None:
    csv = f"{reference}/bigmoeonedge/2026-07-15-route-trace/qwen.route.csv"
if csv is None:
    csv = bl.to_bigmoeonedge(demo, Path(folder.name) / "demo.route.csv")
imported = bl.from_bigmoeonedge(csv)
folder.cleanup()
imported.attrs["model_name"], dict(imported.sizes), imported.attrs["source"]

# %% [markdown]
# An import knows what its file says and no more: if the file does not tell whether a routing policy acted,
# neither does the trace.

# %%
sizes = bl.budgets(imported, n=20)
bounds = bl.sweep({"imported": imported}, residency=policies, budgets=sizes, progress=False)
bounds.moe.plot.budget_curve()

# %%
cycle = int(imported.moe.token_cycle_bytes())
imported.moe.diagnose(budget=3 * cycle)

# %% [markdown]
# ## What a lossy policy would have read
#
# `DropCold` does without a missing expert of little weight. Replay it over the recorded routing, with the
# cache re-simulated: reads fall, router weight is lost.
#
# This is **open loop**. Dropping changes the hidden states and with them what later layers choose, which
# no replay can know; the result says `counterfactual`. What it costs in quality only the model can say:
# notebook 1 scores it.

# %%
budget = 4 * cycle
lossless = bl.replay(imported, residency="lru", budget=budget)
base = float(lossless.moe.read_bytes_per_token())
for frac in (0.25, 0.5, 0.75, 1.0):
    dropped = bl.replay(imported, residency="lru", budget=budget, routing=bl.routing.DropCold(frac))
    read = float(dropped.moe.read_bytes_per_token())
    lost = float(dropped.moe.weight_discarded_frac())
    print(f"F = {frac:4.2f}: reads avoided {1 - read / base:6.1%}, weight discarded {lost:6.2%}")
dropped.attrs["counterfactual"]

# %% [markdown]
# ### By hand
#
# Policies, budget and parameters as controls: each change replays the trace. *Show code* gives the
# Python that makes the numbers again.

# %%
bl.widgets.PolicyLab(imported)

# %% [markdown]
# The same drops with the recorded residency left standing (static replay) are another estimate: it cannot
# know that a cache which is asked for less also holds something else. The run on the model is the
# measurement.

# %%
if "residency" in imported and (imported.residency == 1).any():
    static = bl.replay(imported, residency="recorded", routing=bl.routing.DropCold(1.0))
    recorded = float(imported.moe.read_bytes_per_token())
    print(
        f"static, F = 1: reads avoided {1 - float(static.moe.read_bytes_per_token()) / recorded:.1%}"
    )

# %% [markdown]
# ## Your own cache policy
#
# Ten lines of Python, checked at every step, and in the same sweep.


# %%
class MostRecent(bl.residency.PlainPolicy):
    """Evict the expert that was used last before this load: good for cycles, bad for hot sets."""

    def __init__(self, budget=None):
        self.budget = budget

    def reset(self, key_bytes, budget_bytes, n_layer):
        self.used_ = np.zeros(len(key_bytes), dtype=np.int64)
        self.clock_ = 0

    def touched(self, key):
        self.clock_ += 1
        self.used_[key] = self.clock_

    def victim(self, evictable):
        return evictable[np.argmax(self.used_[evictable])]


few = bl.budgets(demo, n=6)
own = bl.sweep({"demo": demo}, residency=["lru", MostRecent()], budgets=few, progress=False)
(100 * own.hit_rate_decode.sel(trace="demo", routing="none").to_pandas()).round(1)
