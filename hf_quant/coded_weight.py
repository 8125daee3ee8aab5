"""`CodedWeight`: a weight of codes and one fp32 scale for each row, which autograd takes for a floating-point one.

Integers cannot have a gradient. This tensor has the shape and dtype of the 16-bit weight and no memory of its own; its
gradient is a plain tensor. Whatever reads it computes with the dequantized weight; `hf_quant.optim` writes it, by
random rounding. An optimizer that knows nothing of codes would lose nearly every update: a write to it raises.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_quant.kernels import requantize_rows_


_aten = torch.ops.aten
# Ops on rows or experts that do with the scales what they do with the codes, and where their arguments name the dim.
_DIMS = {_aten.select.int: 1, _aten.slice.Tensor: 1, _aten.split.Tensor: 2, _aten.unbind.int: 1}
_RESIZES = {_aten.view.default, _aten.new_zeros.default, _aten.as_strided.default}
_COPIES = {_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten.pin_memory.default}


class _Packed(NamedTuple):
    """Codes and scales in the memory of one tensor, the scales first."""

    codes: torch.Size
    scale: torch.Size
    dtype: torch.dtype

    def parts(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the codes and the scales."""
        nbytes = self.scale.numel() * torch.float32.itemsize
        return memory[nbytes:].view(self.dtype).view(self.codes), memory[:nbytes].view(torch.float32).view(self.scale)


def to_gather(codes: Tensor, scale: Tensor, mesh: Any) -> tuple[tuple[Tensor, ...], _Packed | None]:
    """Give tensors for FSDP2 to gather, and what it hands back with them. A process alone passes on one only."""
    if mesh.size() > 1:
        return (codes, scale), None
    memory = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in (scale, codes)])
    return (memory,), _Packed(codes.shape, scale.shape, codes.dtype)


