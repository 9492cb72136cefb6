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
# # Does your own routing policy beat chance?
#
# A routing policy decides which of the chosen experts run. This notebook writes one in ten lines,
# checks it with the tests that every policy must pass, replays it over a recorded trace beside
# shipped ones, and then prices it on the model: what it cost, what it saved, and whether a policy
# that changes as many slots at random would have done as well.

# %%
import bmoe_lab as bl

session = bl.Session(bl.datasets.demo_model(), cache="2 MiB", n_threads=1)

# %% [markdown]
# ## Ten lines
#
# Go down the router's order until the experts carry `share` of the routing's weight; those run
# whatever it takes. Of the others only those run that are in memory.
#
# `weigh` is asked once per layer and evaluation and returns which slots to drop, True for drop. A
# policy stores its parameters under their own names and says what it needs. `neutral` is the setting
# that changes nothing.


# %%
class CoverThenResident(bl.routing.RoutingPolicy):
    needs = frozenset({"cache", "weights"})

    def __init__(self, share=0.5):
        self.share = share

    def weigh(self, routing):
        running = routing.weights.cumsum(axis=1)
        sure = running - routing.weights <= self.share * running[:, -1:]
        return ~sure & ~routing.resident[routing.ids]

    def neutral(self):
        return CoverThenResident(1.0)


mine = CoverThenResident(0.5)
mine

# %% [markdown]
# ## The tests that every policy must pass
#
# Distinct experts, no routing emptied, untouched rows bit for bit, the same with any batching and
# after a reset. In a project of yours pytest collects such a class; here its tests are called.


# %%
class TestCoverThenResident(bl.testing.RoutingPolicySuite):
    def make_policy(self):
        return CoverThenResident(0.5)


suite = TestCoverThenResident()
tests = [name for name in dir(suite) if name.startswith("test_")]
for name in tests:
    getattr(suite, name)()
print(f"{len(tests)} tests passed")

# %% [markdown]
# ## Replay: what would it have read?
#
# Recorded routings go through the policy and a simulated cache, in milliseconds and without the
# model. This is **open loop**: what later layers would have chosen after a drop is not known, so the
# results are marked counterfactual, and nothing here says what it costs in quality.

# %%
text = bl.datasets.heldout("kjv")[0].text[:900]
lossless = session.score(text)
policies = [mine, bl.routing.DropCold(0.75), bl.routing.RatioSkip(0.5), bl.routing.TopP(0.8)]
base = float(lossless.trace.moe.read_bytes_per_token())
for policy in policies:
    replayed = bl.replay(lossless.trace, residency="lru", budget="2 MiB", routing=policy)
    read = float(replayed.moe.read_bytes_per_token())
    lost = float(replayed.moe.weight_discarded_frac())
    marked = "counterfactual" if replayed.attrs["counterfactual"] else "as recorded"
    print(f"{policy!s:32} reads avoided {1 - read / base:6.1%}  weight lost {lost:6.1%}  {marked}")

# %% [markdown]
# The same by hand, with your policy in the list and its `share` as a control:

# %%
lab = bl.widgets.PolicyLab(session, policies=[CoverThenResident], text=text)
lab

# %% [markdown]
# ## The price
#
# `compare` reads the same tokens losslessly, then losslessly again (the noise floor: what differs
# between two runs that should be equal), then under each policy, and under a control that changes as
# many slots as the policy did, but at random.

# %%
tree = bl.compare(
    session, text, policies=[mine, bl.routing.DropCold(0.75)], controls=True, progress=False
)
table = tree.moe.table()
columns = ["arm_kind", "perplexity", "delta_nll", "delta_nll_low", "delta_nll_high", "kl_mean"]
table[[*columns, "changed_rate", "weight_discarded_frac", "read_bytes_per_token"]].round(4)

# %%
tree.moe.plot.quality_vs_bytes()

# %% [markdown]
# ## Answer

# %%
own = table.loc[repr(mine)]
floor = table.loc[table.arm_kind == "noise floor"].iloc[0]
plain = table.loc["lossless"]
saved = 1 - own.read_bytes_per_token / plain.read_bytes_per_token
print(f"saved: {saved:.1%} of the bytes read per token")
print(
    f"cost: {own.delta_nll:+.4f} nat per token [{own.delta_nll_low:+.4f}, {own.delta_nll_high:+.4f}]"
)
print(f"noise floor: {floor.delta_nll:+.4f} nat per token")
for line in bl.tables.control_lines(tree):
    print(line)

# %% [markdown]
# The interval of the cost says whether there is one on this text, the line about the control whether
# the policy's choice of slots is worth more than dice. One text of one small model: what holds here
# need not hold on yours.
#
# The widget needs the session open, so it stays open here; `session.close()` ends it.
