"""Layers that read one tensor quantize it once: the same bits, and never codes of something else."""

import copy
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from hf_quant import dequantize_, quantize_
from hf_quant.modules import QuantLinear
from hf_quant.modules.inputs import rows
from hf_quant.modules.inputs.shared_rows import SharedInput, SharedRows
from hf_quant.tests.recording import Calls


class Block(nn.Module):
    """Attention in the shape that diffusers gives it: a processor calls the projections."""

    def __init__(self, processor: Any) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(64, 64) for _ in range(3))
        self.to_out, self.processor = nn.Linear(64, 64, bias=False), processor

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.processor(self, hidden_states)


def project(attn: Block, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query = attn.to_q(x)
    key = attn.to_k(x)
    value = attn.to_v(x)
    return query, key, value


class Processor:
    def __call__(self, attn: Block, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = project(attn, hidden_states)
        return attn.to_out(torch.sigmoid(query + key) * value)


class ChangingProcessor:
    """Reads the same object thrice, but not the same values."""

    def __call__(self, attn: Block, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states.clone()
        query = attn.to_q(hidden_states)
        hidden_states.mul_(2.0)
        key = attn.to_k(hidden_states)
        hidden_states += 1
        return attn.to_out(torch.sigmoid(query + key) * attn.to_v(hidden_states))


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    rows._local.__dict__.clear()
    yield


def block(processor: Any = None, scheme: str = "W8A8_FP8", dtype: torch.dtype = torch.float32) -> Block:
    torch.manual_seed(0)
    return quantize_(Block(processor or Processor()).to(dtype).eval(), scheme)


def shared(module: QuantLinear) -> SharedInput | None:
    return module.rule.group if isinstance(module.rule, SharedRows) else None


def alone(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The output with every layer quantizing its own input."""
    with monkeypatch.context() as patch:
        patch.setattr(rows, "MIN_SHARED_ROWS", 10**9)
        return model(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ["W8A8_FP8", "W4A8_FP8", "FP8_BLOCK"])
@torch.no_grad()
def test_one_quantization_for_three_layers(monkeypatch, scheme, dtype):
    model, x = block(scheme=scheme, dtype=dtype), torch.randn(2, 16, 64).to(dtype)
    expected = alone(model, x, monkeypatch)
    with Calls() as calls:
        y = model(x)
    assert torch.equal(y, expected) and y.dtype == dtype
    assert calls.counts == {"quantize_rowwise": 2, "quantized_mm": 4}


@pytest.mark.parametrize(("scheme", "M"), [("W8A8_FP8", 15), ("W8A8", 40)])
@torch.no_grad()
def test_what_is_quantized_by_the_product(scheme, M):
    model, x = block(scheme=scheme), torch.randn(M, 64)
    with Calls() as calls:
        model(x)
    assert calls.counts == {"dynamic_mm": 4}  # few tokens, or int8 on a CPU


@torch.no_grad()
def test_a_changed_input_is_quantized_again(monkeypatch):
    model, x = block(ChangingProcessor()), torch.randn(16, 64)
    assert torch.equal(model(x), alone(model, x, monkeypatch))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))
    first = model.to_q(x)
    assert torch.equal(model.to_q(x), first)
    x[0] *= 3
    assert not torch.equal(model.to_q(x), first)
    assert torch.equal(model.to_q(x), model.to_q(x.clone()))


@torch.no_grad()
def test_a_write_that_counts_no_version_between_two_passes():
    model, x = block(), torch.randn(16, 64)
    for layer in (model.to_q, model.to_k):
        layer(x)
    x.data.mul_(-3)  # as do NumPy, other libraries' kernels and the replay of a CUDA graph
    for layer in (model.to_q, model.to_k):
        assert torch.equal(layer(x), layer(x.clone()))


@torch.no_grad()
def test_another_tensor_in_the_same_memory_is_another_input():
    model, x = block(), torch.randn(16, 64)
    expected = model.to_q(-x)
    model.to_q(x)
    y = x.view(16, 64)
    y.neg_()  # counts for x, too: they share a version
    assert torch.equal(model.to_q(x), expected) and torch.equal(model.to_q(y), expected)


@torch.no_grad()
def test_nothing_is_kept_of_a_tensor_that_is_gone():
    model, x = block(), torch.randn(16, 64)
    model.to_q(x)
    assert rows._local.last is not None
    del x
    gc.collect()
    assert rows._local.last is None


@torch.no_grad()
def test_threads_remember_for_themselves():
    model, x = block(), torch.randn(16, 64)
    expected, results = model.to_q(x), []
    thread = threading.Thread(target=lambda: results.append(model.to_q(x)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], expected)


def test_gradients_and_inference_mode_are_as_before(monkeypatch):
    model, x = block(), torch.randn(16, 64, requires_grad=True)
    model(x).sum().backward()
    with torch.inference_mode():
        y = model(torch.randn(16, 64))
        assert torch.isfinite(y).all()
    with torch.no_grad():
        assert torch.equal(model(x), alone(model, x, monkeypatch))
    assert x.grad.abs().sum() > 0


class Recording(CompileCounterWithBackend):
    """Counts compilations and the calls of quantize_rowwise in what is compiled."""

    def __init__(self) -> None:
        super().__init__("aot_eager")
        self.quantizations = 0

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list) -> Any:
        self.quantizations += sum("quantize_rowwise" in str(node.target) for node in graph.graph.nodes)
        return super().__call__(graph, example_inputs)


@torch.no_grad()
def test_compiled_siblings_share_what_the_source_proves():
    model, counter = block(), Recording()
    expected = {M: model(torch.ones(M, 64)) for M in (16, 40, 300)}
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for M, y in expected.items():
        assert torch.equal(compiled(torch.ones(M, 64)), y)
    assert counter.frame_count == 1 and counter.quantizations == 1  # the last layer has no sibling: dynamic_mm
    assert shared(model.to_q) is shared(model.to_v) is not None and shared(model.to_out) is None
    assert shared(model.to_q).traced is None  # no tensor of the graph is kept
    unproven = block(ChangingProcessor())
    assert shared(unproven.to_q) is None


@torch.no_grad()
def test_compiled_siblings_share_where_dynamo_takes_every_trace_for_an_export(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: torch.compiler.is_dynamo_compiling())  # as torch 2.11
    model, counter, x = block(), Recording(), torch.randn(16, 64)
    assert torch.equal(torch.compile(model, backend=counter, fullgraph=True)(x), model(x))
    assert counter.quantizations == 1


@torch.no_grad()
@pytest.mark.parametrize("name", ["to_q", "to_k", "to_v"])
def test_siblings_of_a_layer_that_is_dequantized(name):
    model, x = block(), torch.randn(16, 64)
    dequantize_(model.get_submodule(name))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    group = next(shared(m) for m in (model.to_q, model.to_v) if isinstance(m, QuantLinear))
    assert not hasattr(model.get_submodule(name), "rule")
    for _ in range(2):
        assert torch.equal(compiled(x), model(x))
        assert group.traced is None
        x.mul_(-3)


@torch.no_grad()
def test_a_sibling_that_is_left_out():
    model, x = block(), torch.randn(16, 64)
    compiled = torch.compile(lambda x: (model.to_q(x), model.to_k(x)), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert all(map(torch.equal, compiled(x), (model.to_q(x), model.to_k(x))))
        x.mul_(-3)


@torch.no_grad()
def test_compiled_siblings_under_autocast():
    model, counter = block(), Recording()
    compiled, x = torch.compile(model, backend=counter, fullgraph=True), torch.randn(16, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(x), model(x))
    assert counter.quantizations == 1
    assert shared(model.to_q).traced is None


@torch.no_grad()
def test_blocks_compile_once():
    blocks = nn.ModuleList(block() for _ in range(3))
    counter, x = Recording(), torch.randn(16, 64)
    for part in blocks:
        part.compile(backend=counter, fullgraph=True)
    for part in blocks:
        assert torch.equal(part(x), part._call_impl(x))
    assert counter.frame_count == 1


@torch.no_grad()
def test_copies_share_among_themselves():
    model = block()
    twin = copy.deepcopy(model)
    assert shared(twin.to_q) is shared(twin.to_k) is not shared(model.to_q)
    x = torch.randn(16, 64)
    assert torch.equal(twin(x), model(x))
