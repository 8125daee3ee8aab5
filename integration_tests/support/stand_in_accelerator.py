"""An accelerator on the CPU for the group offloading of diffusers: copies, streams, pinned memory, all observed.

With onload and offload device both "cpu" the host would move nothing. Here every transfer is a copy, and what was
copied to the "device" is filled with garbage once its group goes back: whatever kept it computes with that.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from diffusers.hooks import group_offloading
from torch import Tensor, nn


class Stream:
    """Stream with the methods that group offloading uses."""

    def synchronize(self) -> None:
        """Everything is done at once."""


class Accelerator:
    """In the place of `torch.cuda` and of the backend that diffusers asks for it; counts what happens.

    Attributes:
        pinned, onloaded, recorded: tensors that were pinned, copied to the "device", and given to a stream.
    """

    Stream = Stream

    def __init__(self) -> None:
        self.pinned = self.onloaded = self.recorded = 0
        self._resident: dict[Any, list[Tensor]] = {}

    def stream(self, stream: Stream) -> Any:
        return nullcontext()

    def current_stream(self) -> Stream:
        return Stream()

    def onload(self, group: Any, tensor: Tensor, source: Tensor, default_stream: Stream | None) -> None:
        """`ModuleGroup._transfer_tensor_to_device`."""
        moved = source.clone()
        self.onloaded += 1
        self._resident.setdefault(group, []).append(moved)
        tensor.data = moved
        if group.record_stream:
            tensor.data.record_stream(default_stream)

    def leave(self, group: Any) -> None:
        """The memory of a group on the "device" is free for others."""
        for tensor in self._resident.pop(group, ()):
            tensor.view(torch.uint8).fill_(0x7E)

    @contextmanager
    def installed(self, monkeypatch: Any) -> Iterator["Accelerator"]:
        """Patch torch and diffusers for the time of the context."""
        cls, accelerator = group_offloading.ModuleGroup, self
        to_memory = cls._offload_to_memory

        def pin(tensor: Tensor, *args: Any) -> Tensor:
            accelerator.pinned += 1
            return tensor.clone()

        def record(tensor: Tensor, stream: Stream) -> None:
            assert isinstance(stream, Stream)
            accelerator.recorded += 1

        def offload(group: Any) -> None:
            if group.stream is None:  # the host moves modules with `.to`; here they are there already
                copies = {
                    p: p.data.clone() for module in group.modules for p in (*module.parameters(), *module.buffers())
                }
                copies.update({p: p.data.clone() for p in (*group.parameters, *group.buffers)})
                for tensor, copy in copies.items():
                    tensor.data = copy
            to_memory(group)
            accelerator.leave(group)

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "pin_memory", pin)
            patch.setattr(torch.Tensor, "record_stream", record, raising=False)
            patch.setattr(group_offloading, "TorchDeviceBackend", lambda device: accelerator)
            patch.setattr(cls, "_transfer_tensor_to_device", lambda *args: accelerator.onload(*args))
            patch.setattr(cls, "_offload_to_memory", offload)
            yield self


def enable_group_offload(
    model: nn.Module, offload_type: str, *, use_stream: bool, record_stream: bool, low_cpu_mem_usage: bool = False
) -> None:
    """`model.enable_group_offload` without its refusal of streams on a CPU; within `Accelerator.installed`."""
    device = torch.device("cpu")
    config = group_offloading.GroupOffloadingConfig(
        onload_device=device,
        offload_device=device,
        offload_type=group_offloading.GroupOffloadingType(offload_type),
        num_blocks_per_group=1 if offload_type == "block_level" else None,
        non_blocking=False,
        stream=Stream() if use_stream else None,
        record_stream=record_stream,
        low_cpu_mem_usage=low_cpu_mem_usage,
    )
    group_offloading._apply_group_offloading(model, config)
