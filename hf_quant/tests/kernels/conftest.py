"""Which kernels the CPU computes with: every instruction set that is at hand, and torch's own ops."""

import pytest

from hf_quant.kernels import native


@pytest.fixture(params=["torch", *native.instruction_sets()])
def cpu_kernels(request):
    with native.using(None if request.param == "torch" else request.param):
        yield request.param


@pytest.fixture
def torch_kernels():
    with native.using(None):
        yield
