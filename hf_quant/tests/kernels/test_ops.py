"""Every op: its registration passes `opcheck`, it compiles without graph breaks and without recompiling per length."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from hf_quant import kernels
from hf_quant.formats import FORMATS
from hf_quant.kernels.dispatch import Problem, explain
from hf_quant.tests.kernels.cases import QUANTS, packed_case


N, K = 64, 128
QUANT = QUANTS[4]
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def codes(rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, K).mul_(30).to(dtype)


def calls(x: torch.Tensor) -> dict:
    """{op name: (op, tensors, keyword arguments)} with x [M, K]; what depends on M is derived from x."""
    packed, options = packed_case(QUANT, N, K)
    stack = [part if part is None else torch.stack([part, part]) for part in packed]
    bias, grad = torch.randn(N).to(x.dtype), x[:, :N]
    ones, columns = x[:, :1].float() * 0 + 1, torch.rand(N, 1)
    offsets = torch.tensor([1, x.shape[0]], dtype=torch.int32)
    grouped, norm = {"activation": None, **options}, {"eps": 1e-6, "plus_one": True, "rounds": False}
    return {
        "weight_only_mm": (kernels.weight_only_mm, (x, *packed, bias), options),
        "weight_only_mm_backward": (kernels.weight_only_mm_backward, (grad, *packed), {**options, "K": K}),
        "dequantize": (kernels.dequantize, (*packed,), {**options, "K": K, "dtype": torch.bfloat16}),
        "dynamic_mm": (kernels.dynamic_mm, (x, *packed, bias), {**options, "activation": "int8"}),
        "quantized_mm": (
            kernels.quantized_mm,
            (*kernels.quantize_rowwise(x, format="int8"), *packed, bias),
            {**options, "out_dtype": x.dtype},
        ),
        "quantize_rowwise": (kernels.quantize_rowwise, (x,), {"format": "int8"}),
        "quantize_rowwise_at_random": (kernels.quantize_rowwise, (x, torch.tensor(1)), {"format": "fp8_e4m3"}),
        "quantize_static": (kernels.quantize_static, (x, torch.rand(1), torch.ones(2, K // 2)), {"format": "int8"}),
        "dynamic_mm_static": (
            kernels.dynamic_mm,
            (x, *packed, bias, torch.ones(2, K // 2), torch.rand(1)),
            {**options, "activation": "int8"},
        ),
        "rms_norm_quantize_rowwise": (
            kernels.rms_norm_quantize_rowwise,
            (x, torch.rand(K)),
            {"eps": 1e-6, "format": "int8"},
        ),
        "layer_norm_quantize_rowwise": (
            kernels.layer_norm_quantize_rowwise,
            (x, None, None, torch.rand(1, K), torch.rand(1, K)),
            {"eps": 1e-6, "format": "int8"},
        ),
        "act_quantize_rowwise": (kernels.act_quantize_rowwise, (x, None), {"act": "silu", "format": "int8"}),
        "rms_norm": (kernels.rms_norm, (x, torch.rand(K).to(x.dtype)), norm),
        "add_rms_norm": (kernels.add_rms_norm, (x, x, None), norm),
        "gate": (kernels.gate, (x[:, :N], x[:, N:]), {"act": "silu"}),
        "rotary": (
            kernels.rotary,
            (x.reshape(1, -1, 4, 32), grad.reshape(1, -1, 2, 32), x[None, :, :16], x[None, :, :16], None, None),
            {"pairs": "halves", "rounds": True, "eps": 1e-6, "plus_one": False, "norm_rounds": True},
        ),
        "hadamard": (kernels.hadamard, (x,), {}),
        "hadamard_quantize_rowwise": (kernels.hadamard_quantize_rowwise, (x,), {"block_size": 32, "format": "int8"}),
        "int8_scaled_mm": (
            kernels.int8_scaled_mm,
            (x.to(torch.int8), codes(N, torch.int8), ones, columns, bias),
            {"out_dtype": torch.bfloat16},
        ),
        "fp8_scaled_mm": (
            kernels.fp8_scaled_mm,
            (x.to(torch.float8_e4m3fn), codes(N, torch.float8_e4m3fn), ones, columns, None),
            {"out_dtype": torch.bfloat16},
        ),
        "grouped_mm": (kernels.grouped_mm, (x, *stack, None, offsets), grouped),
        "grouped_mm_backward": (kernels.grouped_mm_backward, (grad, *stack, offsets), {**options, "K": K}),
    }


@pytest.mark.parametrize("name", calls(torch.randn(3, K)))
def test_opcheck(name):
    for x in (torch.randn(3, K).bfloat16(), torch.randn(K, 3).t()):
        op, tensors, options = calls(x)[name]
        # opcheck's test of the schema multiplies the arguments, which torch does not implement for float8.
        tests = [test for test in OPCHECKS if name != "fp8_scaled_mm" or test != "test_schema"]
        opcheck(op, tensors, options, test_utils=tests)


@pytest.mark.parametrize("name", sorted(calls(torch.randn(3, K)).keys() - {"dequantize", "rotary"}))  # no [M, K]
def test_ten_lengths_compile_once(name):
    counter = CompileCounterWithBackend("aot_eager")
    op, tensors, options = calls(torch.randn(8, K))[name]
    with_offsets = name.startswith("grouped")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def run(first, rest):
        return op(first, *rest, **options)

    for M in (2, 3, 5, 7, 17, 33, 40, 41, 100, 257):
        x = tensors[0][:1].to(torch.float32).repeat(M, 1).to(tensors[0].dtype)
        rest = (*tensors[1:-1], torch.tensor([1, M], dtype=torch.int32)) if with_offsets else tensors[1:]
        row_scale = torch.ones(M, 1)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(row_scale, 0)
        if name.endswith("scaled_mm"):
            rest = (rest[0], row_scale, *rest[2:])
        elif name == "quantized_mm":
            rest = (row_scale, *rest[1:])
        elif name in ("add_rms_norm", "gate"):
            rest = (x * 2, *rest[1:])
        y, eager = run(x, rest), op(x, *rest, **options)
        for mine, expected in zip(y if isinstance(y, tuple) else (y,), eager if isinstance(y, tuple) else (eager,)):
            assert mine.shape == expected.shape and mine.dtype == expected.dtype
            assert torch.equal(mine.float(), expected.float())
        if M == 2:
            compiled = counter.frame_count  # 2 where a float argument makes the first compilation start again
    assert counter.frame_count == compiled <= 2


@pytest.mark.parametrize("format", FORMATS)
def test_the_plan_can_explain_every_path(format):
    """Some path serves every format, and a path that does not says why."""
    for op, activation in ((kernels.weight_only_mm, None), (kernels.dynamic_mm, "int8"), (kernels.grouped_mm, None)):
        for dtype in (torch.bfloat16, torch.float32):
            for shape in ((14336, 4096), (7, 33)):
                problem = Problem(format, 32, *shape, dtype, activation=activation)
                rows = explain(op, "cpu", problem)
                assert any(reason is None for *_, reason in rows)
                assert "reference" not in [name for name, *_ in rows]
                assert all(name and when and (reason is None or len(reason) > 8) for name, when, reason in rows)
