"""Both policies over one stream: what a routing policy changes, the cache sees, and the reverse.

Load by load as in a live session: the routing policy looks at what is resident, the engine
applies its answer, the cache serves what is left. Kernels of both sides run in one compiled loop;
a policy in plain Python is called through the same engine that a session uses.
"""

from __future__ import annotations

from bmoe_lab.residency import KernelState, ResidencyState
from bmoe_lab.routing.base import RoutingPolicy
from bmoe_lab.routing.engine import Engine
from bmoe_lab.simulation.compiled_loop import run_compiled
from bmoe_lab.simulation.python_loop import run_python
from bmoe_lab.simulation.routed import Routed, RoutedRows

__all__ = ["run_coupled"]


def run_coupled(
    rows: RoutedRows, policy: RoutingPolicy, state: ResidencyState | None, *, seed: int
) -> Routed:
    """Pass a stream through a routing policy and a cache.

    Parameters
    ----------
    rows : RoutedRows
        The router's choices.
    policy : RoutingPolicy
        Checked; a clone of it runs.
    state : ResidencyState or None
        The cache in its start state; None if ``rows.recorded`` stands.
    seed : int
        Of policies with random parts.

    Raises
    ------
    PolicyError
        If a policy's answer cannot be applied.
    """
    engine = Engine(policy, seed=seed)
    compiled_routing = engine.policy.uses_kernel(engine.policy.stage) and not (
        engine.selects and engine.weighs
    )
    if compiled_routing and (state is None or isinstance(state, KernelState)):
        return run_compiled(rows, engine, state, seed)
    return run_python(rows, engine, state, seed)
