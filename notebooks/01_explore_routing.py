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
# # What does the router do, and what does it cost to disobey it?
#
# A Mixture-of-Experts layer holds many experts and runs a few of them for each token.
# This notebook streams a small model from disk, looks at which experts its router picks, and asks
# whether the experts that are not in memory can be dropped cheaply.

# %%
import numpy as np

import bmoe_lab as bl

session = bl.Session(bl.datasets.demo_model(), cache="2 MiB", n_threads=1)
session

# %% [markdown]
# ## A lossless run
#
# Nothing changes the routing here, so the logits equal those of plain llama.cpp bit for bit.
# `record="scores"` keeps what the router scored for every expert, not only for the chosen ones.

# %%
run = session.generate("In the beginning", n_predict=64, record="scores")
run

# %% [markdown]
# The same as something to watch: change the prompt or the policy, run, stop. The run goes on in a
# thread; `live.trace` is what it recorded.

# %%
live = bl.widgets.LiveRun(session)
live

# %% [markdown]
# The trace is an xarray Dataset: one row per routed token, one column per expert layer, one slot per
# expert used. What the router chose and what ran are kept apart; in a lossless run they are equal.

# %%
run.trace

# %% [markdown]
# ## Look around
#
# Zoom into the map, choose what a cell shows, click on a cell for its slots and on a slot for the use
# of that expert. Below are the same figures one by one.

# %%
bl.widgets.RouteExplorer(run.trace)

# %% [markdown]
# ## Is there a hot set?
#
# If a few experts of a layer served most tokens, a small cache would do.

# %%
run.trace.moe.plot.heatmap()

# %%
run.trace.moe.plot.expert_load()

# %% [markdown]
# Consecutive tokens share experts, more in some layers than in others. Random choice would share
# `k / n_expert` of them.

# %%
overlap = run.trace.moe.consecutive_overlap(by="layer")
overlap.to_series().round(3)

# %% [markdown]
# ## Which layers miss?
#
# A cache smaller than what one token asks for hits nothing under LRU. This one holds about twice that.

# %%
print(
    f"cache {session.cache_budget_bytes / 2**20:.1f} MiB, "
    f"one token asks for {session.token_cycle_bytes / 2**20:.2f} MiB"
)
run.trace.moe.plot.hit_rate()

# %% [markdown]
# ## What does it cost to drop the experts that are not in memory?
#
# Quality is priced by the model, token by token, on text it has not seen: `compare` runs lossless
# first and reads the same tokens under each policy. Every policy has a control that changes as many
# slots at random; a policy is worth something if it beats its control.

# %%
text = bl.datasets.heldout("kjv")[0].text[:900]
tree = bl.compare(
    session,
    text,
    policies=[bl.routing.DropCold(0.75), bl.routing.CachePrior(0.15)],
    controls=True,
    progress=False,
)
columns = [
    "perplexity",
    "delta_nll",
    "delta_nll_low",
    "delta_nll_high",
    "kl_mean",
    "hit_rate",
    "read_bytes_per_token",
]
tree.moe.table()[columns].round(4)

# %%
tree.moe.plot.quality_vs_bytes()

# %% [markdown]
# ## Your own policy
#
# Ten lines: keep the two best experts of each routing, and of the others only those in memory.


# %%
class TwoThenResident(bl.routing.RoutingPolicy):
    needs = frozenset({"cache"})

    def __init__(self, n_sure=2):
        self.n_sure = n_sure

    def weigh(self, routing):
        drop = ~routing.resident[routing.ids]
        drop[:, : self.n_sure] = False
        return drop


mine = session.score(text, policy=TwoThenResident())
mine

# %% [markdown]
# ## Answer

# %%
quarter = run.trace.attrs["n_expert"] // 4
shares = np.sort(run.trace.moe.expert_load().values, axis=1)[:, -quarter:].sum(axis=1)
table = tree.moe.table()
paid = table[table.arm_kind == "policy"]
saved = 1 - paid.read_bytes_per_token / table.read_bytes_per_token["lossless"]
print(f"a layer's {quarter} most used experts serve {shares.min():.0%} to {shares.max():.0%} of it")
print(
    f"a token shares {float(overlap.min()):.0%} to {float(overlap.max()):.0%} with the one before"
)
for name, row in paid.iterrows():
    print(f"{name}: reads {saved[name]:.0%} less for {row.delta_nll:+.4f} nat per token")
for line in bl.tables.control_lines(tree):
    print(line)

# %% [markdown]
# Layers differ: where a few experts serve most of a layer there is something to pin, elsewhere what
# helps is that consecutive tokens share experts. Dropping cold experts saves reads at a price, and
# the line about its control says whether the choice of slots is better than dice. All of this is one
# short text of one small model.
#
# The widgets need the session open, so it stays open here; `session.close()` ends it.
