"""A linear layer in training whose weight tensor parallelism has cut: each process multiplies its part."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def by_shards(
    input: Any, weight: Any, bias: Any, multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor]
) -> Tensor:
    """input @ weight.T + bias for a weight [N, K] that is a DTensor; `multiply` computes it for plain tensors.

    A weight cut by rows takes whole inputs and gives a part of the outputs; one cut by columns takes parts of the
    inputs and gives sums that are still to be added up. Inputs that are plain tensors are taken for whole ones. The
    result is a DTensor, as of `torch.nn.functional.linear`.

    Raises:
        ValueError: the weight is cut in another way, or along two dimensions of a mesh.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh, placement = weight.device_mesh, weight.placements[0]
    if len(weight.placements) > 1 or not (placement.is_shard(0) or placement.is_shard(1)):
        raise ValueError(
            f"a weight of shape {tuple(weight.shape)} is sharded as {weight.placements}; allowed in low-bit training: "
            "rows or columns along one dimension of the mesh"
        )
    by_rows = placement.is_shard(0)
    x = input if isinstance(input, DTensor) else DTensor.from_local(input, mesh, [Replicate()], run_check=False)
    x = x.redistribute(mesh, [Replicate() if by_rows else Shard(x.dim() - 1)])
    own = x.to_local(grad_placements=[Partial() if by_rows else Shard(x.dim() - 1)])
    if not by_rows:
        y = DTensor.from_local(multiply(own, weight.to_local(), None), mesh, [Partial()], run_check=False)
        return y if bias is None else y + bias
    if isinstance(bias, DTensor):
        bias = bias.redistribute(mesh, [Shard(0)]).to_local()
    shape = (*x.shape[:-1], weight.shape[0])
    stride = (*[s // x.shape[-1] * weight.shape[0] for s in x.stride()[:-1]], 1)
    y = multiply(own, weight.to_local(), bias)
    return DTensor.from_local(y, mesh, [Shard(x.dim() - 1)], run_check=False, shape=shape, stride=stride)
