"""From the nodes of one graph to its expert layers, by following the data.

No model or node names are known here. A ``MUL_MAT_ID`` node names its expert stack and its ids;
from there the edges of the graph lead to the tensor that was sorted and to the weights that
multiply the experts' output (or their input). What cannot be followed with certainty is marked
as not editable, with the reason; what could be confused is an error.
"""

from __future__ import annotations

import ctypes
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from bmoe_lab.errors import ModelFileError, SeamError
from bmoe_lab.seam.library import OFF_OP
from bmoe_lab.seam.tensors import Tensor, describe

__all__ = ["ExpertGraph", "ExpertLayer", "Stack", "capture_graph"]

_VIEWS = ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")
_SORTS = ("ARGSORT", "TOP_K")
_BLOCK = re.compile(r"blk\.(\d+)\.")
_UNNAMED = re.compile(r"(node|leaf)_\d+")


@dataclass(frozen=True)
class NodeKey:
    """How a node is recognised in every graph of the model: op, name, hops to that name."""

    op: int
    name: str
    hops: int


@dataclass(frozen=True)
class Stack:
    """One tensor that holds a matrix for each expert of a layer."""

    name: str
    address: int
    data: int
    n_expert: int
    slice_bytes: int
    n_bytes: int


@dataclass(frozen=True)
class ExpertLayer:
    """A group of expert stacks that share one routing.

    Attributes
    ----------
    index, block, group : int
        Running number; block of the model; 0, or 1 for a second group of that block.
    stacks : tuple of Stack
        In the order in which the graph reads them.
    n_expert, n_used : int
    ids : NodeKey
        The node after which the chosen experts can be read and rewritten.
    sorted_address : int
        The tensor that was sorted to choose (address in the captured graph only), 0 unknown.
    sorted_hops : int
        How many ``src[0]`` steps lead from the ids node to it; -1 unknown.
    score_kind : {"softmax", "other"}
    weights : NodeKey or None
        The node after which the final weights can be read and rewritten.
    weights_before_experts : bool
        Whether that node comes before the first expert matmul, so that a dropped expert
        need not be read.
    why_not_select, why_not_weigh : str
        Empty, or why ids or weights of this layer cannot be edited.
    """

    index: int
    block: int
    group: int
    stacks: tuple[Stack, ...]
    n_expert: int
    n_used: int
    ids: NodeKey
    sorted_address: int
    sorted_hops: int
    score_kind: Literal["softmax", "other"]
    weights: NodeKey | None
    weights_before_experts: bool
    why_not_select: str
    why_not_weigh: str

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert: the sum over its stacks."""
        return sum(stack.slice_bytes for stack in self.stacks)


@dataclass(frozen=True)
class ExpertGraph:
    """What the capture found.

    Attributes
    ----------
    layers : tuple of ExpertLayer
    n_matmuls : int
        ``MUL_MAT_ID`` nodes in the graph; every evaluation must offer as many.
    matmul_op : int
    weights : tuple of Tensor
        Every given tensor that the graph reads and that is not an expert stack.
    n_nodes : int
    """

    layers: tuple[ExpertLayer, ...]
    n_matmuls: int
    matmul_op: int
    weights: tuple[Tensor, ...]
    n_nodes: int


@dataclass
class _Graph:
    """The captured nodes with their edges."""

    order: list[Tensor]
    by_address: dict[int, Tensor]
    index: dict[int, int]
    consumers: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    op_codes: dict[str, int] = field(default_factory=dict)

    def source(self, tensor: Tensor, i: int = 0) -> Tensor | None:
        address = tensor.src[i]
        return self.by_address.get(address) if address else None

    def through_views(self, tensor: Tensor) -> Tensor:
        """Follow views to the tensor that owns the data."""
        while tensor.op in _VIEWS:
            source = self.source(tensor)
            if source is None:
                break
            tensor = source
        return tensor

    def readers(self, tensor: Tensor) -> list[Tensor]:
        """Return the computing nodes that read `tensor`, through views."""
        found = []
        for consumer in self.consumers[tensor.address]:
            if consumer.op in _VIEWS:
                found += self.readers(consumer)
            else:
                found.append(consumer)
        return found


def capture_graph(addresses: np.ndarray) -> ExpertGraph:
    """Return the expert layers of the graph whose node addresses are given.

    Parameters
    ----------
    addresses : ndarray
        int64 of shape (node,), in the order in which they are computed.

    Raises
    ------
    ModelFileError
        If there is no expert layer: the model is dense.
    SeamError
        If a layer cannot be told apart from another.
    """
    graph = _read(addresses)
    groups: dict[int, list[Tensor]] = {}
    for node in graph.order:
        if node.op == "MUL_MAT_ID":
            groups.setdefault(node.src[2], []).append(node)
    if not groups:
        raise ModelFileError(
            "model must be a Mixture-of-Experts model; got a graph without expert matmuls "
            "(a dense model). Nothing in it can be streamed."
        )
    names = _NameIndex(graph)
    layers: list[ExpertLayer] = []
    per_block: dict[int, int] = defaultdict(int)
    for ids_address, matmuls in groups.items():
        layer = _layer(graph, names, len(layers), graph.by_address[ids_address], matmuls)
        per_block[layer.block] += 1
        layers.append(replace(layer, group=per_block[layer.block] - 1))
    stacks = {stack.address for layer in layers for stack in layer.stacks}
    n_stacks = sum(len(layer.stacks) for layer in layers)
    if len(stacks) != n_stacks:
        raise SeamError(
            f"every expert stack must belong to one routing; got {n_stacks - len(stacks)} shared."
        )
    weights = tuple(
        tensor
        for address, tensor in graph.by_address.items()
        if tensor.is_leaf and tensor.data and address not in stacks
    )
    matmuls_all = [node for node in graph.order if node.op == "MUL_MAT_ID"]
    return ExpertGraph(
        layers=tuple(layers),
        n_matmuls=len(matmuls_all),
        matmul_op=graph.op_codes["MUL_MAT_ID"],
        weights=weights,
        n_nodes=len(graph.order),
    )


def _read(addresses: np.ndarray) -> _Graph:
    order = [describe(int(address)) for address in addresses]
    graph = _Graph(
        order, {t.address: t for t in order}, {t.address: i for i, t in enumerate(order)}
    )
    for node in order:
        graph.op_codes[node.op] = ctypes.c_int32.from_address(node.address + OFF_OP).value
        for address in node.src:
            if not address:
                continue
            if address not in graph.by_address:
                # Not offered as a node: a weight, an input or a state tensor (or a view of one).
                leaf = describe(address)
                graph.by_address[address] = leaf
            graph.consumers[address].append(node)
    return graph


class _NameIndex:
    """Which (op, name, hops) identify one node only."""

    def __init__(self, graph: _Graph) -> None:
        self._graph = graph
        self._count: dict[tuple[str, str, int], int] = defaultdict(int)
        for node in graph.order:
            for hops, ancestor in enumerate(self._ancestors(node)):
                self._count[node.op, ancestor.name, hops] += 1

    def _ancestors(self, node: Tensor) -> list[Tensor]:
        chain = [node]
        while len(chain) < 4:
            source = self._graph.source(chain[-1])
            if source is None:
                break
            chain.append(source)
        return chain

    def key(self, node: Tensor) -> NodeKey:
        """Return the nearest name that tells `node` apart.

        Names that ggml makes up count the nodes before them, so they differ between graphs.
        """
        for hops, ancestor in enumerate(self._ancestors(node)):
            unnamed = not ancestor.name or _UNNAMED.match(ancestor.name)
            if not unnamed and self._count[node.op, ancestor.name, hops] == 1:
                return NodeKey(self._graph.op_codes[node.op], ancestor.name, hops)
        raise SeamError(
            f"routing nodes must be told apart by op and name; got {node.op} {node.name!r} more "
            "than once. This model's graph cannot be streamed."
        )


def _layer(
    graph: _Graph, names: _NameIndex, index: int, ids: Tensor, matmuls: list[Tensor]
) -> ExpertLayer:
    stacks = tuple(_stack(graph, node) for node in matmuls)
    n_expert = stacks[0].n_expert
    if any(stack.n_expert != n_expert for stack in stacks):
        raise SeamError(
            f"stacks of one routing must hold the same number of experts; got "
            f"{[(stack.name, stack.n_expert) for stack in stacks]}."
        )
    match = _BLOCK.search(stacks[0].name)
    first = min(graph.index[node.address] for node in matmuls)

    sorted_tensor, hops, why_not_select = _sorted(graph, ids)
    weights, why_not_weigh = _weights(graph, matmuls, ids)
    early = weights is not None and graph.index[weights.address] < first
    if weights is not None and not early and not why_not_weigh:
        why_not_weigh = "its weights are computed after the experts"
    score_kind: Literal["softmax", "other"] = "other"
    if sorted_tensor is not None:
        score_kind = "softmax" if graph.through_views(sorted_tensor).op == "SOFT_MAX" else "other"
    return ExpertLayer(
        index=index,
        block=int(match[1]) if match else index,
        group=0,
        stacks=stacks,
        n_expert=n_expert,
        n_used=ids.ne[0],
        ids=names.key(ids),
        sorted_address=sorted_tensor.address if sorted_tensor else 0,
        sorted_hops=hops,
        score_kind=score_kind,
        weights=names.key(weights) if weights is not None else None,
        weights_before_experts=early,
        why_not_select=why_not_select,
        why_not_weigh=why_not_weigh,
    )


def _stack(graph: _Graph, matmul: Tensor) -> Stack:
    tensor = graph.by_address[matmul.src[0]]
    if not tensor.is_leaf or not tensor.data:
        raise SeamError(
            f"an expert stack must be a weight of the file; got {tensor.op} {tensor.name!r}."
        )
    return Stack(
        name=tensor.name,
        address=tensor.address,
        data=tensor.data,
        n_expert=tensor.ne[2],
        slice_bytes=tensor.nb[2],
        n_bytes=tensor.n_bytes,
    )


def _sorted(graph: _Graph, ids: Tensor) -> tuple[Tensor | None, int, str]:
    """Return what was sorted to get `ids`, the hops to it, and why ids cannot be edited."""
    node, hops = ids, 0
    while node.op in _VIEWS:
        source = graph.source(node)
        if source is None:
            return None, -1, "its ids are not computed in the graph"
        node, hops = source, hops + 1
    if node.op not in _SORTS:
        return None, -1, f"its ids come from {node.op}, not from a sort"
    between = graph.order[graph.index[node.address] + 1 : graph.index[ids.address]]
    if any(other.op not in _VIEWS for other in between):
        # A node computed in between may have reused the memory of what was sorted.
        return None, -1, "other nodes are computed between its sort and its ids"
    scores = graph.source(node)
    if scores is None or scores.type != 0:
        return None, -1, "what it sorts is not a float32 tensor"
    return scores, hops + 1, ""


def _weights(graph: _Graph, matmuls: list[Tensor], ids: Tensor) -> tuple[Tensor | None, str]:
    """Return the tensor that multiplies the experts' output or input, and why not editable."""
    shape = (1, ids.ne[0], ids.ne[1], 1)
    candidates: list[tuple[Tensor, Tensor]] = []
    # After the experts: from the outputs of the last matmul downwards ...
    frontier, seen = [matmuls[-1]], set()
    while frontier:
        node = frontier.pop()
        for reader in graph.readers(node):
            if reader.address in seen or reader.op not in ("MUL", "ADD_ID", "ADD", "SCALE"):
                continue
            seen.add(reader.address)
            factor = _factor(graph, reader, shape)
            if factor is not None:
                candidates.append((factor, reader))
            else:
                frontier.append(reader)
    # ... or before them: a product that is the input of the first one.
    if not candidates:
        inputs = graph.by_address.get(matmuls[0].src[1])
        product = graph.through_views(inputs) if inputs is not None else None
        if product is not None and product.op == "MUL":
            factor = _factor(graph, product, shape)
            if factor is not None:
                candidates.append((factor, product))
    routed = [(w, user) for w, user in candidates if _is_routed(graph, w, set())]
    if len({w.address for w, _ in routed}) != 1:
        return None, f"its weights were found {len(routed)} times in the graph, not once"
    weights, user = routed[0]
    if weights.address not in graph.index:
        return None, "its weights are not computed in the graph"
    owner = graph.through_views(weights)
    readers = {reader.address for reader in graph.readers(owner)}
    if readers - {user.address}:
        return weights, "its weights are read by other nodes too"
    return weights, ""


def _factor(graph: _Graph, node: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Return the operand of a product that has one number per routed slot."""
    if node.op != "MUL":
        return None
    for i in (1, 0):
        operand = graph.source(node, i)
        fits = operand is not None and operand.ne == shape and operand.type == 0
        if operand is not None and fits and _is_routed(graph, operand, set()):
            return operand
    return None


def _is_routed(graph: _Graph, tensor: Tensor, seen: set[int]) -> bool:
    """Whether `tensor` descends from a computed value other than through the rows looked up.

    A scale stored per expert is looked up by the ids as well, but the table that it comes from
    is a weight; the router's weights come from values computed for this token.
    """
    if tensor.address in seen:
        return False
    seen.add(tensor.address)
    if tensor.is_leaf:
        return False
    if tensor.op not in (*_VIEWS, "GET_ROWS", "REPEAT", "CONT", "CPY"):
        return True
    source = graph.source(tensor)
    return source is not None and _is_routed(graph, source, seen)
