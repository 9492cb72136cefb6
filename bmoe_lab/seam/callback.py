"""The eval callback: a native filter that calls Python only for the nodes wanted.

llama.cpp offers every node of a graph (about 3,000 a token on a 48-layer model) twice, so the
filter is compiled. It answers from a hash table of (op, name) pairs; for the few nodes in the
table it calls one Python function. A second compiled function is the abort callback, polled per
node, which reads a flag. Both reach their state through ``user_data`` only, so that the compiled
code can be cached on disk.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, types
from numba.extending import intrinsic

from bmoe_lab.errors import SeamError
from bmoe_lab.kernels import compiled
from bmoe_lab.seam import library as lib
from bmoe_lab.seam.tensors import N_WORDS, WORD_OP, WORD_SRC, as_pointer

__all__ = ["CAPTURE", "FILTER", "PASS", "NodeFilter"]

#: What the filter does: nothing, keep the address of every node, or call Python for known nodes.
PASS, CAPTURE, FILTER = 0, 1, 2

# Words of the state that ``user_data`` points to.
_MODE, _PYTHON, _TABLE, _MASK, _ABORT, _NODES, _CAPACITY, _COUNT, _MATMULS, _MATMUL_OP = range(10)
_N_STATE = 10
# Words of a table row: hash of (op, name), hops to the named ancestor, entry, enabled, and the
# address of that node in the graph being evaluated.
_HASH, _HOPS, _ENTRY, _ENABLED, _ADDRESS = range(5)
_ROW = 5
_MAX_HOPS = 4
_MAX_NODES = 1 << 16

_VOID_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)


@intrinsic
def _call(typingctx: Any, function: Any, tensor: Any, entry: Any) -> Any:
    """Call a C function by its address: ``void f(void *, int64_t)``."""
    signature = types.int64(types.int64, types.voidptr, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), ir.IntType(64)])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1], args[2]])
        return ir.Constant(ir.IntType(64), 0)

    return signature, codegen


@compiled
def _hash_name(tensor: int, op: int) -> int:
    """FNV-1a over the name up to its NUL (what follows is left from earlier names), and the op."""
    name = carray(as_pointer(tensor + lib.OFF_NAME), lib.NAME_BYTES, dtype=np.uint8)
    value = np.uint64(0xCBF29CE484222325) ^ np.uint64(op)
    for i in range(lib.NAME_BYTES):
        if name[i] == 0:
            break
        value = (value ^ np.uint64(name[i])) * np.uint64(0x100000001B3)
    value ^= value >> np.uint64(29)
    return int(value & np.uint64(0x7FFFFFFFFFFFFFFF))


@compiled
def _find(tensor: int, op: int, table: np.ndarray, mask: int) -> int:
    """Return the table row of this node, or -1."""
    ancestor = tensor
    for hops in range(_MAX_HOPS):
        hashed = _hash_name(ancestor, op)
        row = hashed & mask
        while table[row, _ENTRY] >= 0:
            if table[row, _HASH] == hashed and table[row, _HOPS] == hops:
                return row
            row = (row + 1) & mask
        ancestor = carray(as_pointer(ancestor), N_WORDS, dtype=np.int64)[WORD_SRC]
        if ancestor == 0:
            break
    return -1


@intrinsic
def _as_int(typingctx: Any, pointer: Any) -> Any:
    """Turn a pointer into an integer address, inside compiled code."""
    signature = types.int64(types.voidptr)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], ir.IntType(64))

    return signature, codegen


@cfunc(types.uint8(types.voidptr, types.uint8, types.voidptr), cache=True)
def _on_node(tensor: Any, ask: Any, user_data: Any) -> Any:
    state = carray(user_data, _N_STATE, dtype=np.int64)
    mode = state[_MODE]
    if mode == 0:
        return np.uint8(0)
    address = _as_int(tensor)
    op = carray(tensor, N_WORDS, dtype=np.int64)[WORD_OP] & 0xFFFFFFFF
    if mode == 1:
        if ask:
            if state[_COUNT] < state[_CAPACITY]:
                nodes = carray(as_pointer(state[_NODES]), state[_CAPACITY], dtype=np.int64)
                nodes[state[_COUNT]] = address
            state[_COUNT] += 1
            return np.uint8(0)
        return np.uint8(1)
    if ask and op == state[_MATMUL_OP]:
        state[_MATMULS] += 1
    ops = carray(as_pointer(state[_TABLE]), 4, dtype=np.int64)
    if op >= 256 or (ops[op >> 6] >> (op & 63)) & 1 == 0:
        return np.uint8(0)
    rows = state[_MASK] + 1
    table = carray(as_pointer(state[_TABLE] + 32), (rows, _ROW), dtype=np.int64)
    row = _find(address, op, table, state[_MASK])
    if row < 0:
        return np.uint8(0)
    if ask:
        table[row, _ADDRESS] = address
    if table[row, _ENABLED] == 0:
        return np.uint8(0)
    if not ask:
        _call(state[_PYTHON], tensor, table[row, _ENTRY])
    # Never False after a node: llama_decode would then report success with wrong logits.
    return np.uint8(1)


@cfunc(types.uint8(types.voidptr), cache=True)
def _should_abort(user_data: Any) -> Any:
    state = carray(user_data, _N_STATE, dtype=np.int64)
    return np.uint8(carray(as_pointer(state[_ABORT]), 1, dtype=np.int64)[0] != 0)


class NodeFilter:
    """State behind the native callbacks of one context; keeps everything that C points to.

    Parameters
    ----------
    handler : callable
        ``handler(tensor_address, entry)``, called with the GIL on the thread that decodes, after
        the node has been computed. It must not raise; what it raises is stored in `failure` and
        the evaluation aborted.
    """

    def __init__(self, handler: Callable[[int, int], None]) -> None:
        self.failure: BaseException | None = None
        self._handler = handler
        self._python = _VOID_FUNCTION(self._guarded)
        self._abort = np.zeros(1, np.int64)
        self._nodes = np.zeros(_MAX_NODES, np.int64)
        self._state = np.zeros(_N_STATE, np.int64)
        self._state[_PYTHON] = ctypes.cast(self._python, ctypes.c_void_p).value or 0
        self._state[_ABORT] = self._abort.__array_interface__["data"][0]
        self._state[_NODES] = self._nodes.__array_interface__["data"][0]
        self._state[_CAPACITY] = _MAX_NODES
        self._keys: list[tuple[int, str, int]] = []
        self._rows: np.ndarray = np.zeros(0, np.int64)
        self._memory: np.ndarray
        self.set_table([], matmul_op=-1)

    def _guarded(self, tensor: int, entry: int) -> None:
        # ctypes prints what a callback raises and goes on; so it is kept for after the decode.
        try:
            self._handler(tensor, entry)
        except BaseException as error:
            if self.failure is None:
                self.failure = error
            self.abort()

    @property
    def callback_address(self) -> int:
        """Address of ``bool f(ggml_tensor *, bool ask, void * user_data)``."""
        return int(_on_node.address)

    @property
    def abort_address(self) -> int:
        """Address of ``bool f(void * user_data)``."""
        return int(_should_abort.address)

    @property
    def user_data(self) -> int:
        """Address of the state that both callbacks take."""
        return int(self._state.__array_interface__["data"][0])

    @property
    def n_matmuls(self) -> int:
        """Expert matmuls offered since the last :meth:`begin`."""
        return int(self._state[_MATMULS])

    def set_table(self, keys: list[tuple[int, str, int]], *, matmul_op: int) -> None:
        """Set the nodes to know: (op, name, hops to the named ancestor) by entry number."""
        size = 8
        while size < 4 * len(keys):
            size *= 2
        # One block: 4 words of op bits, then the table; the callback gets a single address.
        self._memory = np.zeros(4 + size * _ROW, np.int64)
        ops, table = self._memory[:4], self._memory[4:].reshape(size, _ROW)
        table[:, _ENTRY] = -1
        self._rows = np.zeros(len(keys), np.int64)
        probe = np.zeros(lib.TENSOR_BYTES, np.uint8)
        for entry, (op, name, hops) in enumerate(keys):
            encoded = name.encode()
            if not (0 <= op < 256 and hops < _MAX_HOPS and len(encoded) < lib.NAME_BYTES):
                raise SeamError(f"node must have op < 256 and a short name; got {op}, {name!r}.")
            ops.view(np.uint64)[op >> 6] |= np.uint64(1 << (op & 63))
            probe[lib.OFF_NAME :] = 0
            probe[lib.OFF_NAME : lib.OFF_NAME + len(encoded)] = np.frombuffer(encoded, np.uint8)
            hashed = _hash_name(probe.__array_interface__["data"][0], op)
            row = hashed & (size - 1)
            while table[row, _ENTRY] >= 0:
                if table[row, _HASH] == hashed and table[row, _HOPS] == hops:
                    raise SeamError(f"node names must be told apart; got {name!r} twice.")
                row = (row + 1) & (size - 1)
            table[row] = hashed, hops, entry, 0, 0
            self._rows[entry] = row
        self._keys = list(keys)
        self._state[_MODE] = PASS
        self._state[_TABLE] = self._memory.__array_interface__["data"][0]
        self._state[_MASK] = size - 1
        self._state[_MATMUL_OP] = matmul_op

    def enable(self, entries: list[int]) -> None:
        """Choose the entries for which Python is called; each costs a barrier per evaluation."""
        table = self._memory[4:].reshape(-1, _ROW)
        table[:, _ENABLED] = 0
        table[self._rows[np.asarray(entries, np.int64)], _ENABLED] = 1

    def address(self, entry: int) -> int:
        """Return the address of a known node in the graph being evaluated.

        Nodes are offered in order, so inside the handler of one node every earlier one is known,
        enabled or not.
        """
        return int(self._memory[4 + self._rows[entry] * _ROW + _ADDRESS])

    def begin(self, mode: int) -> None:
        """Prepare for one evaluation."""
        self.failure = None
        self._abort[0] = 0
        self._state[_COUNT] = 0
        self._state[_MATMULS] = 0
        self._state[_MODE] = mode

    def abort(self) -> None:
        """Make the running evaluation stop at the next node; may be called from any thread."""
        self._abort[0] = 1

    @property
    def aborted(self) -> bool:
        """Whether :meth:`abort` was called since the last :meth:`begin`."""
        return bool(self._abort[0])

    def captured(self) -> np.ndarray:
        """Return the node addresses kept in capture mode, int64 of shape (node,)."""
        count = int(self._state[_COUNT])
        if count > _MAX_NODES:
            raise SeamError(f"graph must have at most {_MAX_NODES} nodes; got {count}.")
        return self._nodes[:count].copy()
