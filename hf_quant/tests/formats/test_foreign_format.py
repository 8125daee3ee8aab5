"""A format that the package does not have works everywhere once it is in `FORMATS`: no kernel has to know it.

int5 is in planes that no kernel reads, int6 in those of fp6; nf3 is a table of 8 levels, and fp3
of a kind that they read.
"""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from hf_quant import FORMATS, QuantizerConfig, dequantize_, load_quantized_, plan, quantize_, save_quantized
from hf_quant.algorithms import ALGORITHMS, quantize_matrix
from hf_quant.checkpoint import inspect_checkpoint
from hf_quant.formats import Format
from hf_quant.formats.integer import packed_integer
from hf_quant.formats.minifloat import minifloat_round, minifloat_snap
from hf_quant.kernels import native
from hf_quant.kernels.codes import CODES, CodeSpec, minifloat_codes, register_codes
from hf_quant.kernels.gpu.launch import TARGETS, pretend, record_launches
from hf_quant.kernels.grouped_mm.gpu import grouped_mm_gpu
from hf_quant.kernels.grouped_mm.gpu_backward import grouped_mm_backward_gpu
from hf_quant.kernels.grouped_mm.op import grouped_mm_backward_reference, grouped_mm_reference
from hf_quant.kernels.weight_only.gpu import weight_only_mm_gpu
from hf_quant.kernels.weight_only.gpu_dequantize import dequantize_gpu
from hf_quant.kernels.weight_only.op import dequantize_reference, weight_only_mm_reference
from hf_quant.scheme import TensorQuant
from hf_quant.testing import assert_close, assert_sqnr
from hf_quant.tests.kernels.interpreter import install
from hf_quant.tests.modules.test_experts import experts


install()


def nearest(levels: Tensor) -> tuple:
    middle = (levels[1:] + levels[:-1]) / 2

    def encode(values: Tensor) -> Tensor:
        return torch.bucketize(values, middle).to(torch.uint8)

    def snap(values: Tensor, out: Tensor) -> Tensor:
        return out.copy_(levels[torch.bucketize(values, middle)])

    return encode, snap


def table() -> Format:
    levels = torch.tensor([-1.0, -0.6, -0.33, -0.1, 0.0, 0.21, 0.5, 1.0])
    spec = CodeSpec("nf3", 3, torch.int32, (2, 1), tuple(levels.tolist()))
    round_, snap = nearest(levels)
    return Format(spec, max=1.0, round=round_, snap=snap, granularity="group", group_size=64)


def float3() -> Format:
    spec = minifloat_codes("fp3", 2, 0, (2, 1))
    return Format(
        spec,
        max=max(spec.levels),
        round=minifloat_round(max(spec.levels), 0, bias=1, sign=4),
        snap=minifloat_snap(max(spec.levels), 0, bias=1),
        granularity="group",
        group_size=64,
    )


MAKE = {
    "int5": lambda: packed_integer(5, (4, 1), group_size=64, symmetric=True),
    "int6": lambda: packed_integer(6, (4, 2), group_size=64, symmetric=False),
    "nf3": table,
    "fp3": float3,
}
DECIBELS = {"int5": (25, 33), "int6": (31, 39), "nf3": (12, 20), "fp3": (9, 20)}


@pytest.fixture(params=MAKE)
def name(request) -> Iterator[str]:
    """The name of a format that is known for the time of one test."""
    format = MAKE[request.param]()
    FORMATS[format.name] = format
    try:
        yield format.name
    finally:
        del FORMATS[format.name], CODES[format.name]


def layer(N: int = 96, K: int = 192, dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, N, dtype=dtype))


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers(name, dtype, kernels):
    low, high = DECIBELS[name]
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(1)).to(dtype)
    with native.using(native.active() if kernels == "native" else None):
        for algorithm in (*ALGORITHMS, None):
            for fields in ({}, {"granularity": "row"}, {"activations": "int8"}, {"activations": "fp8"}):
                exact = layer(dtype=dtype)
                model = quantize_(copy.deepcopy(exact), {"weights": name, "algorithm": algorithm, **fields})
                assert model[0].scheme.weight.format == name
                weight = model[0].dequantize_weight().double()
                at_least = low - 6 if "granularity" in fields or algorithm == "absmax" else low
                assert_sqnr(weight, exact[0].weight, at_least=at_least, at_most=high)
                for rows in (x, x[:1], x.requires_grad_()):
                    y, limit = model(rows), 0.05 if "activations" in fields else 0.01
                    assert_close(y, rows.double() @ weight.t() + model[0].bias.double(), rms=limit)
                model(x).sum().backward()
                assert_close(x.grad, weight.sum(0).expand(5, -1), rms=0.01)
                x = x.detach()


