"""The residency kernel's signature as a type, so that compiled code can be handed any policy."""

from __future__ import annotations

from numba import types

__all__ = ["KERNEL_TYPE"]

_ints = types.Array(types.int64, 1, "C")
_table = types.Array(types.int64, 2, "C")
_bytes = types.Array(types.uint8, 1, "C")
_bools = types.Array(types.boolean, 1, "C")

#: `ResidencyPolicy.kernel` as a pointer: one caller is compiled once for all policies.
KERNEL_TYPE = types.FunctionType(
    types.int64(
        _ints,  # keys
        _ints,  # offsets
        types.int64,  # begin
        types.int64,  # end
        _ints,  # future
        _ints,  # key_bytes
        types.int64,  # budget
        _ints,  # header
        _table,  # table
        _ints,  # extra
        _bools,  # resident
        _bytes,  # out_residency
        _bools,  # out_first
        _table,  # out_keys
        _table,  # out_loads
    )
)
