"""The generated models: same bytes, routing that varies, finite logits, small memory."""

import collections
import ctypes
import hashlib
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bmoe_lab.testing
from bmoe_lab.errors import SettingsError, UnknownNameError
from bmoe_lab.seam import library as offsets
from bmoe_lab.seam.context import Context, Model
from bmoe_lab.seam.gguf import read_gguf
from bmoe_lab.seam.quantize import quantize, row_bytes, type_number
from bmoe_lab.testing import LAYOUTS, memory_model, tiny_model, write_large_model
from bmoe_lab.testing.gguf_file import Tensor, write_gguf
from bmoe_lab.testing.weights import RowPool, generator, normal_rows

TEXT = (
    "And it came to pass in those days that there went out a decree; é, 日本, \U0001f600.\n\t" * 2
)
ROUTED = [name for name in LAYOUTS if name != "dense"]
N_TOKEN = 64


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Watch:
    """What a plain evaluation callback sees of the routing: ids of each block, token by token."""

    callback_type = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)

    def __init__(self):
        self.ids = collections.defaultdict(list)
        self._callback = self.callback_type(self._see)
        self.callback_address = ctypes.cast(self._callback, ctypes.c_void_p).value
        self.abort_address = 0
        self.user_data = None

    def _see(self, node, ask, _):
        name = ctypes.string_at(node + offsets.OFF_NAME)
        if not name.startswith(b"ffn_moe_topk-"):
            return not ask
        if not ask:

            def word(offset):
                return ctypes.c_int64.from_address(node + offset).value

            row = (ctypes.c_int32 * word(offsets.OFF_NE)).from_address(word(offsets.OFF_DATA))
            self.ids[int(name.rpartition(b"-")[2])].append(list(row))
        return True


def run(path, tokens, n_more=0):
    """Feed the tokens one by one, then greedy ones; return logits, greedy tokens, ids per block."""
    watch = Watch()
    model = Model(path)
    context = Context(model, n_ctx=256, n_ubatch=32, n_threads=1, callbacks=watch)
    try:
        logits, fed = [], list(tokens)
        for position in range(len(tokens) + n_more):
            one = np.array([fed[position]], np.int32)
            assert context.decode(one, position, np.ones(1, np.bool_)) == 0
            logits.append(context.logits(0).copy())
            if position >= len(tokens) - 1:
                fed.append(int(logits[-1].argmax()))
        ids = {block: np.array(rows) for block, rows in watch.ids.items()}
        return np.array(logits), fed[len(tokens) :], ids
    finally:
        context.close()
        model.close()


@pytest.fixture(scope="module", params=list(LAYOUTS))
def layout(request):
    return request.param