def test_native_kernels_choose_the_codes_of_torch(name):
    for algorithm in ALGORITHMS:
        found = []
        for use in (native.active(), None):
            with native.using(use):
                found.append(quantize_(layer(), {"weights": name, "algorithm": algorithm}).state_dict())
        assert all(torch.equal(tensor, found[1][key]) for key, tensor in found[0].items())


def test_embeddings_convolutions_and_experts(name):
    torch.manual_seed(0)
    model = nn.ModuleDict({"embedding": nn.Embedding(64, 96), "conv": nn.Conv1d(96, 32, 3)})
    exact = copy.deepcopy(model)
    quantize_(model, {"weights": None, "modules": {"*": name}})
    for key, module in model.items():
        low, high = DECIBELS[name]
        assert_sqnr(module.dequantize_weight(), exact[key].weight, at_least=low - 6, at_most=high)
    same = dequantize_(copy.deepcopy(model))
    ids = torch.arange(24).view(2, 12)
    y = model["conv"](model["embedding"](ids).mT)
    assert_close(y, same["conv"](same["embedding"](ids).mT), rms=1e-6)
    routed, reference = experts("mixtral", name)
    x, chosen = torch.randn(6, 64), torch.randint(0, 4, (6, 2))
    assert_close(routed(x, chosen, torch.ones(6, 2)), reference(x, chosen, torch.ones(6, 2)), rms=1e-5)


def test_plan_checkpoint_and_inspection(name, tmp_path):
    model = layer(dtype=torch.bfloat16)
    entry = plan(model, name).quantized["0"]
    assert ("native" in entry.kernel("cpu")) == (name == "fp3" and native.active() is not None)
    assert ("registers" in entry.kernel("cuda")) == (name in ("int6", "fp3"))
    assert f"{name} " in str(plan(model, name))
    quantize_(model, QuantizerConfig(name))
    save_quantized(model, tmp_path)
    again = load_quantized_(layer(dtype=torch.bfloat16), tmp_path)
    assert all(torch.equal(tensor, again.state_dict()[key]) for key, tensor in model.state_dict().items())
    assert torch.equal(again(torch.ones(2, 192).bfloat16()), model(torch.ones(2, 192).bfloat16()))
    assert name in str(inspect_checkpoint(tmp_path))


@pytest.mark.parametrize("target", ["sm90", "gfx942"])
def test_gpu_kernels_decode_it_or_leave_it(name, target):
    """In Triton's interpreter, for sm90 by the PTX."""
    format = FORMATS[name]
    quant = TensorQuant(name, "group", 64, symmetric=format.symmetric, scale_dtype="bfloat16")
    generator = torch.Generator().manual_seed(0)
    packed = quantize_matrix(torch.randn(3, 40, 128, generator=generator), quant)
    x, offsets = torch.randn(9, 128, generator=generator).bfloat16(), torch.tensor([2, 2, 9], dtype=torch.int32)
    one, options = [part if part is None else part[1] for part in packed], {"format": name, "group_size": 64}
    grad = x[:, :40]
    with pretend(TARGETS[target]):
        whole = dequantize_gpu(*packed, **options, K=128, dtype=torch.float32)
        y = weight_only_mm_gpu(x, *one, None, **options)
        routed = grouped_mm_gpu(x, *packed, None, offsets, activation=None, **options)
        back = grouped_mm_backward_gpu(grad, *packed, offsets, **options, K=128)
        with record_launches() as launches:
            weight_only_mm_gpu(x, *one, None, **options)
    assert bool(launches) == (name in ("int6", "fp3"))
    assert torch.equal(whole, dequantize_reference(*packed, **options, K=128, dtype=torch.float32))
    assert_close(y, weight_only_mm_reference(x.float(), *one, None, **options), rms=0.01)
    assert_close(routed, grouped_mm_reference(x.float(), *packed, None, offsets, activation=None, **options), rms=0.01)
    assert_close(back, grouped_mm_backward_reference(grad.float(), *packed, offsets, **options, K=128), rms=0.01)


def test_names_and_planes_are_checked():
    register_codes(CODES["int4"])  # the same again
    with pytest.raises(ValueError, match="know other codes by the name 'int4'"):
        register_codes(CODES["int4"]._replace(planes=(2, 2)))
    with pytest.raises(ValueError, match="together 5"):
        register_codes(CodeSpec("int5", 5, torch.int32, (5,)))
    assert "int5" not in CODES
