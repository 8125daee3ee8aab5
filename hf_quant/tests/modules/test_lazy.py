"""Lazy inputs: codes by one kernel for a quantized layer, the host's own tensor, to the bit, for everybody else."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_quant import quantize_
from hf_quant.kernels import act_quantize_rowwise, layer_norm_quantize_rowwise
from hf_quant.modules.inputs.lazy import LazyAct, LazyNorm
from hf_quant.testing import assert_sqnr


B, S, K = 2, 24, 64


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def lazy_norm(x: Tensor, norm: nn.LayerNorm) -> LazyNorm:
    return LazyNorm(x, norm, norm.weight, norm.bias, norm.eps)


def modulated(y: Any, order: str, scale: Tensor, shift: Tensor) -> Any:
    """What blocks of diffusers do with the result of a norm, in the ways in which they write it."""
    if order == "factor first":
        return (1 + scale) * y + shift
    if order == "shift first":
        return shift + y * (1 + scale)
    return torch.add(torch.mul(y, 1 + scale), shift)


@pytest.mark.parametrize("order", ["factor first", "shift first", "functions"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("images", [1, B])
@torch.no_grad()
def test_a_modulated_norm(images, dtype, order):
    x, norm = values(B, S, K, dtype=dtype), nn.LayerNorm(K).to(dtype)
    norm.weight.copy_(values(K, seed=3))
    scale, shift = values(images, 1, K, seed=1, dtype=dtype), values(1, 1, K, seed=2, dtype=dtype)
    lazy, expected = (modulated(y, order, scale, shift) for y in (lazy_norm(x, norm), norm(x)))
    assert type(lazy) is LazyNorm and lazy.shape == expected.shape and lazy.dtype == dtype and lazy.ndim == 3
    assert torch.equal(lazy.tensor(), expected)
    codes, row_scale = lazy.rows("int8", None)
    assert lazy.rows("int8", None)[0] is codes
    decoded = codes * row_scale
    assert_sqnr(decoded, expected.float(), at_least=38, at_most=60)
    factor = (1 + scale).float().expand(B, 1, K).reshape(B, K) - 1
    exact = layer_norm_quantize_rowwise(
        x, norm.weight, norm.bias, factor, shift.expand(B, 1, K).reshape(B, K), eps=norm.eps, format="int8"
    )
    assert torch.equal(codes, exact[0]) and torch.equal(row_scale, exact[1])


@torch.no_grad()
def test_what_no_kernel_computes_is_the_tensor_of_the_host():
    x, norm = values(B, S, K), nn.LayerNorm(K, elementwise_affine=False)
    lazy, plain = lazy_norm(x, norm), norm(x)
    per_token, fp32, table = values(B, S, K, seed=1), values(1, 1, K, dtype=torch.float32), values(K)
    for other in (per_token, fp32, table, 2.0):
        for result, expected in ((lazy * other, plain * other), (other * lazy, other * plain)):
            assert type(result) is Tensor and torch.equal(result, expected)
        assert torch.equal(lazy + other, plain + other)
    vector = values(1, 1, K)
    twice = (lazy * vector) * vector
    assert torch.equal(twice, plain * vector * vector)
    assert torch.equal((lazy + vector) * vector, (plain + vector) * vector)
    both = torch.cat([lazy, x], dim=1)
    assert torch.equal(both, torch.cat([plain, x], dim=1))
    assert torch.equal(lazy.view(B * S, K), plain.view(B * S, K)) and torch.equal(lazy[0], plain[0])
    assert torch.equal(lazy - x, plain - x) and torch.equal(x - lazy, x - plain) and torch.equal(-lazy, -plain)
    assert torch.equal(lazy / 2, plain / 2) and torch.equal(lazy @ x[0].T, plain @ x[0].T) and len(lazy) == B
    assert torch.equal(lazy**2, plain**2) and torch.equal(lazy > 0, plain > 0) and torch.equal(lazy < x, plain < x)
    assert torch.equal(lazy == plain, plain == plain) and not (lazy != plain).any() and lazy in {lazy}
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(lazy)
    assert torch.equal(F.linear(lazy, x[0]), F.linear(plain, x[0]))
    assert torch.equal(lazy.to(torch.float32), plain.float())
    with pytest.raises(AttributeError):
        lazy.__unknown__  # noqa: B018


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("with_up", [True, False])
@torch.no_grad()
def test_an_activation(act, with_up):
    x, up = values(B, S, K), values(B, S, K, seed=1) if with_up else None
    function = {"gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu}[act]

    def host() -> Tensor:
        return function(x) if up is None else up * function(x)

    lazy = LazyAct(x, up, act, host)
    assert torch.equal(lazy.tensor(), host())
    codes, row_scale = lazy.rows("fp8_e4m3", None)
    exact = act_quantize_rowwise(x, up, act=act, format="fp8_e4m3")
    assert torch.equal(codes.float(), exact[0].float()) and torch.equal(row_scale, exact[1])
    dropped = nn.Dropout(0.5).eval()(lazy)
    assert dropped is lazy
    assert type(nn.Dropout(0.5).train()(lazy)) is Tensor


@pytest.mark.parametrize("scheme", ["W8A8", "W8A8_FP8", "W4A8", "int8"])
@torch.no_grad()
def test_layers_that_read_one(scheme):
    x, norm = values(B, S, K), nn.LayerNorm(K)
    torch.manual_seed(0)
    plain = nn.ModuleList(nn.Linear(K, 64) for _ in range(2)).bfloat16()
    expected = [layer(norm.bfloat16()(x)) for layer in plain]
    layers, lazy = quantize_(plain, scheme), lazy_norm(x, norm)
    for layer, y in zip(layers, expected):
        assert_sqnr(layer(lazy), y, at_least=15 if scheme == "W4A8" else 28, at_most=55)
        if scheme == "int8":  # it reads 16 bit
            assert torch.equal(layer(lazy), layer(norm(x)))
    if scheme == "W8A8":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(layers[0](lazy), layers[0](norm(x)))
        with torch.enable_grad():
            source = x.clone().requires_grad_()
            layers[0](norm(source)).sum().backward()
            assert source.grad is not None


@torch.no_grad()
def test_a_source_that_changes_is_an_error():
    x = values(B, S, K)
    lazy = LazyAct(x, None, "silu", lambda: F.silu(x))
    kept = LazyAct(x, None, "silu", lambda: F.silu(x)).tensor()
    x.zero_()
    for read in (lazy.tensor, lambda: lazy.rows("int8", None)):
        with pytest.raises(RuntimeError, match="was changed in place"):
            read()
    assert kept.abs().sum() > 0