@pytest.fixture(scope="module")
def case(layout, tmp_path_factory):
    path = tiny_model(layout, tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    model = Model(path)
    tokens = model.tokenize(TEXT)[:N_TOKEN]
    model.close()
    assert len(tokens) == N_TOKEN
    return path, *run(path, tokens, n_more=32)


def test_tiny_model_decoded_by_llama_cpp_gives_finite_logits_that_differ(case):
    _, logits, _, _ = case
    assert np.isfinite(logits).all()
    assert (logits[:, 0] == 0).all(), "the end of text has a row of zeros"
    assert logits[:, 1:].std(axis=0).min() > 1.0
    assert logits.std() < 10.0


def test_tiny_model_generating_greedily_varies_its_text(case):
    _, _, greedy, _ = case
    assert len(set(greedy)) >= 8
    assert 0 not in greedy, "the end-of-text token would end a run early"


def test_tiny_model_routing_64_tokens_uses_most_experts_of_every_layer(layout, case):
    _, _, _, ids = case
    if layout == "dense":
        assert ids == {}
        return
    assert len(ids) >= 3
    for block, rows in ids.items():
        assert rows.shape[1] == 2, block
        assert len(np.unique(rows[:N_TOKEN])) >= 6, block
        # Not the same two again and again, and not two new ones each time.
        again = np.mean([len({*a} & {*b}) / 2 for a, b in itertools.pairwise(rows)])
        assert 0.1 < again < 0.7, block


def test_tiny_model_written_twice_has_the_same_bytes(layout, case, tmp_path):
    path, *_ = case
    assert digest(tiny_model(layout, tmp_path / "again.gguf")) == digest(path)


def test_tiny_model_of_another_seed_has_other_weights(tmp_path):
    first = tiny_model("narrow", tmp_path / "0.gguf")
    second = tiny_model("narrow", tmp_path / "1.gguf", seed=1)
    assert digest(first) != digest(second)
    assert read_gguf(first) == read_gguf(second)  # the same header


def test_tiny_model_layouts_have_the_stacks_that_they_promise(tmp_path):
    def stacks(name):
        tensors = read_gguf(tiny_model(name, tmp_path / f"{name}.gguf")).tensors
        return {tensor.name: tensor for tensor in tensors}

    assert "blk.1.ffn_gate_up_exps.weight" in stacks("fused")
    assert "blk.1.ffn_gate_shexp.weight" in stacks("shared")
    leading = stacks("leading_dense")
    assert "blk.0.ffn_up.weight" in leading
    assert "blk.0.ffn_up_exps.weight" not in leading
    assert "blk.0.exp_probs_b.bias" in stacks("biased")
    wide = [tensor for name, tensor in stacks("wide").items() if "exps" in name]
    assert len({tensor.type for tensor in wide}) == 3
    assert all(tensor.n_bytes // 8 % 4096 for tensor in wide)
    narrow = [tensor for name, tensor in stacks("narrow").items() if "exps" in name]
    assert all(tensor.n_bytes // 8 < 4096 for tensor in narrow)
    assert not any("exps" in name for name in stacks("dense"))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "MXFP4"])
def test_tiny_model_of_any_expert_type_decodes(kind, tmp_path):
    path = tiny_model(
        "qwen3moe",
        tmp_path / "tiny.gguf",
        n_layer=1,
        n_embd=256,
        head_dim=64,
        n_ff_exp=256,
        expert_types=(kind,),
        down_types=(kind,),
    )
    logits, _, _ = run(path, [1, 2, 3])
    assert np.isfinite(logits).all()


@given(text=st.text(max_size=60))
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_vocabulary_of_a_tiny_model_gives_any_text_back(text, tmp_path_factory):
    text = text.replace("\0", "")  # a C string ends there
    folder = tmp_path_factory.getbasetemp() / "vocabulary"
    folder.mkdir(exist_ok=True)
    path = folder / "tiny.gguf"
    if not path.exists():
        tiny_model("narrow", path, n_layer=1)
    model = Model(path)
    try:
        tokens = model.tokenize(text, add_special=False)
        assert b"".join(model.piece(token) for token in tokens) == text.encode()
    finally:
        model.close()


def test_tiny_model_given_an_unknown_layout_names_the_closest(tmp_path):
    with pytest.raises(UnknownNameError, match="Did you mean 'fused'"):
        tiny_model("fusedd", tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"n_blocks": 3}, "sizes must be among"),
        ({"n_used": 9}, "n_used must be from 1 to n_expert=8; got 9"),
        ({"n_embd": 100, "expert_types": ("Q8_0",)}, "positive multiple of 32 for type Q8_0"),
    ],
)
def test_tiny_model_given_a_wrong_size_says_so_and_leaves_nothing(sizes, message, tmp_path):
    with pytest.raises(SettingsError, match=message):
        tiny_model("qwen3moe", tmp_path / "tiny.gguf", **sizes)
    assert list(tmp_path.iterdir()) == []


def test_write_gguf_interrupted_keeps_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"old")

    def fail():
        raise KeyboardInterrupt

    tensors = [Tensor("a.weight", (4,), "F32", fail)]
    with pytest.raises(KeyboardInterrupt):
        write_gguf(path, {"general.architecture": "llama"}, tensors)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.gguf"]
    assert path.read_bytes() == b"old"


def test_normal_rows_does_not_depend_on_the_slabs_it_is_made_in(monkeypatch):
    whole = normal_rows(generator(0, "x"), (3, 50, 96), "Q8_0", 0.5)
    monkeypatch.setattr("bmoe_lab.testing.weights._SLAB_VALUES", 7 * 96)
    np.testing.assert_array_equal(normal_rows(generator(0, "x"), (3, 50, 96), "Q8_0", 0.5), whole)


def test_row_pool_gives_each_expert_distinct_rows_and_no_two_experts_alike():
    pool = RowPool(seed=0, n_row=64)
    stack = pool.take("experts", (40, 48, 32), "F32", 1.0)
    for expert in stack:
        assert len(np.unique(expert, axis=0)) == 48
    assert len(np.unique(stack.reshape(40, -1), axis=0)) == 40


def test_row_pool_asked_for_more_rows_than_it_has_refuses():
    with pytest.raises(SettingsError, match="at most 64 rows; got 65 in experts"):
        RowPool(seed=0, n_row=64).take("experts", (2, 65, 32), "F32", 1.0)


@pytest.mark.parametrize(("kind", "tolerance"), [("F32", 0.0), ("Q8_0", 0.02), ("Q6_K", 0.1)])
def test_quantize_kept_by_gguf_dequantises_to_nearly_the_same(kind, tolerance):
    import gguf

    values = np.random.default_rng(0).standard_normal((5, 256), np.float32)
    stored = quantize(values, kind)
    actual = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType(type_number(kind)))
    np.testing.assert_allclose(actual, values, atol=tolerance)


