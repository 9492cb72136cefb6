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
# # How do other tools read a trace, and what does each format lose?
#
# A trace is a plain xarray Dataset. This notebook writes one to netCDF, Zarr, Parquet and two CSV
# formats of other engines, reads each back with plain xarray, pandas and polars, and checks that the
# numbers are equal. Everything goes to a temporary folder.

# %%
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import xarray as xr

import bmoe_lab as bl

with bl.Session(bl.datasets.demo_model(), cache="2 MiB", n_threads=1) as session:
    trace = session.generate("In the beginning", n_predict=48, record="scores").trace
temporary = tempfile.TemporaryDirectory()
folder = Path(temporary.name)
trace

# %% [markdown]
# ## netCDF and Zarr: everything
#
# `save_trace` writes aside, reads back, compares bit for bit, then renames. Plain xarray opens what
# it wrote, with all variables, units and attributes.

# %%
bl.save_trace(trace, folder / "trace.nc")
bl.save_trace(trace, folder / "trace.zarr")
plain = {
    "netCDF": xr.open_dataset(folder / "trace.nc", engine="h5netcdf"),
    "Zarr": xr.open_zarr(folder / "trace.zarr", consolidated=False),
}
for name, dataset in plain.items():
    equal = {
        variable: bool(np.array_equal(dataset[variable].values, trace[variable].values))
        for variable in ("expert_chosen", "expert_applied", "action", "residency", "read_bytes")
    }
    print(name, equal)
    assert all(equal.values())
    np.testing.assert_array_equal(dataset.weight_chosen.values, trace.weight_chosen.values)

# %% [markdown]
# `open_trace` gives back the very trace, with the check of the schema:

# %%
for name in ("trace.nc", "trace.zarr"):
    xr.testing.assert_identical(bl.open_trace(folder / name).load(), trace)
    print(name, "identical")
for dataset in plain.values():
    dataset.close()

# %% [markdown]
# ## Parquet: long form, for data frames
#
# One row per token and layer; lists over the slots. pandas and polars need nothing of this package.

# %%
bl.to_parquet(trace, folder / "trace.parquet")
frame = pl.read_parquet(folder / "trace.parquet")
frame.select("token", "layer", "phase", "indices", "scores", "read_bytes").head()

# %% [markdown]
# The misses of each layer, counted three ways: by polars, by pandas, and by the trace.

# %%
by_polars = (
    frame.explode("residency").group_by("layer").agg((pl.col("residency") == 0).sum()).sort("layer")
)["residency"].to_list()
slots = pd.read_parquet(folder / "trace.parquet", columns=["layer", "residency"]).explode(
    "residency"
)
by_pandas = (slots.residency == 0).groupby(slots.layer).sum().tolist()
by_trace = (trace.residency == 0).sum(("token", "slot")).values.tolist()
print(by_polars, by_pandas, by_trace)
assert by_polars == by_pandas == by_trace

# %% [markdown]
# Quantities of a token, such as its wall time, stand in the token's first row only: a sum over the
# rows is right. What is unknown is NaN; polars tells NaN from null and must be told to leave it out.

# %%
print(frame["wall_s"].drop_nans().sum(), float(trace.wall_s.sum()))
xr.testing.assert_identical(bl.from_parquet(folder / "trace.parquet"), trace)
print("from_parquet: identical")

# %% [markdown]
# ## CSV of BigMoeOnEdge
#
# A row per routed expert. What the format has no column for is lost: the text, the router's scores,
# log-probabilities, times, settings.

# %%
bl.to_bigmoeonedge(trace, folder / "trace.route.csv")
routes = pl.read_csv(folder / "trace.route.csv", comment_prefix="#")
routes.head()

# %%
imported = bl.from_bigmoeonedge(folder / "trace.route.csv")
assert (imported.expert_chosen.values == trace.expert_chosen.values).all()
assert (imported.residency.values == trace.residency.values).all()
lost = sorted(set(trace.variables) - set(imported.variables))
print("equal: experts, residency")
print("lost:", ", ".join(lost))
print("bytes read:", int(routes["expert_bytes"].sum()), int(trace.read_bytes.sum()))

# %% [markdown]
# ## CSV of llama.cpp's moe-trace
#
# Layer and expert, nothing else: not even the number of experts, which the reader must be told.

# %%
bl.to_moe_trace(trace, folder / "moe.csv")
bare = bl.from_moe_trace(
    folder / "moe.csv",
    n_expert=trace.attrs["n_expert"],
    n_expert_used=trace.sizes["slot"],
)
assert (bare.expert_chosen.values == trace.expert_chosen.values).all()
print("kept:", ", ".join(sorted(bare.variables)))

# %% [markdown]
# ## Answer

# %%
written = {
    path.name: sum(
        file.stat().st_size
        for file in ([path] if path.is_file() else path.rglob("*"))
        if file.is_file()
    )
    for path in folder.iterdir()
}
readers = {"trace.nc": trace, "trace.zarr": trace, "trace.parquet": trace}
readers |= {"trace.route.csv": imported, "moe.csv": bare}
pd.DataFrame(
    [
        (
            name,
            written[name],
            len(trace.variables) - len(set(trace.variables) & set(read.variables)),
        )
        for name, read in readers.items()
    ],
    columns=["file", "bytes", "variables lost"],
)

# %% [markdown]
# netCDF, Zarr and Parquet give back every bit; the two CSV formats keep what their engines write.
# [docs/formats.md](../docs/formats.md) has the rules, format by format.

# %%
temporary.cleanup()
