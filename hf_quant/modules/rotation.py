"""The rotation of a layer's input (`scheme.InputTransform`): its signs, and weights in the rotated basis and back.

x @ weight.T = (x * signs @ H) @ (weight * signs @ H).T, where H is the orthonormal Hadamard matrix of each block of
columns: it is symmetric, and its own inverse. Without signs the first column of H, which is constant, would collect
the mean of all channels and be an outlier itself.

All layers have the same signs: those of a block of n columns are the first n bits of pi after the binary point. So a
checkpoint stores nothing of them, layers that read one tensor share its rotation, and a shard of the columns is
rotated as the whole is.
"""

import torch
from torch import Tensor

from hf_quant.kernels import hadamard
from hf_quant.kernels.dispatch import assume_constant_result, mark_static_address
from hf_quant.scheme import InputTransform


# 1024 bits, the highest first.
_PI = (
    "243f6a8885a308d313198a2e03707344a4093822299f31d0082efa98ec4e6c89"
    "452821e638d01377be5466cf34e90c6cc0ac29b7c97c50dd3f84d5b5b5470917"
    "9216d5d98979fb1bd1310ba698dfb5ac2ffd72dbd01adfb7b8e1afed6a267e96"
    "ba7c9045f12c7f9924a19947b3916cf70801f2e2858efc16636920d871574e69"
)
_SIGNS = [-1.0 if bit == "1" else 1.0 for bit in f"{int(_PI, 16):01024b}"]
_num_modes = torch._C._len_torch_dispatch_stack
_made: dict[tuple[int, int, torch.device], Tensor] = {}


def signs(transform: InputTransform, K: int, device: torch.device) -> Tensor:
    """The diagonal of the rotation for the ops of `kernels`: fp32 [K / block_size, block_size], each row the same.

    K may be a shard of the layer's input features. Made once for a width and device. Raises ValueError if K is no
    multiple of the block size.
    """
    key = (transform.block_size, K, device)
    found = _made.get(key)
    return _make(*key) if found is None else found


@assume_constant_result
def _make(block_size: int, K: int, device: torch.device) -> Tensor:
    if K % block_size:
        raise ValueError(
            f"{K} input features cannot be rotated in blocks of {block_size}: split the layer into fewer pieces, or "
            f"quantize the model with input_transform={{'block_size': n}} where n divides {K}"
        )
    with torch.inference_mode(False):
        made = torch.tensor(_SIGNS[:block_size], dtype=torch.float32, device=device).repeat(K // block_size, 1)
    if not _num_modes():  # a tensor of a fake or another mode must not leave it
        mark_static_address(made)
        _made[block_size, K, device] = made
    return made


def rotated(matrix: Tensor, transform: InputTransform | None) -> Tensor:
    """The matrix [..., N, K] of a weight in the rotated basis, in its dtype; itself without a transform."""
    if transform is None:
        return matrix
    factors = signs(transform, matrix.shape[-1], matrix.device)
    return hadamard(matrix, factors, block_size=transform.block_size)


def rotated_back(values: Tensor, transform: InputTransform | None) -> Tensor:
    """Inverse of `rotated`: a matrix [..., N, K], or gradients [..., K], in the host's basis."""
    if transform is None:
        return values
    factors = signs(transform, values.shape[-1], values.device)
    return hadamard(values, block_size=transform.block_size) * factors.view(-1).to(values.dtype)
