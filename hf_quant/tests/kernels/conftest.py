"""What the tests of kernels share: Triton's interpreter with what it lacks, and which kernels a CPU computes with."""

import pytest

from hf_quant.kernels import native
from hf_quant.tests.kernels.interpreter import install


install()


@pytest.fixture(params=["torch", *native.instruction_sets()])
def cpu_kernels(request):
    with native.using(None if request.param == "torch" else request.param):
        yield request.param


@pytest.fixture
def torch_kernels():
    with native.using(None):
        yield
