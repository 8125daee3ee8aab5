"""Inputs that are computed together with their quantization: a norm and its modulation, an activation function.

A norm returns a `LazyNorm` instead of its result. Multiplied with a vector for each image and added to one, as the
blocks of diffusion transformers do, it stays one; a quantized layer asks it for codes, which one kernel computes from
the norm's input. Whatever else is done with it is done with the 16-bit tensor that the host would have had.

All arithmetic between input and codes is in fp32, so the codes are more accurate than if every step rounded its
result to 16 bit.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from hf_quant.kernels import act_quantize_rowwise, layer_norm_quantize_rowwise


_PRODUCTS = (Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul, operator.mul)
_SUMS = (Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add, operator.add)


class LazyInput:
    """A substitute for a floating-point tensor of which only the codes may be needed.

    Not a Tensor, but torch's functions take it, and its attributes and methods are those of the tensor.

    Attributes:
        like: what it is computed from, a tensor of its shape, dtype and device.
    """

    _compute: Callable[[], Tensor]  # of each kind: the tensor as the host has it, and its codes
    _quantize: Callable[[str, Tensor | None], tuple[Tensor, Tensor]]

    def __init__(self, like: Tensor) -> None:
        self.like = like
        is_counted = not (torch.compiler.is_compiling() or like.is_inference())
        self._version = like._version if is_counted else None
        self._tensor: Tensor | None = None
        self._rows: dict[tuple, tuple[Tensor, Tensor]] = {}

    def tensor(self) -> Tensor:
        """The floating-point tensor, as the host computes it."""
        if self._tensor is None:
            self._check()
            self._tensor = self._compute()
        return self._tensor

    def rows(self, format: str, diagonal: Tensor | None) -> tuple[Tensor, Tensor]:
        """(codes [..., K], row_scale [..., 1]) in a format of `quantize_rowwise`; computed once.

        A diagonal [K / b, b] rotates the tensor first, see `modules.rotation`.
        """
        key = (format, None if diagonal is None else diagonal.shape[1])
        if key not in self._rows:
            self._check()
            self._rows[key] = self._quantize(format, diagonal)
        return self._rows[key]

    def _check(self) -> None:
        if self._version is not None and self.like._version != self._version:
            raise RuntimeError("the input of a lazy norm or activation was changed in place before it was computed")

    @property
    def shape(self) -> torch.Size:
        return self.like.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        return self.like.device

    @property
    def ndim(self) -> int:
        return self.like.ndim

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.dropout and not (args[2] if len(args) > 2 else (kwargs or {}).get("training", True)):
            return args[0]
        if len(args) == 2 and not kwargs and (func in _PRODUCTS or func in _SUMS):
            lazy, other = args if isinstance(args[0], LazyInput) else (args[1], args[0])
            return lazy.times(other) if func in _PRODUCTS else lazy.plus(other)
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))

    def times(self, other: Any) -> "Tensor | LazyInput":
        """self * other."""
        return self.tensor() * _plain(other)

    def plus(self, other: Any) -> "Tensor | LazyInput":
        """self + other."""
        return self.tensor() + _plain(other)

    def __mul__(self, other: Any) -> "Tensor | LazyInput":
        return self.times(other)

    __rmul__ = __mul__

    def __add__(self, other: Any) -> "Tensor | LazyInput":
        return self.plus(other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self.tensor() - _plain(other)

    def __rsub__(self, other: Any) -> Any:
        return _plain(other) - self.tensor()

    def __truediv__(self, other: Any) -> Any:
        return self.tensor() / _plain(other)

    def __neg__(self) -> Tensor:
        return -self.tensor()

    def __matmul__(self, other: Any) -> Any:
        return self.tensor() @ _plain(other)

    def __pow__(self, other: Any) -> Any:
        return self.tensor() ** _plain(other)

    def __eq__(self, other: Any) -> Any:
        return self.tensor() == _plain(other)

    def __ne__(self, other: Any) -> Any:
        return self.tensor() != _plain(other)

    def __lt__(self, other: Any) -> Any:
        return self.tensor() < _plain(other)

    def __gt__(self, other: Any) -> Any:
        return self.tensor() > _plain(other)

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return bool(self.tensor())

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor()[index]

    def __len__(self) -> int:
        return self.like.shape[0]


def _plain(value: Any) -> Any:
    return value.tensor() if isinstance(value, LazyInput) else value


class LazyNorm(LazyInput):
    """layer_norm(x) * factor + shift, in the dtype of x.

    x [..., K]; weight, bias [K]; factor, shift [B, 1, ..., K] as `_vector_of_images` says. `norm` computes the layer
    norm as the host does.
    """

    def __init__(
        self,
        x: Tensor,
        norm: Callable[[Tensor], Tensor],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        factor: Tensor | None = None,
        shift: Tensor | None = None,
    ) -> None:
        super().__init__(x)
        self.norm, self.weight, self.bias, self.eps = norm, weight, bias, eps
        self.factor, self.shift = factor, shift

    def _with(self, factor: Tensor | None, shift: Tensor | None) -> "LazyNorm":
        new = LazyNorm(self.like, self.norm, self.weight, self.bias, self.eps, factor, shift)
        new._version = self._version
        return new

    def times(self, other: Any) -> Tensor | LazyInput:
        if self.factor is None and self.shift is None and self._fits(other):
            return self._with(other, None)
        return super().times(other)

    def plus(self, other: Any) -> Tensor | LazyInput:
        if self.shift is None and self._fits(other):
            return self._with(self.factor, other)
        return super().plus(other)

    def _fits(self, other: Any) -> bool:
        """True if `other` is one vector for each image: [B or 1, 1, ..., K] of the same dtype."""
        x = self.like
        return (
            isinstance(other, Tensor)
            and other.dtype == x.dtype
            and other.ndim == x.ndim
            and other.shape[-1] == x.shape[-1]
            and other.shape[0] in (1, x.shape[0])
            and all(size == 1 for size in other.shape[1:-1])
        )

    def _compute(self) -> Tensor:
        y = self.norm(self.like)
        y = y if self.factor is None else y * self.factor
        return y if self.shift is None else y + self.shift

    def _quantize(self, format: str, diagonal: Tensor | None) -> tuple[Tensor, Tensor]:
        K = self.like.shape[-1]
        scale, shift = (None if part is None else part.reshape(-1, K) for part in (self.factor, self.shift))
        if scale is not None:
            scale = scale.float() - 1  # the op multiplies with 1 + scale
        if scale is not None and shift is not None and scale.shape != shift.shape:
            B = self.like.shape[0]
            scale, shift = scale.expand(B, K), shift.expand(B, K)
        return layer_norm_quantize_rowwise(
            self.like, self.weight, self.bias, scale, shift, diagonal, eps=self.eps, format=format
        )


class LazyAct(LazyInput):
    """act(x) * up, or act(x); x, up [..., K], act as in `act_quantize_rowwise`. `function` computes it as the host."""

    def __init__(self, x: Tensor, up: Tensor | None, act: str, function: Callable[[], Tensor]) -> None:
        super().__init__(x)
        self.up, self.act, self.function = up, act, function

    def _compute(self) -> Tensor:
        return self.function()

    def _quantize(self, format: str, diagonal: Tensor | None) -> tuple[Tensor, Tensor]:
        return act_quantize_rowwise(self.like, self.up, diagonal, act=self.act, format=format)
