"""Several queues over the same keys in one flat array: unlink and push without a branch.

Each queue is a ring closed by an anchor, a node behind the keys: queue q of n keys is anchored at
node ``n + q``. A key is in at most one queue. ``links[2 * node]`` is the neighbour towards the
newest end and ``links[2 * node + 1]`` the one towards the oldest, so an anchor's two neighbours
are the oldest and the newest of its queue. A policy keeps the links in ``extra``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bmoe_lab.kernels import compiled

__all__ = [
    "close_queues",
    "fill_queue",
    "keys_of_queue",
    "n_links",
    "newer",
    "oldest",
    "push_newest",
    "unlink",
]

IntArray = npt.NDArray[np.int64]


def n_links(n_key: int, n_queue: int) -> int:
    """Return the length of the array that holds `n_queue` queues of `n_key` keys."""
    return 2 * (n_key + n_queue)


def close_queues(links: IntArray, n_key: int, n_queue: int) -> None:
    """Make `n_queue` empty queues."""
    for anchor in range(n_key, n_key + n_queue):
        links[2 * anchor : 2 * anchor + 2] = anchor


def keys_of_queue(links: IntArray, anchor: int) -> IntArray:
    """Return a queue's keys, oldest first."""
    # A key is in a queue at most once, so no queue is longer than all nodes.
    out = np.empty(links.size // 2, dtype=np.int64)
    return out[: _walk(links, anchor, out)].copy()


@compiled
def oldest(links: IntArray, anchor: int) -> int:
    """Return the oldest key; the anchor itself if the queue is empty."""
    return links[2 * anchor]  # type: ignore[no-any-return]


@compiled
def newer(links: IntArray, node: int) -> int:
    """Return the next key towards the newest; the anchor after the newest."""
    return links[2 * node]  # type: ignore[no-any-return]


@compiled
def unlink(links: IntArray, key: int) -> None:
    """Take `key` out of its queue."""
    to_newest = links[2 * key]
    to_oldest = links[2 * key + 1]
    links[2 * to_newest + 1] = to_oldest
    links[2 * to_oldest] = to_newest


@compiled
def push_newest(links: IntArray, anchor: int, key: int) -> None:
    """Make `key`, which is in no queue, the newest of one."""
    last = links[2 * anchor + 1]
    links[2 * key] = anchor
    links[2 * key + 1] = last
    links[2 * last] = key
    links[2 * anchor + 1] = key


@compiled
def fill_queue(links: IntArray, anchor: int, keys: IntArray) -> None:
    """Push `keys`, none of which is in a queue, oldest first."""
    for i in range(keys.size):
        push_newest(links, anchor, keys[i])


@compiled
def _walk(links: IntArray, anchor: int, out: IntArray) -> int:
    n = 0
    key = oldest(links, anchor)
    while key != anchor:
        out[n] = key
        n += 1
        key = newer(links, key)
    return n
