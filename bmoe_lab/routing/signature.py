"""The routing kernels' signatures as types, so that compiled code can be handed any policy."""

from __future__ import annotations

from typing import Any

from numba import types

__all__ = ["SELECT_TYPE", "WEIGH_TYPE"]

_ids = types.Array(types.int32, 2, "C")
_floats = types.Array(types.float64, 1, "C")


def _kernel(out: Any) -> Any:
    return types.FunctionType(
        types.int64(
            _ids,  # ids
            types.Array(types.float32, 2, "C"),  # values
            types.Array(types.boolean, 1, "C"),  # resident
            types.Array(types.int32, 1, "C"),  # positions
            types.int64,  # layer
            types.int64,  # seed
            types.boolean,  # log_scores
            _floats,  # parameters
            _floats,  # state
            out,
        )
    )


#: `RoutingPolicy.kernel` of stage "select" as a pointer.
SELECT_TYPE = _kernel(_ids)

#: `RoutingPolicy.kernel` of stage "weigh" as a pointer.
WEIGH_TYPE = _kernel(types.Array(types.boolean, 2, "C"))