class CodedWeight(Tensor):
    """A weight [..., N, K] that is stored as codes and an fp32 scale [..., N, 1] for each row.

    Attributes:
        codes: int8 [..., N, K], contiguous; fp8 where `fully_shard` has gathered them.
        scale: fp32 [..., N, 1], contiguous.

    Its shape is that of the codes. `dtype` is that of the weight that they stand for.
    """

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> "CodedWeight":
        options = {"dtype": dtype, "device": codes.device, "strides": codes.stride()}
        return Tensor._make_wrapper_subclass(cls, codes.shape, **options)

    def __init__(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, weight: Tensor) -> "CodedWeight":
        """Quantize a weight [..., N, K], each row with the scale amax / 120: the largest may grow before its row needs
        another scale. Raises ValueError for NaN or inf."""
        codes = torch.zeros(weight.shape, dtype=torch.int8, device=weight.device)
        none = torch.full((*weight.shape[:-1], 1), torch.nan, dtype=torch.float32, device=weight.device)
        coded = cls(codes, none, weight.dtype)
        coded.write_(weight.detach().float().contiguous(), low=None, high=0, row=0)
        if not bool(coded.scale.isfinite().all()):
            raise ValueError("a weight contains NaN or inf: it cannot be stored as codes")
        return coded

    def dequantized(self, dtype: torch.dtype | None = None) -> Tensor:
        """codes * scale, computed in fp32 and rounded to `dtype` (default: its own)."""
        rows = self.codes.view(self.scale.numel(), -1) if self.codes.numel() else self.codes.view(0, 1)
        return (rows.float() * self.scale.view(-1, 1)).view(self.shape).to(dtype or self.dtype)

    @torch.no_grad()
    def write_(self, values: Tensor, *, low: int | None, high: int, row: int) -> None:
        """Store fp32 values of its shape, by `requantize_rows_`."""
        K = self.shape[-1]
        requantize_rows_(
            self.codes.view(-1, K), self.scale.view(-1, 1), values.view(-1, K), low=low, high=high, row=row
        )

    def element_size(self) -> int:
        """Bytes of a code: hosts count the memory of a model by it."""
        return self.codes.element_size()

    def share_memory_(self) -> "CodedWeight":
        """Move codes and scales to memory that other processes can read."""
        self.codes.share_memory_()
        self.scale.share_memory_()
        return self

    def is_shared(self) -> bool:
        """True if codes and scales lie in memory that other processes can read."""
        return self.codes.is_shared() and self.scale.is_shared()

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], _Packed | None]:
        """The codes and scales of this process's rows, filled up to as many as the first process has."""
        # What `fully_shard` has cut off is still in memory. Had this method more arguments, inputs of other shapes
        # than the weight's would be refused.
        rows = self.codes.untyped_storage().nbytes() // self.stride(0)
        parts = (part.as_strided((rows, *part.shape[1:]), part.stride(), 0) for part in (self.codes, self.scale))
        return to_gather(*parts, mesh)

    @staticmethod
    def fsdp_post_all_gather(
        gathered: tuple[Tensor, ...], packed: _Packed | None, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The weight of all processes; with `out`, which has the memory of what is gathered, nothing."""
        if out is not None:
            return None
        return CodedWeight(*(gathered if packed is None else packed.parts(*gathered)), dtype), ()

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["codes", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any
    ) -> "CodedWeight":
        return cls(inner["codes"], inner["scale"], dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"CodedWeight({tuple(self.shape)}, {self.dtype}, device={str(self.device)!r})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, self = kwargs or {}, args[0] if args else None
        if isinstance(self, cls):
            found = self._structural(func, args, kwargs)
            if found is not None:
                return found
        if func._schema.is_mutable and any(
            argument.alias_info is not None
            and argument.alias_info.is_write
            and any(isinstance(leaf, cls) for leaf in tree_leaves(value))
            for value, argument in [
                *zip(args, func._schema.arguments),
                *((kwargs[a.name], a) for a in func._schema.arguments if a.name in kwargs),
            ]
        ):
            raise ValueError(
                f"{func} would write to a weight of int8 codes, which only the optimizers of hf_quant.optim change: "
                "take hf_quant.optim.AdamW8bit, or finish_training_ the model first"
            )
        args, kwargs = tree_map_only(cls, cls.dequantized, (args, kwargs))
        return func(*args, **kwargs)

    def _structural(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an op that keeps, cuts or moves codes; None if it is no such op."""
        if func in _COPIES or (func in _DIMS and self._keeps_rows(func, args)):
            return self._each(lambda part: func(part, *args[1:], **kwargs))
        if func is _aten._to_copy.default:
            dtype = kwargs.pop("dtype", None) or self.dtype
            return self._each(lambda part: func(part, **kwargs), dtype)
        if func is _aten.copy_.default:
            source = args[1]
            if isinstance(source, CodedWeight):
                self.codes.copy_(source.codes)
                self.scale.copy_(source.scale)
            # DistributedDataParallel writes the values that it has sent, which must change nothing.
            elif not torch.equal(source := source.to(self.device), self.dequantized(source.dtype)):
                self.write_(source.float().expand(self.shape).contiguous(), low=None, high=0, row=0)
            return self
        return self._resized(func, args)

    def _keeps_rows(self, func: Any, args: tuple[Any, ...]) -> bool:
        """True if an op cuts along the first dimension, and leaves whole rows."""
        dim = args[_DIMS[func]] if len(args) > _DIMS[func] else 0
        return dim == 0 and (self.dim() > 2 or func in (_aten.slice.Tensor, _aten.split.Tensor))

    def _resized(self, func: Any, args: tuple[Any, ...]) -> "CodedWeight | None":
        """The result of the ops by which `fully_shard` pads shards and cuts off what it has gathered."""
        size = tuple(args[1]) if func in _RESIZES else ()
        if func is _aten.view.default and size in ((-1,), (self.numel(),)):
            return self._each(lambda part: part.view(-1))
        if not size or size[1:] != self.shape[1:]:
            return None
        if func is _aten.new_zeros.default:
            return self._each(lambda part: part.new_zeros((size[0], *part.shape[1:])))
        if func is _aten.as_strided.default and (tuple(args[2]) != self.stride() or (len(args) > 3 and args[3])):
            return None
        return self._each(lambda part: part[: size[0]]) if size[0] <= self.shape[0] else None

    def _each(self, call: Callable[[Tensor], Any], dtype: torch.dtype | None = None) -> Any:
        codes, scale = call(self.codes), call(self.scale)
        if isinstance(codes, Tensor):
            return CodedWeight(codes, scale, dtype or self.dtype)
        return [CodedWeight(*pair, dtype or self.dtype) for pair in zip(codes, scale)]
