"""Places of parameters: their rows and columns, those of a shard in the whole, and states that are sharded alike."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer


@contextmanager
def dropped_if_refused(optimizer: Optimizer) -> Iterator[None]:
    """A body that adds a group to an optimizer; the group goes again if the body raises."""
    count = len(optimizer.param_groups)
    try:
        yield
    except BaseException:
        del optimizer.param_groups[count:]
        raise


class Place(NamedTuple):
    """The part of a parameter that this process has, as a matrix: dimensions after the first are taken as one.

    A vector is one row. `row` and `column` are where the part begins in the whole parameter of `shape` (N, K);
    `columns` are those of the largest part, which is the same number in every process.
    """

    shape: tuple[int, int]
    local_shape: tuple[int, int]
    row: int
    column: int
    columns: int


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """[N, ...] as a matrix: (N, K); a vector or a number: (1, K)."""
    return (shape[0], shape[1:].numel()) if len(shape) > 1 else (1, shape.numel())


def local(tensor: Tensor) -> Tensor:
    """A DTensor's shard, any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def sharded_alike(gradient: Any, p: Any) -> Tensor:
    """A gradient as it is, or, where tensor parallelism has left it whole or as parts of a sum, sharded as p is."""
    if getattr(gradient, "placements", None) == getattr(p, "placements", None):
        return gradient
    if not hasattr(gradient, "placements"):
        raise ValueError(f"the gradient of a parameter that is sharded as {p.placements} is no DTensor")
    return gradient.redistribute(p.device_mesh, p.placements)


def place_of(p: Tensor) -> Place:
    """Return the place of a parameter.

    Raises:
        ValueError: it is sharded in a way that is not one block of its matrix.
    """
    shape = matrix_shape(p.shape)
    if not hasattr(p, "device_mesh") or not hasattr(p, "placements"):
        return Place(shape, shape, 0, 0, shape[1])
    sizes, starts = shard_of(p.shape, p, p.device_mesh.get_coordinate())
    cut = [dim for dim, size in enumerate(sizes) if size != p.shape[dim]]
    if tuple(sizes) != tuple(local(p).shape) or any(dim > 1 or (dim == 1 and p.dim() > 2) for dim in cut):
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} is sharded as {p.placements}; allowed: shards of its rows, or "
            "of the columns of a matrix"
        )
    first, second = (0, starts[0]) if p.dim() < 2 else (starts[0], starts[1])
    largest, _ = shard_of(p.shape, p, [0] * p.device_mesh.ndim)
    return Place(shape, matrix_shape(torch.Size(sizes)), first, second, matrix_shape(torch.Size(largest))[1])


def shard_of(shape: torch.Size, p: Any, coordinate: list[int]) -> tuple[list[int], list[int]]:
    """(sizes, starts) of the part that a process of the mesh has of a tensor that is sharded as the DTensor p."""
    sizes, starts = list(shape), [0] * len(shape)
    # FSDP2 shards once more what tensor parallelism has sharded, which it writes as a strided shard before it.
    order = sorted(enumerate(p.placements), key=lambda pair: hasattr(pair[1], "split_factor"))
    for mesh_dim, placement in order:
        if placement.is_partial():
            raise ValueError(
                f"a parameter of shape {tuple(shape)} is {p.placements}: its parts must be summed up first"
            )
        if not placement.is_replicate():
            dim, chunk = placement.dim, -(-sizes[placement.dim] // p.device_mesh.size(mesh_dim))
            start = min(coordinate[mesh_dim] * chunk, sizes[dim])
            sizes[dim] = min(chunk, sizes[dim] - start)
            starts[dim] += start
    return sizes, starts


def zeros(p: Tensor, shape: tuple[int, ...], local_shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros of a shape, of which this process has local_shape, sharded as p is."""
    found = torch.zeros(local_shape, dtype=torch.uint8, device=p.device).view(dtype) if dtype.itemsize == 1 else None
    if found is None:
        found = torch.zeros(local_shape, dtype=dtype, device=p.device)
    if not hasattr(p, "device_mesh") or not hasattr(p, "placements"):
        return found
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, dtype=dtype, device="meta").stride()
    return DTensor.from_local(
        found, p.device_mesh, p.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
