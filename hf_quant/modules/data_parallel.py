"""Broadcasts of packed parameters, for DistributedDataParallel and what is built like it.

When a model is wrapped, torch copies the parameters of rank 0 to all ranks, the frozen ones, too. 16-bit scales are
stored as int16, a dtype that neither gloo nor NCCL can send; the same memory can be sent as bytes.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """A view of an int16 tensor [...] as bytes [..., 2], any other tensor as it is."""
    return tensor.unsqueeze(-1).view(torch.uint8) if tensor.dtype == torch.int16 else tensor


def broadcast_int16_as_bytes() -> None:
    """Have torch send int16 tensors as bytes when it broadcasts the state of a module; all else goes as before."""
    if not dist.is_available():
        return
    import torch.distributed.utils as utils

    host = utils._sync_params_and_buffers
    if getattr(host, "sends_int16", False):
        return

    @functools.wraps(host)
    def send(process_group: Any, module_states: list[Tensor], *args: Any, **kwargs: Any) -> None:
        host(process_group, [as_bytes(tensor) for tensor in module_states], *args, **kwargs)

    send.sends_int16 = True
    utils._sync_params_and_buffers = send


broadcast_int16_as_bytes()
