"""16-bit scales on their way between processes: neither gloo nor NCCL can send int16, as which they are stored.

The same memory can be sent as bytes. So DistributedDataParallel copies the frozen parameters of rank 0, too, and the
whole state of a sharded model can be gathered to be saved, and be loaded from one process.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def as_bytes(value: Any) -> Any:
    """A view of an int16 tensor [...] as bytes [..., 2], also in a list; all else as it is."""
    if isinstance(value, list):
        return [as_bytes(item) for item in value]
    is_int16 = isinstance(value, Tensor) and value.dtype == torch.int16
    return value.unsqueeze(-1).view(torch.uint8) if is_int16 else value


def _in_place(host: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a collective that writes to the memory of its arguments."""

    @functools.wraps(host)
    def send(*args: Any, **kwargs: Any) -> Any:
        return host(*map(as_bytes, args), **{name: as_bytes(value) for name, value in kwargs.items()})

    return send


def _gathering(host: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a collective that returns what it has gathered."""

    @functools.wraps(host)
    def gather(self: Tensor, gather_dim: int, *args: Any, **kwargs: Any) -> Tensor:
        if self.dtype != torch.int16:
            return host(self, gather_dim, *args, **kwargs)
        gathered = host(as_bytes(self.contiguous()), gather_dim % self.dim(), *args, **kwargs)
        return getattr(gathered, "wait", lambda: gathered)().view(torch.int16).squeeze(-1)

    return gather


def send_int16_as_bytes() -> None:
    """Have torch send int16 tensors as bytes where it copies or gathers parameters; all else goes as before."""
    if not dist.is_available():
        return
    import torch.distributed._functional_collectives as functional
    import torch.distributed.tensor._collective_utils as of_dtensors

    for module in (dist, dist.distributed_c10d, of_dtensors):
        for name in ("broadcast", "scatter", "_broadcast_coalesced"):
            _replace(module, name, _in_place)
    for name in ("all_gather_single", "all_gather_tensor"):  # the older name calls the newer one, where there is one
        _replace(functional, name, _gathering)


def _replace(module: Any, name: str, wrapper: Callable[..., Callable[..., Any]]) -> None:
    host = getattr(module, name, None)
    if host is not None and not hasattr(host, "_hf_quant"):
        wrapped = wrapper(host)
        wrapped._hf_quant = True
        setattr(module, name, wrapped)


send_int16_as_bytes()
