"""`fuse_projections_`: one product for siblings, the same values, nothing stale, and everything else as it was."""

import copy
import gc
import io
import pickle
import threading
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from hf_quant import QuantizerConfig, dequantize_, fuse_projections_, plan, quantize_, unfuse_projections_
from hf_quant.modules import QuantLinear
from hf_quant.modules.inputs import rule, shared_product
from hf_quant.modules.inputs.shared_product import _waiting, rows_unsupported_reason, unsupported_reason
from hf_quant.modules.inputs.siblings import find_siblings
from hf_quant.quantize import fuse_as_configured_
from hf_quant.scheme import LinearScheme, TensorQuant


K, HEADS, KV, SIZE = 128, 8, 2, 16


class Attention(nn.Module):
    """Grouped-query attention as the hosts write it; `bias` says which of q, k and v have one."""

    def __init__(self, bias: str = "") -> None:
        super().__init__()
        self.q_proj = nn.Linear(K, HEADS * SIZE, bias="q" in bias)
        self.k_proj = nn.Linear(K, KV * SIZE, bias="k" in bias)
        self.v_proj = nn.Linear(K, KV * SIZE, bias="v" in bias)
        self.o_proj = nn.Linear(HEADS * SIZE, K)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, SIZE)
        q = self.q_proj(x).view(shape).transpose(-3, -2)
        k = self.k_proj(x).view(shape).transpose(-3, -2)
        v = self.v_proj(x).view(shape).transpose(-3, -2)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o_proj(y.transpose(-3, -2).reshape(*x.shape[:-1], -1))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(K, 256), nn.Linear(K, 256), nn.Linear(256, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention("qkv"), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Changes(nn.Module):
    """Changes its input between two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.k_proj, self.v_proj = nn.Linear(K, 64), nn.Linear(K, 64)

    def forward(self, x: Tensor) -> Tensor:
        k = self.k_proj(x)
        x.add_(1)
        return k + self.v_proj(x)


class Hidden(nn.Module):
    """A layer that changes what it is given, where no source shows it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


class ChangesElsewhere(Changes):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = Hidden()

    def forward(self, x: Tensor) -> Tensor:
        k = self.k_proj(x)
        self.hidden(x)
        return k + self.v_proj(x)


def quantized(module: nn.Module, config="int4", dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    return quantize_(module.to(dtype), QuantizerConfig(config, modules_to_not_convert=[])).eval().requires_grad_(False)


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def products(monkeypatch) -> list[str]:
    """The products that are computed, one by one: "fused", or "alone"."""
    made: list[str] = []
    for module, kind in ((rule, "alone"), (shared_product, "fused")):

        def counted(*args, kind=kind, layer_product=module.layer_product):
            made.append(kind)
            return layer_product(*args)

        monkeypatch.setattr(module, "layer_product", counted)
    return made


def pair(module: nn.Module, **kwargs) -> tuple[nn.Module, nn.Module]:
    """(the fused module, an unfused copy)."""
    alone = quantized(module, **kwargs)
    return fuse_projections_(copy.deepcopy(alone)), alone


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Equal up to the order of a sum: another number of rows may take another path."""
    scale = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[expected.dtype]
    assert found.shape == expected.shape and found.dtype == expected.dtype
    torch.testing.assert_close(
        found, expected, rtol=0, atol=scale * float(expected.abs().max() if expected.numel() else 1)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("config", ["int8", "int4", "W4A16_ASYM", "nf4", "fp8", "fp6", "mxfp4", "W8A8", "W4A8_FP8"])
def test_values_are_those_of_the_single_products(config, dtype, products):
    fused, alone = pair(Block(), config=config, dtype=dtype)
    for shape in ((1, 1, K), (2, 17, K), (3, K)):
        x = rows(*shape, dtype=dtype)
        expected = alone(x)
        products.clear()
        assert_same(fused(x), expected)
        assert products == ["fused", "alone", "fused", "alone"]
    assert not _waiting()
    assert fused.mlp(rows(0, 4, K, dtype=dtype)).shape == (0, 4, K)
    wrong = copy.deepcopy(alone)
    wrong.attention.k_proj.scale.data = wrong.attention.k_proj.scale.roll(1, 0)
    assert not torch.allclose(wrong(rows(3, K, dtype=dtype)), alone(rows(3, K, dtype=dtype)), atol=1e-2)


@pytest.mark.parametrize("bias", ["", "qkv", "qv", "k"])
def test_biases(bias):
    fused, alone = pair(Attention(bias), dtype=torch.float32)
    assert_same(fused(rows(3, K, dtype=torch.float32)), alone(rows(3, K, dtype=torch.float32)))
    if "q" in bias:
        for module in (fused, alone):
            module.q_proj.bias.add_(1)  # as an optimizer does
    assert_same(fused(rows(3, K, dtype=torch.float32)), alone(rows(3, K, dtype=torch.float32)))


def test_parts_of_one_token_are_contiguous_and_of_several_can_be_viewed():
    fused, _ = pair(Attention())
    for x in (rows(1, 1, K), rows(1, K), rows(K)):
        parts = [p(x) for p in (fused.q_proj, fused.k_proj, fused.v_proj)]
        assert all(part.is_contiguous() for part in parts)
    x = rows(2, 3, K)
    k = fused.k_proj(x)
    assert k.view(2, 3, KV, SIZE).shape == (2, 3, KV, SIZE) and k.view(6, KV * SIZE).shape == (6, KV * SIZE)


def test_names_bytes_and_memory_stay():
    alone = quantized(Block(), "W4A16_ASYM")
    before = {k: v.clone() for k, v in alone.state_dict().items()}
    kinds = {k: (type(p), p.requires_grad) for k, p in alone.named_parameters()}
    memory = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in alone.parameters()}
    bias = alone.attention.q_proj.bias
    fused = fuse_projections_(alone)
    after = fused.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[k], before[k]) for k in before)
    assert {k: (type(p), p.requires_grad) for k, p in fused.named_parameters()} == kinds
    again = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in fused.parameters()}
    assert sum(again.values()) == sum(memory.values()) and len(again) == len(memory)  # none is taken for a tied one
    assert fused.attention.q_proj.bias is bias
    attention = fused.attention
    for key in ("qdata", "scale"):
        q, k, v = (getattr(layer, key) for layer in (attention.q_proj, attention.k_proj, attention.v_proj))
        assert k.data_ptr() == q.data_ptr() + q.nbytes and v.data_ptr() == k.data_ptr() + k.nbytes
    assert "one product with k_proj, v_proj" in repr(attention.q_proj)
    assert torch.equal(attention.k_proj.weight.dequantize(), attention.k_proj.dequantize_weight())
    assert fuse_projections_(fused).attention.q_proj.fused is attention.q_proj.fused  # once is enough


def test_unfuse_gives_every_layer_its_own_tensors():
    fused, alone = pair(Block())
    x = rows(3, K)
    unfuse_projections_(fused)
    storages = [p.untyped_storage().data_ptr() for p in fused.parameters()]
    assert len(set(storages)) == len(storages) and "one product" not in repr(fused)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in fused.parameters())
    assert all(p.untyped_storage().resizable() for p in fused.parameters())  # no part of a storage of several
    assert torch.equal(fused(x), alone(x))
    part = fuse_projections_(fused).attention.q_proj
    unfuse_projections_(part)  # the others of its group stay, alone
    assert part.fused is None and fused.attention.k_proj.fused.common is None
    assert torch.equal(fused.attention(x), alone.attention(x))


def test_dequantize_takes_it_back():
    fused, alone = pair(Block())
    dequantize_(fused), dequantize_(alone)
    assert type(fused.attention.q_proj) is nn.Linear and "fused" not in fused.attention.q_proj.__dict__
    assert all(p.untyped_storage().resizable() for p in fused.parameters())
    assert torch.equal(fused(rows(3, K)), alone(rows(3, K)))


# What must never be served.


def test_an_input_that_changed_in_between(products):
    for cls in (Changes, ChangesElsewhere):
        alone = quantized(cls())
        fused = copy.deepcopy(alone)
        if cls is ChangesElsewhere:
            fuse_projections_(fused)
        else:
            with pytest.raises(ValueError, match="nothing to fuse in this Changes: no two of its quantized linear"):
                fuse_projections_(fused)
        x = rows(3, K)
        assert_same(fused(x.clone()), alone(x.clone()))


def test_only_the_same_unchanged_tensor_counts(products):
    fused, alone = pair(Attention("qkv"))
    q, k, v = fused.q_proj, fused.k_proj, fused.v_proj
    x, other = rows(1, K), rows(1, K, seed=2)
    for change in (
        lambda x: x.mul_(2),
        lambda x: x.view(-1)[:1].zero_(),
        lambda x: x.detach().zero_(),
        lambda x: x.copy_(other),
    ):
        x = rows(1, K)
        q(x)
        change(x)
        assert torch.equal(k(x), alone.k_proj(x)) and torch.equal(v(x), alone.v_proj(x))
    q(x)
    for same_values in (x.clone(), x.view(1, 1, K), x[:], x.detach()):
        products.clear()
        assert torch.equal(k(same_values).view(-1), alone.k_proj(x).view(-1))
        assert products[0] == "fused"  # anew, with the tensor that it got
    q(x)
    assert torch.equal(k(other), alone.k_proj(other)) and torch.equal(k(x), alone.k_proj(x))


def test_each_part_is_handed_out_once():
    fused, alone = pair(Attention())
    x = rows(2, K)
    first = fused.k_proj(x)
    second = fused.k_proj(x)
    first.zero_()
    assert torch.equal(second, alone.k_proj(x)) and torch.equal(fused.k_proj(x), alone.k_proj(x))
    q = fused.q_proj(x)
    q.add_(1)  # its own columns only
    assert torch.equal(fused.v_proj(x), alone.v_proj(x))


def test_weights_that_change_in_between():
    fused, alone = pair(Attention("qkv"))
    x, weight = rows(2, K), rows(KV * SIZE, K, seed=3)
    for module in (fused, alone):
        module.q_proj(x)
        module.k_proj.weight = weight
        module.v_proj.bias.add_(1)
    assert torch.equal(fused.k_proj(x), alone.k_proj(x)) and torch.equal(fused.v_proj(x), alone.v_proj(x))
    assert fused.k_proj.fused.common is not None  # written through
    assert_same(fused(x), alone(x))
    for module in (fused, alone):
        module.q_proj(x)
        module.k_proj.bias = nn.Parameter(torch.ones_like(module.k_proj.bias), requires_grad=False)
    assert torch.equal(fused.k_proj(x), alone.k_proj(x))
    assert_same(fused(x), alone(x))


@pytest.mark.parametrize("how", ["parameter", "data", "state_dict", "register"])
def test_parameters_that_a_host_replaces(how, products):
    fused, alone = pair(Attention())
    x, layer = rows(2, K), fused.v_proj
    common = weakref.ref(layer.fused.common.parameters["qdata"])
    state = {k: v.clone() for k, v in fused.state_dict().items()}
    state["v_proj.scale"] = state["v_proj.scale"].roll(1, 0)
    fused.q_proj(x)
    if how == "parameter":  # accelerate, FSDP2
        layer._parameters["scale"] = nn.Parameter(state["v_proj.scale"], requires_grad=False)
    elif how == "data":  # diffusers' group offloading
        layer.scale.data = state["v_proj.scale"]
    elif how == "register":
        layer.register_parameter("scale", nn.Parameter(state["v_proj.scale"], requires_grad=False))
    else:
        fused.load_state_dict(state, assign=True)
    alone.load_state_dict(state)
    assert torch.equal(layer(x), alone.v_proj(x))
    assert_same(fused(x), alone(x))
    if how == "state_dict":  # every sibling has new parameters: they are put together again
        assert layer.fused.common is not None
        assert_same(fused(x), alone(x))
    else:
        assert layer.fused.common is None and products[-4:] == ["alone"] * 4
        del products
        unfuse_projections_(fused)
        gc.collect()
        assert common() is None


def test_an_exception_in_between_and_the_same_input_again(products):
    fused, alone = pair(Attention())

    def fail(*args):
        raise RuntimeError("out of memory")

    hook = fused.k_proj.register_forward_pre_hook(fail)
    x = rows(2, K)
    with pytest.raises(RuntimeError):
        fused(x)
    hook.remove()
    assert_same(fused(x), alone(x))
    x.mul_(3)
    assert_same(fused(x), alone(x))
    assert not _waiting()


def test_what_nobody_fetches_dies_with_the_input():
    fused, _ = pair(Attention())
    x = rows(2, K)
    fused.q_proj(x)
    (pending,) = _waiting().values()
    storage = weakref.ref(pending.parts[1].untyped_storage())
    del pending, x
    assert not _waiting() and storage() is None


def test_the_model_dies_with_its_last_reference():
    fused, _ = pair(Attention())
    fused(rows(2, K))
    gc.collect()
    gc.disable()
    try:
        died = weakref.ref(fused.q_proj), weakref.ref(fused.q_proj.fused.common.parameters["qdata"])
        del fused
        assert [ref() for ref in died] == [None, None]
    finally:
        gc.enable()


def test_hooks_that_change_the_input():
    fused, alone = pair(Attention())
    for module in (fused, alone):
        module.v_proj.register_forward_pre_hook(lambda _, args: (args[0].add_(1),))
        module.k_proj.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    assert_same(fused(rows(2, K)), alone(rows(2, K)))


def test_threads_do_not_meet(products):
    fused, alone = pair(Attention())
    shared, failures = rows(2, K), []
    barrier = threading.Barrier(4)

    def work(seed: int) -> None:
        own = rows(2, K, seed=seed)
        expected = [(p(own), p(shared)) for p in (alone.q_proj, alone.k_proj, alone.v_proj)]
        for _ in range(20):
            barrier.wait()
            for layer, (mine, ours) in zip((fused.q_proj, fused.k_proj, fused.v_proj), expected):
                found = layer(own), layer(shared)
                if not (torch.equal(found[0], mine) and torch.equal(found[1], ours)):
                    failures.append(seed)
                found[1].zero_()  # nobody else has it

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# Where it does not run.


def test_training_and_gradients_compute_alone(products):
    fused, alone = pair(Attention("qkv"), dtype=torch.float32)
    x = rows(2, K, dtype=torch.float32).requires_grad_()
    grads = []
    for module in (fused, alone):
        module.train()
        with torch.no_grad():
            module(x)
        module.eval()
        y = module(x)
        y.square().sum().backward()
        grads.append(x.grad.clone())
        x.grad = None
        module.q_proj.bias.requires_grad_()
        module(x.detach()).sum().backward()
        assert module.q_proj.bias.grad is not None
    assert torch.equal(*grads) and set(products) == {"alone"}
    with torch.no_grad():
        fused(x)
    assert "fused" in products


def test_gradient_checkpointing():
    from torch.utils.checkpoint import checkpoint

    fused, alone = pair(Block(), dtype=torch.float32)
    for reentrant in (True, False):
        grads = []
        for module in (fused, alone):
            x = rows(2, K, dtype=torch.float32).requires_grad_()
            checkpoint(module, x, use_reentrant=reentrant).square().sum().backward()
            grads.append(x.grad)
        assert_same(*grads)


def test_inference_mode_computes_alone_and_versions_count_afterwards(products):
    alone = quantized(Attention())
    fused = copy.deepcopy(alone)
    with torch.inference_mode():
        fuse_projections_(fused)
        x = rows(2, K)
        fused.q_proj(x)
        x.add_(1)
        assert torch.equal(fused.k_proj(x), alone.k_proj(x))
    assert set(products) == {"alone"}
    x = rows(2, K)
    fused.q_proj(x)
    assert products[-1] == "fused"
    x.add_(1)
    assert torch.equal(fused.k_proj(x), alone.k_proj(x))


def test_autocast_is_part_of_the_state():
    fused, alone = pair(Attention(), dtype=torch.float32)
    x = rows(2, K, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert fused.q_proj(x).dtype == torch.bfloat16
    k = fused.k_proj(x)
    assert k.dtype == torch.float32 and torch.equal(k, alone.k_proj(x))


def test_replicas_of_data_parallel_leave_the_original_alone(products):
    fused, alone = pair(Attention("q"))
    x = rows(2, K)
    replica = fused.q_proj._replicate_for_data_parallel()
    for key, parameter in fused.q_proj._parameters.items():
        setattr(replica, key, parameter.detach().clone())  # as nn.parallel.replicate does
    fused.q_proj(x)
    products.clear()
    assert torch.equal(replica(x), alone.q_proj(x)) and products == ["alone"] * 2
    assert fused.q_proj.fused.common is not None


# Copies and moves.


def test_copies_are_fused_anew_and_independent(tmp_path, products):
    fused, alone = pair(Block())
    x = rows(2, K)
    torch.save(fused, tmp_path / "block.pt")
    copies = [
        copy.deepcopy(fused),
        pickle.loads(pickle.dumps(fused)),
        torch.load(tmp_path / "block.pt", weights_only=False),
    ]
    for found in copies:
        products.clear()
        assert_same(found(x), alone(x))
        assert products.count("fused") == 2
        assert found.attention.q_proj.fused is not fused.attention.q_proj.fused
        found.attention.q_proj.qdata.zero_()
    assert_same(fused(x), alone(x))
    assert len(pickle.dumps(fused)) < 1.1 * len(pickle.dumps(alone)) + 4000
    buffer = io.BytesIO()
    torch.save(fused.state_dict(), buffer)
    buffer.seek(0)
    alone.load_state_dict(torch.load(buffer, weights_only=True))


def test_a_copy_of_one_sibling_is_alone():
    fused, alone = pair(Attention("qkv"))
    for layer in (copy.deepcopy(fused.k_proj), pickle.loads(pickle.dumps(fused.k_proj))):
        assert torch.equal(layer(rows(2, K)), alone.k_proj(rows(2, K)))
        assert layer.qdata.untyped_storage().nbytes() == layer.qdata.nbytes
    shallow = copy.copy(fused.k_proj)
    assert shallow.qdata is fused.k_proj.qdata
    assert torch.equal(shallow(rows(2, K)), alone.k_proj(rows(2, K)))
    assert fused.k_proj.fused.common is not None


def test_moves_join_again_when_all_have_moved(products):
    fused, alone = pair(Attention("qkv"))
    x = rows(2, K)
    fused._apply(lambda t: t.clone())  # as `.to(device)` does
    assert fused.q_proj.fused.common is not None
    assert_same(fused(x), alone(x))
    fused.q_proj._apply(lambda t: t.clone())
    assert fused.q_proj.fused.common is None
    products.clear()
    assert_same(fused(x), alone(x))
    assert "fused" not in products
    fused._apply(lambda t: t.clone())
    assert_same(fused(x), alone(x))
    assert "fused" in products
    common = fused.q_proj.fused.common.parameters["qdata"]
    fused.bfloat16()  # nothing new
    assert fused.q_proj.fused.common.parameters["qdata"] is common
    fused.half(), alone.half()
    assert fused.q_proj.fused.common.bias.dtype == torch.float16
    assert_same(fused(x.half()), alone(x.half()))
    fused.share_memory()
    assert fused.q_proj.qdata.is_shared()
    assert_same(fused(x.half()), alone(x.half()))
    fused.to("meta")
    assert fused.q_proj.fused.common is None


def test_what_a_host_swaps_is_not_joined_at_every_offload(products, monkeypatch):
    fused, alone = pair(Attention("qkv"))
    x, group, joined = rows(2, K), fused.q_proj.fused, []
    join = type(group).join_
    monkeypatch.setattr(type(group), "join_", lambda self, modules: (joined.append(1), join(self, modules)))
    for _ in range(2):
        for parameter in fused.parameters():
            parameter.data = parameter.data.clone()  # to the device
        parameters = dict(fused.named_parameters())
        assert_same(fused(x), alone(x))
        fused._apply(lambda t: t.clone())  # and back
        assert {name: id(p) for name, p in fused.named_parameters()} == {n: id(p) for n, p in parameters.items()}
    assert not joined and group.common is None and "fused" not in products
    fuse_projections_(fused)  # the host has let go of them
    assert_same(fused(x), alone(x))
    assert "fused" in products


def test_nothing_is_joined_on_the_cpu_for_the_way_back(monkeypatch):
    fused, alone = pair(Attention("qkv"))
    x, group = rows(2, K), fused.q_proj.fused
    for device_type, is_joined in (("cuda", True), ("cpu", False), ("cuda", True), ("cpu", False)):
        monkeypatch.setattr(QuantLinear, "packed_device", lambda self, d=device_type: torch.device(d))
        fused._apply(lambda t: t.clone())
        assert (group.common is not None) == is_joined
        assert_same(fused(x), alone(x))


# torch.compile.


def counted_graphs() -> tuple[CompileCounterWithBackend, list[int]]:
    """(a counting backend, of each graph: its products)."""
    backend, products = CompileCounterWithBackend("eager"), []
    names = ("hf_quant.weight_only_mm.default", "hf_quant.dynamic_mm.default")

    def compile_fn(graph, inputs):
        graphs = [m for m in graph.modules() if isinstance(m, torch.fx.GraphModule)]  # autograd.Function's, too
        products.append(sum(str(node.target) in names for g in graphs for node in g.graph.nodes))
        return backend(graph, inputs)

    backend.compile_fn = compile_fn
    return backend, products


def test_compiled_in_one_graph_for_ten_lengths():
    fused, alone = pair(Block())
    backend, products = counted_graphs()
    compiled = torch.compile(fused, backend=backend.compile_fn, fullgraph=True)
    with torch.no_grad():
        for length in (5, *range(2, 11), 1):
            x = rows(1, length, K)
            assert_same(compiled(x), alone(x))
            assert fused.attention.q_proj.fused.traced is None
    assert backend.frame_count <= 3  # one length, any length, one token
    assert set(products) == {4}, "two fused products, o_proj and down_proj"
    with torch.no_grad():
        fused.attention.k_proj.weight = alone.attention.k_proj.weight = rows(KV * SIZE, K, seed=4)
        assert_same(compiled(rows(1, 6, K)), alone(rows(1, 6, K)))
        count = backend.frame_count
        fused.attention.k_proj._parameters["qdata"] = nn.Parameter(fused.attention.k_proj.qdata + 0, False)
        assert_same(compiled(rows(1, 6, K)), alone(rows(1, 6, K)))
    assert backend.frame_count == count + 1 and products[-1] == 5  # k_proj alone
    assert fused.attention.q_proj.fused.traced is None


def test_compiled_training_and_unproven_sources_compute_alone():
    fused, alone = pair(Block(), dtype=torch.float32)
    backend, products = counted_graphs()
    x = rows(2, K, dtype=torch.float32).requires_grad_()
    compiled = torch.compile(fused.mlp, backend=backend.compile_fn, fullgraph=True)
    assert_same(compiled(x).detach(), alone.mlp(x).detach())
    assert_same(compiled.train()(x).detach(), alone.mlp(x).detach())
    assert products == [3, 3]
    fused, alone = pair(ChangesElsewhere())
    assert not fused.k_proj.fused.is_proven
    compiled = torch.compile(fused, backend=backend.compile_fn, fullgraph=True)
    assert_same(compiled(rows(3, K)), alone(rows(3, K)))
    assert products[-1] == 2


def test_export_computes_alone():
    fused, alone = pair(MLP(), dtype=torch.float32)
    x = rows(2, K, dtype=torch.float32)
    with torch.no_grad():
        for strict in (False, True):
            exported = torch.export.export(fused, (x,), strict=strict)
            assert_same(exported.module()(x), alone(x))
    assert fused.gate_proj.fused.traced is None


# Which layers.


class Latent(nn.Module):
    """Names of its own, a branch, a second input, a nested wrapper."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b", "c", "d", "e", "f", "g"):
            self.add_module(name, nn.Linear(K, 64))

    def forward(self, x: Tensor, y: Tensor, cross: bool = False) -> Tensor:
        z = self.a(x) + self.b(x)
        if cross:
            z = z + self.c(x) + self.d(x)
        x = x + 1
        return z + self.e(x) + self.f(y) + self.g(y)


class Processor(nn.Module):
    """As diffusers has it: another object calls the layers."""

    def __init__(self, is_cross_attention: bool) -> None:
        super().__init__()
        self.is_cross_attention = is_cross_attention
        self.to_q, self.to_k, self.to_v = nn.Linear(K, 64), nn.Linear(K, 64), nn.Linear(K, 64)

    def forward(self, x: Tensor) -> Tensor:
        return run(self, x)


def run(attention: Processor, x: Tensor) -> Tensor:
    return attention.to_q(x) + attention.to_k(x) + attention.to_v(x)


class Wrapper(nn.Module):
    """PEFT's layers look like this."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x)


def groups(model: nn.Module) -> list[tuple[str, ...]]:
    linears = {n: "same" for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    return [names for names, _ in find_siblings(model, linears)]


def test_siblings_are_what_reads_one_tensor():
    assert groups(Block()) == [
        ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
    ]
    assert groups(Latent()) == [("a", "b"), ("c", "d"), ("f", "g")]
    assert groups(Processor(False)) == [("to_q", "to_k", "to_v")] and groups(Processor(True)) == []
    kandinsky = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("to_query", "to_key", "to_value", "out_layer")})
    assert groups(kandinsky) == [("to_query", "to_key", "to_value")]
    assert groups(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) == []
    mlp = MLP()
    mlp.up_proj = Wrapper(mlp.up_proj)
    assert groups(mlp) == [("gate_proj", "up_proj.base_layer")]
    mlp.up_proj = mlp.gate_proj  # one layer twice
    assert groups(mlp) == []


class Either(Attention):
    """`k_proj` runs only if `q_proj` gives nothing, `v_proj` only if that does not, either."""

    def forward(self, x: Tensor) -> Tensor:
        return self.q_proj(x) or self.k_proj(x) or self.v_proj(x)


def test_what_runs_only_after_another_is_no_sibling():
    assert groups(Either()) == []


def test_a_forward_that_was_replaced_proves_nothing():
    linears = dict.fromkeys(("gate_proj", "up_proj"), "same")

    def proven(module: nn.Module) -> list[bool]:
        return [is_proven for _, is_proven in find_siblings(module, linears)]

    class Patched(MLP):
        pass

    module = Patched()
    assert proven(module) == [True]
    module.forward = types.MethodType(Changes.forward, module)  # of the instance
    assert proven(module) == [False]
    del module.forward
    Patched.forward = lambda self, x: self.up_proj(x)  # of the class, after its source was read
    assert proven(module) == [False]


def test_layers_inside_of_adapters_are_fused(products):
    alone = quantized(MLP())
    wrapped = copy.deepcopy(alone)
    wrapped.up_proj = Wrapper(wrapped.up_proj)
    fuse_projections_(wrapped)
    assert_same(wrapped(rows(2, K)), alone(rows(2, K)))
    assert products[:2] == ["fused", "alone"]


def test_layers_that_are_siblings_by_name_only(products):
    alone = quantized(Processor(False))
    fused = fuse_projections_(copy.deepcopy(alone))
    x, other = rows(2, K), rows(2, K, seed=2)
    assert torch.equal(fused(x), alone(x)) and products[0] == "fused"
    for _ in range(4):  # as cross attention calls them
        products.clear()
        assert torch.equal(fused.to_q(x), alone.to_q(x)) and torch.equal(fused.to_k(other), alone.to_k(other))
    assert products == ["alone"] * 4 and fused.to_q.fused.common is None
    assert_same(fused(x), alone(x))


def test_only_equal_schemes_share():
    torch.manual_seed(0)
    module = quantize_(Attention().bfloat16(), {"weights": "int4", "modules": {"v_proj": "int8"}}).eval()
    fuse_projections_(module)
    assert module.q_proj.fused is module.k_proj.fused and module.v_proj.fused is None
    assert module.q_proj.fused.names == ("q_proj", "k_proj")


def weight(format: str, granularity: str, **fields) -> LinearScheme:
    return LinearScheme(TensorQuant(format, granularity, **fields))


def test_rows_that_cannot_be_joined():
    shapes = [(256, 128), (128, 128)]
    assert rows_unsupported_reason(weight("int8", "row"), shapes) is None
    assert rows_unsupported_reason(weight("fp8_e4m3", "block"), [(256, 256), (128, 256)]) is None
    assert "blocks of 128 rows" in rows_unsupported_reason(weight("fp8_e4m3", "block"), [(192, 128), (128, 128)])
    assert "whole tensors" in rows_unsupported_reason(weight("int8", "tensor"), shapes)
    nvfp4 = weight("nvfp4", "group", group_size=16, scale_dtype="float8_e4m3fn")
    assert "global scale" in rows_unsupported_reason(nvfp4, shapes)
    assert rows_unsupported_reason(weight("nf4", "group", group_size=32, scale_dtype="float8_e4m3fn"), shapes) is None
    assert "multiple of 16 bytes" in rows_unsupported_reason(weight("int8", "row"), [(129, 128), (128, 128)])
    assert rows_unsupported_reason(weight("int8", "row"), [(256, 128), (129, 128)]) is None  # nothing follows the last


def test_modules_that_cannot_be_joined():
    def reason(change) -> str:
        module = quantized(Attention("qkv"))
        change(module)
        with pytest.raises(ValueError, match="nothing to fuse in this Attention: ") as error:
            fuse_projections_(module)
        return str(error.value)

    assert "tied" in reason(lambda m: setattr(m.q_proj, "shares_codes", True))
    assert "hooked" in reason(lambda m: m.q_proj.__dict__.update(forward=m.q_proj.forward))
    assert "different devices" not in reason(lambda m: m.q_proj.to("meta"))
    assert "not loaded, or offloaded" in reason(lambda m: m.q_proj.to("meta"))
    assert "dtypes differ" in reason(lambda m: m.q_proj.half())
    assert "shared between processes" in reason(lambda m: m.q_proj.share_memory())
    assert "global scales differ" in reason(lambda m: m.q_proj.global_scale.data.add_(1 << 23))  # twice as large
    assert "sharded" in reason(lambda m: setattr(m.q_proj.qdata, "full_tensor", None))
    with pytest.raises(ValueError, match="no two of its quantized linear layers read the same tensor"):
        fuse_projections_(nn.Linear(4, 4))
    assert unsupported_reason([quantized(MLP()).gate_proj, quantized(MLP()).up_proj]) is None


# The plan and the configuration.


def test_the_plan_says_what_will_be_one_product():
    model = nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(2))}).bfloat16()
    line = "one product on GPUs: layers.*.attention.q_proj + k_proj + v_proj (2), layers.*.mlp.gate_proj + up_proj (2)"
    found = plan(model, "int8")
    assert str(found).splitlines()[-1] == line
    assert found.fused[0] == tuple(f"layers.0.attention.{n}_proj" for n in "qkv") and len(found.fused) == 4
    everywhere = str(plan(model, QuantizerConfig("int8", fuse_projections=True)))
    assert everywhere.splitlines()[-1] == line.replace("GPUs", "every device")
    for config in (QuantizerConfig("int8", fuse_projections=False), QuantizerConfig("nvfp4")):
        assert "one product" not in str(plan(model, config)) and not plan(model, config).fused
    quantize_(model, QuantizerConfig("int8", fuse_projections=True))
    names = {m.fused: m.fused.names for m in model.modules() if isinstance(m, QuantLinear) and m.fused}
    assert sorted(names.values()) == sorted(tuple(n.rpartition(".")[2] for n in group) for group in found.fused)


def test_the_configuration_decides(caplog):
    def is_fused(config: QuantizerConfig, training: bool = False) -> bool:
        model = quantize_(Block().bfloat16().train(training), config)
        return model.mlp.up_proj.fused is not None

    assert is_fused(QuantizerConfig("int8", fuse_projections=True), training=True)
    assert not is_fused(QuantizerConfig("int8", fuse_projections=False))
    assert not is_fused(QuantizerConfig("int8"))  # on a CPU it gains nothing
    assert not caplog.records
    quantize_(nn.Linear(K, K), QuantizerConfig("int8", fuse_projections=True))
    assert "fuse_projections is True, but QuantLinear has nothing to fuse: no two of its" in caplog.text


def test_none_means_gpus_and_inference(monkeypatch):
    asked = []
    monkeypatch.setattr("hf_quant.quantize.fuse_where_possible", lambda m, only_on: asked.append(only_on) or (0, ""))
    model = nn.Linear(4, 4).eval()
    for setting in (None, True, False):
        fuse_as_configured_(model, setting)
    fuse_as_configured_(model.train(), None)
    assert asked == [("cuda", "xpu"), None]