def test_quantize_refuses_what_would_abort_the_process():
    with pytest.raises(SettingsError, match="positive multiple of 256 for type Q4_K; got 128"):
        quantize(np.zeros((2, 128), np.float32), "Q4_K")
    with pytest.raises(SettingsError, match="values must be finite"):
        quantize(np.full((2, 32), np.nan, np.float32), "Q8_0")
    with pytest.raises(UnknownNameError, match="type must be one of"):
        row_bytes("I32", 32)
    with pytest.raises(UnknownNameError, match="type must be one of"):
        row_bytes("IQ2_XXS", 256)  # needs an importance matrix


def small_large(path, **sizes):
    """Return a large model's file made small: every mechanism, few bytes."""
    small = {"n_layer": 2, "n_embd": 256, "n_head": 4, "n_head_kv": 2, "head_dim": 64}
    return write_large_model(path, **{**small, "n_ff": 256, "n_vocab": 512, **sizes})


def test_write_large_model_decodes_with_finite_logits_and_the_types_asked_for(tmp_path):
    path = small_large(tmp_path / "large.gguf", n_expert=32, n_used=4)
    tokens = np.random.default_rng(0).integers(1, 512, 8)
    logits, _, ids = run(path, tokens)
    assert np.isfinite(logits).all()
    assert {block: rows.shape for block, rows in ids.items()} == {0: (8, 4), 1: (8, 4)}
    types = {tensor.name: tensor.type for tensor in read_gguf(path).tensors}
    down = [types[f"blk.{block}.ffn_down_exps.weight"] for block in (0, 1)]
    assert down == [type_number("Q4_K"), type_number("Q6_K")]
    assert types["blk.1.ffn_up_exps.weight"] == type_number("Q4_K")


def test_write_large_model_spreading_the_router_makes_tokens_share_experts(tmp_path):
    def overlap(spread):
        sizes = {"n_expert": 32, "n_used": 4, "router_spread": spread}
        path = small_large(tmp_path / "large.gguf", **sizes)
        tokens = np.random.default_rng(1).integers(1, 512, 64)
        _, _, ids = run(path, tokens)
        return np.mean(
            [len({*a} & {*b}) / 4 for rows in ids.values() for a, b in itertools.pairwise(rows)]
        )

    assert overlap(1.0) > overlap(0.0) + 0.08


def test_write_large_model_without_room_says_how_much_it_needs(tmp_path, monkeypatch):
    usage = collections.namedtuple("usage", "total used free")(10, 5, 5)
    monkeypatch.setattr("bmoe_lab.testing.large.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(SettingsError, match=r"room for [\d,]+ bytes; got 5 free"):
        write_large_model(tmp_path / "large.gguf")
    assert list(tmp_path.iterdir()) == []


def test_memory_model_has_half_a_gibibyte_of_experts(tmp_path):
    path = memory_model(tmp_path / "memory.gguf", n_layer=1)
    sizes = [tensor.n_bytes for tensor in read_gguf(path).tensors if "exps" in tensor.name]
    path.unlink()
    assert 4 * sum(sizes) >= 512 << 20
    assert sum(sizes) // 64 == 2_193_408  # the docstring's number


def test_memory_model_written_in_a_new_process_takes_little_memory(tmp_path):
    code = (
        "import resource, sys; from bmoe_lab.testing import memory_model, tiny_model\n"
        "tiny_model('narrow', sys.argv[1])\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "memory_model(sys.argv[1], n_layer=2)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    path = tmp_path / "memory.gguf"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    path.unlink()
    # A stack is 45 MiB, a pool of rows and the float values it is made of are some more.
    assert int(done.stdout) / resource_unit() < 160


def resource_unit():
    """Return how many units of ru_maxrss make a MiB here."""
    return 1 << 20 if sys.platform == "darwin" else 1 << 10


def test_testing_public_names_are_listed_and_load():
    for name in bmoe_lab.testing.__all__:
        assert getattr(bmoe_lab.testing, name) is not None
    assert dir(bmoe_lab.testing) == sorted(bmoe_lab.testing.__all__)
    with pytest.raises(AttributeError, match="no attribute 'tiny'"):
        _ = bmoe_lab.testing.tiny


def test_testing_imported_alone_loads_nothing_heavy():
    code = (
        "import sys, bmoe_lab.testing\n"
        "print([n for n in ('gguf', 'llama_cpp', 'numba', 'tqdm') if n in sys.modules])"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == "[]"
