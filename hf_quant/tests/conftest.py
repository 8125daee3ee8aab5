"""What every unit test gets: one thread, no network, and NaN in fresh memory for the tests of ops."""

import os

import hf_quant.tests.environment  # noqa: F401  (before torch)


os.environ["TRITON_INTERPRET"] = "1"  # Triton kernels run on CPU tensors

import pytest  # noqa: E402
import torch  # noqa: E402

from hf_quant.tests.garbage import freeze_older_objects  # noqa: E402, F401
from hf_quant.tests.graphs import forget_graphs  # noqa: E402, F401


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with what no correct result contains: NaN, or the largest integer."""
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return tensor
    if tensor.dtype.is_floating_point and tensor.element_size() == 1:
        tensor.view(torch.uint8).fill_(0x7F)  # NaN in e4m3fn and in e5m2, which have no fill_
    elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
    return tensor


@pytest.fixture
def poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty*` and `Tensor.new_empty*` give NaN instead of whatever lay there.

    Fresh memory is often zero by luck; an op that leaves an element of its output unwritten must not pass for that.
    """
    # torch remembers, at the first use of a device context, which functions make tensors: not these replacements, or
    # no later test of the process could load a model by way of the meta device.
    with torch.device("cpu"):
        torch.empty(0)
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        allocate = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, _allocate=allocate, **kwargs: _poison(_allocate(*args, **kwargs))
        )
