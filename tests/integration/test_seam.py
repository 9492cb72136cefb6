"""The seam against the installed llama.cpp: what it relies on is looked at, not assumed."""

import threading

import numpy as np
import pytest

import bmoe_lab as bl
from bmoe_lab.errors import ModelFileError, SeamError, SessionError, SettingsError
from bmoe_lab.seam import library as library_module
from bmoe_lab.seam import tensors
from bmoe_lab.seam.callback import CAPTURE, FILTER, NodeFilter
from bmoe_lab.seam.capture import capture_graph
from bmoe_lab.seam.context import ABORTED, Context, Model
from bmoe_lab.seam.worker import Worker


@pytest.fixture(scope="module")
def opened():
    """Return (model, context, filter, calls) of the demo model."""
    calls = []
    node_filter = NodeFilter(lambda tensor, entry: calls.append((entry, tensors.n_rows(tensor))))
    model = Model(bl.datasets.demo_model())
    context = Context(model, n_ctx=128, n_ubatch=32, n_threads=1, callbacks=node_filter)
    yield model, context, node_filter, calls
    context.close()
    model.close()


@pytest.fixture(scope="module")
def nodes(opened):
    model, context, node_filter, _ = opened
    node_filter.begin(CAPTURE)
    node_filter.abort()
    code = context.decode(np.array([model.bos], np.int32), 0, np.array([True]))
    assert code == ABORTED
    addresses = node_filter.captured()
    context.clear()
    return addresses


def test_library_layout_is_checked_on_live_tensors(monkeypatch):
    lib = library_module.library()
    monkeypatch.setattr(library_module, "OFF_NAME", library_module.OFF_NAME - 8)
    with pytest.raises(SeamError, match=r"other offsets of .*'name'.* 0\.3\.36.*Install"):
        library_module._check_layout(lib.ggml, lib.versions)


def test_library_unknown_parameter_field_is_an_error():
    api = library_module.library().api
    with pytest.raises(SettingsError, match="must have a field 'use_mmap'"):
        library_module.fill_params(api.llama_model_default_params(), use_mmap=True)


def test_capture_touches_no_expert_and_finds_all_layers(nodes):
    graph = capture_graph(nodes)
    assert [layer.block for layer in graph.layers] == list(range(6))
    assert {len(layer.stacks) for layer in graph.layers} == {3}
    assert graph.n_matmuls == 18
    for layer in graph.layers:
        assert (layer.n_expert, layer.n_used) == (32, 4)
        assert layer.score_kind == "softmax"
        assert not layer.why_not_select
        assert not layer.why_not_weigh
        assert layer.weights_before_experts


def test_capture_of_a_graph_without_experts_is_a_dense_model(nodes):
    plain = [a for a in nodes if tensors.describe(int(a)).op != "MUL_MAT_ID"]
    with pytest.raises(ModelFileError, match="Mixture-of-Experts"):
        capture_graph(np.array(plain[:40]))


def test_capture_nodes_that_cannot_be_told_apart_are_an_error(nodes):
    """Never a guess: two routings whose ids carry the same names are refused at open."""
    import ctypes

    graph = capture_graph(nodes)
    by_name = {tensors.describe(int(a)).name: int(a) for a in nodes}
    changed = []
    for layer in graph.layers[:2]:
        for hops in range(4):
            address = by_name[layer.ids.name]
            for _ in range(hops):
                address = tensors.describe(address).src[0]
            target = address + library_module.OFF_NAME
            changed.append((target, ctypes.string_at(target, 64)))
            ctypes.memset(target, 0, 64)
    try:
        with pytest.raises(SeamError, match="must be told apart"):
            capture_graph(nodes)
    finally:
        for target, raw in reversed(changed):
            ctypes.memmove(target, raw, 64)


def test_capture_ids_of_unknown_origin_are_not_editable(nodes):
    """Ids that do not come from a sort stream losslessly, but no policy may edit them."""
    import ctypes

    graph = capture_graph(nodes)
    by_name = {tensors.describe(int(a)).name: int(a) for a in nodes}
    argsort = tensors.describe(by_name[graph.layers[0].ids.name]).src[0]
    some_other_op = tensors.describe(by_name["ffn_moe_logits-0"])
    assert some_other_op.op == "MUL_MAT"
    op_of = ctypes.c_int32.from_address(argsort + library_module.OFF_OP)
    before = op_of.value
    op_of.value = ctypes.c_int32.from_address(some_other_op.address + library_module.OFF_OP).value
    try:
        layer = capture_graph(nodes).layers[0]
    finally:
        op_of.value = before
    assert "not from a sort" in layer.why_not_select
    assert layer.sorted_hops == -1


def test_filter_calls_only_enabled_nodes(opened, nodes):
    model, context, node_filter, calls = opened
    graph = capture_graph(nodes)
    keys = [(x.ids.op, x.ids.name, x.ids.hops) for x in graph.layers]
    node_filter.set_table(keys, matmul_op=graph.matmul_op)
    node_filter.enable([1, 4])
    node_filter.begin(FILTER)
    tokens = model.tokenize("In the beginning God created")
    wanted = np.zeros(len(tokens), np.bool_)
    wanted[-1] = True
    assert context.decode(tokens, 0, wanted) == 0
    context.clear()
    assert calls == [(1, len(tokens)), (4, len(tokens))]
    assert node_filter.n_matmuls == graph.n_matmuls
    calls.clear()


def test_filter_same_node_twice_is_an_error():
    node_filter = NodeFilter(lambda tensor, entry: None)
    with pytest.raises(SeamError, match="must be told apart"):
        node_filter.set_table([(37, "a", 0), (37, "a", 0)], matmul_op=1)


def test_filter_handler_that_raises_aborts_and_is_kept(opened, nodes):
    model = opened[0]
    graph = capture_graph(nodes)

    def broken(tensor, entry):
        raise ZeroDivisionError("in the handler")

    other = NodeFilter(broken)
    fresh = Context(model, n_ctx=64, n_ubatch=16, n_threads=1, callbacks=other)
    try:
        layer = graph.layers[0]
        other.set_table([(layer.ids.op, layer.ids.name, layer.ids.hops)], matmul_op=1)
        other.enable([0])
        other.begin(FILTER)
        code = fresh.decode(np.array([model.bos], np.int32), 0, np.array([True]))
        assert code == ABORTED
        assert isinstance(other.failure, ZeroDivisionError)
    finally:
        fresh.close()


def test_worker_runs_on_one_thread_and_raises_in_the_caller():
    worker = Worker("test", lambda: None)
    try:
        threads = {worker.call(threading.get_ident) for _ in range(3)}
        assert len(threads) == 1
        assert threads != {threading.get_ident()}
        with pytest.raises(ZeroDivisionError):
            worker.call(lambda: 1 / 0)
    finally:
        worker.close(lambda: None)
    with pytest.raises(SessionError, match="closed"):
        worker.call(lambda: None)
    worker.close(lambda: None)


def test_worker_refuses_a_call_from_its_own_job():
    """It would wait for itself for ever."""
    worker = Worker("test", lambda: None)
    try:
        with pytest.raises(SessionError, match="from inside its own run"):
            worker.call(lambda: worker.call(lambda: None))
    finally:
        worker.close(lambda: None)


def test_worker_callers_take_turns():
    worker = Worker("test", lambda: None)
    running = []

    def job():
        running.append(1)
        assert len(running) == 1
        threading.Event().wait(0.002)
        running.pop()

    threads = [threading.Thread(target=worker.call, args=(job,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    worker.close(lambda: None)
    assert running == []
