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
# # How large must the cache be for your model?
#
# Everything that depends on the model stands in the next cell. Set the environment variable
# `BMOE_LAB_MODEL` to a GGUF file with Mixture-of-Experts layers (of a split model its first file), or
# edit the cell; without it the bundled demo model is used.

# %%
import os

import bmoe_lab as bl

model = os.environ.get("BMOE_LAB_MODEL") or bl.datasets.demo_model()
cache = "auto"
prompt = "In the beginning God created the heaven and the earth."
n_predict = 96
n_threads = 1

# %% [markdown]
# ## What the model asks for
#
# Nothing is told in advance: one graph evaluation shows which layers route, and the file says how
# large their experts are.

# %%
session = bl.Session(model, cache=cache, n_threads=n_threads)
info = session.info()
{key: info[key] for key in ("model", "arch", "n_layer", "n_expert", "n_expert_used")}

# %% [markdown]
# ## The cliff
#
# A token asks each layer for its experts in turn. A cache that cannot hold one token's experts has
# thrown out the first layer's by the time the next token asks for them: under LRU it hits nothing.

# %%
mib = 2**20
cycle, total = info["token_cycle_bytes"], info["expert_bytes_total"]
print(f"one token asks for  {cycle / mib:10.2f} MiB: an LRU cache below this hits nothing")
print(f"all experts         {total / mib:10.2f} MiB: a cache of this size reads each at most once")
print(f"everything else     {info['dense_bytes_total'] / mib:10.2f} MiB")
print(f"cache of this run   {session.cache_budget_bytes / mib:10.2f} MiB")

# %% [markdown]
# ## A run

# %%
run = session.generate(prompt, n_predict=n_predict)
session.close()
run

# %%
run.trace.moe.plot.heatmap()

# %% [markdown]
# ## Any other cache, without running again
#
# The recorded routing is replayed through caches of many sizes. Two of the curves are bounds: Belady
# knows the future, the stationary oracle knows the best fixed set of experts.

# %%
sizes = bl.budgets(run.trace, n=14)
grid = bl.sweep(
    {"run": run.trace},
    residency=["lru", "s3fifo", "lfu", "belady", "stationary_oracle"],
    budgets=sizes,
    progress=False,
)
grid.moe.plot.budget_curve()

# %% [markdown]
# ## What the budget should be
#
# The smallest cache of the sweep that hits nine parts in ten of what LRU can hit at all: beyond it
# memory buys little.

# %%
lru = grid.hit_rate_decode.sel(trace="run", routing="none", residency="lru")
enough = lru.budget[(lru >= 0.9 * lru.max()).values].min()
rate = float(lru.sel(budget=enough))
reads = grid.read_bytes_decode.sel(trace="run", routing="none", residency="lru", budget=enough)
print(
    f"budget {int(enough) / mib:.2f} MiB: hit rate {rate:.1%}, {int(enough) / cycle:.1f} token cycles"
)
print(f"of a possible {float(lru.max()):.1%} at {int(lru.budget.max()) / mib:.2f} MiB")
print(f"expert bytes read for the decode: {float(reads) / mib:.2f} MiB")

# %%
run.trace.moe.diagnose(budget=int(enough))

# %% [markdown]
# ## Answer
#
# `diagnose` says what kind of locality there is: a hot set, which a frequency policy can keep, or
# recency, which LRU already uses. The budget above holds for this text and length: a longer run
# touches more experts, so repeat it with a prompt like those you mean to serve.
