"""16-bit products in fp32: which ones, what they give, and when."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_quant.calibration.fp32 import fast_products
from hf_quant.testing import sqnr


class Dtypes(TorchDispatchMode):
    """Notes the dtypes of the products that run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in ("mm", "convolution")):
            self.found.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    """An output and the gradients of a linear layer, a convolution and a product of batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(8, 16, 3, padding=1), nn.Linear(32, 32)).to(dtype)
    y = model(torch.randn(4, 8, 32).to(dtype))
    y = y @ y.mT
    y.float().square().mean().backward()
    return [y.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_run_in_fp32_where_the_cpu_has_avx2_alone(dtype, monkeypatch):
    exact = gradients(torch.float32)
    for capability, expected in (("AVX2", torch.float32), ("AVX512", dtype)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        with Dtypes() as ran, fast_products():  # the outer mode sees what the inner one does
            found = gradients(dtype)
        assert ran.found == {expected}
        for value, wanted in zip(found, exact):
            assert value.dtype == dtype and sqnr(value.float(), wanted) > 35
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    with Dtypes() as ran, fast_products():
        assert all(value.dtype == torch.float32 for value in gradients(torch.float32))
    assert ran.found == {torch.float32}
