"""Tensors in registers and in global memory, as `gluon_interpreter` computes with them, and functions on them.

The functions have the names of `triton.experimental.gluon.language`. Layouts are kept where a kernel asks for them.
"""

import builtins
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
import triton.language as tl
from triton.experimental.gluon.language import SliceLayout

from hf_quant.tests.kernels.interpreter import run_ptx


TORCH = {
    tl.int1: torch.bool,
    tl.int8: torch.int8,
    tl.uint8: torch.uint8,
    tl.int16: torch.int16,
    tl.int32: torch.int32,
    tl.int64: torch.int64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
}
GLUON = {value: key for key, value in TORCH.items()}


class Flight(Protocol):
    """Work under way."""

    done: bool


class Value:
    """A tensor in registers; a scalar has no dimensions.

    early: what a product will have written there. flight: that product.
    """

    def __init__(self, early: torch.Tensor, layout: Any = None, flight: Flight | None = None) -> None:
        self.early, self.layout, self.flight = early, layout, flight

    @property
    def data(self) -> torch.Tensor:
        """The numbers. Raises AssertionError if they are not there yet."""
        if self.flight is not None and not self.flight.done:
            raise AssertionError("a sum is used before its product has been waited for")
        return self.early

    shape = property(lambda self: list(self.early.shape))
    dtype = property(lambda self: GLUON[self.early.dtype])
    type = property(lambda self: SimpleNamespace(layout=self.layout))

    def to(self, dtype: tl.dtype, bitcast: bool = False) -> "Value":
        found = self.data.view(TORCH[dtype]) if bitcast else self.data.to(TORCH[dtype])
        return Value(found, self.layout)

    def __neg__(self) -> "Value":
        return Value(-self.data, self.layout)

    def __index__(self) -> int:
        return int(self.data.item())

    __int__ = __index__

    def __bool__(self) -> bool:
        return bool(self.data.item())

    def __getitem__(self, index: Any) -> "Value":
        value = self
        for dim, part in enumerate(index):
            value = expand_dims(value, dim) if part is None else value
        return value


def data_of(value: Any) -> Any:
    return value.data if isinstance(value, Value) else value


def _binary(operation: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    if isinstance(b, Pointer):
        return NotImplemented
    left, right = data_of(a), data_of(b)
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):  # torch prefers types that have dimensions
        dtype = torch.promote_types(left.dtype, right.dtype)
        left, right = left.to(dtype), right.to(dtype)
    layouts = [value.layout for value in (a, b) if isinstance(value, Value) and value.layout is not None]
    return Value(operation(left, right), layouts[0] if layouts else None)


for _name in "add sub mul truediv floordiv mod and_ or_ xor lshift rshift lt le gt ge eq ne".split():
    _do, _name = getattr(operator, _name), _name.rstrip("_")
    setattr(Value, f"__{_name}__", lambda self, other, do=_do: _binary(do, self, other))
    setattr(Value, f"__r{_name}__", lambda self, other, do=_do: _binary(do, other, self))


class Pointer:
    """Addresses of elements of a tensor, whose whole storage may be reached."""

    def __init__(self, memory: torch.Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    dtype = property(lambda self: SimpleNamespace(element_ty=GLUON[self.memory.dtype]))

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + offset)

    def __sub__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.offset - offset)

    def to(self, kind: tl.pointer_type) -> "Pointer":
        """The same address, of elements of another type."""
        assert self.offset == 0
        size = TORCH[kind.element_ty].itemsize
        raw = self.memory.view(torch.uint8)
        return Pointer(raw[: len(raw) // size * size].view(TORCH[kind.element_ty]))

    def places(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(indices, which of them count). Raises IndexError for one that counts outside of the storage."""
        at = torch.as_tensor(data_of(self.offset)).long()
        counts = torch.as_tensor(True if mask is None else data_of(mask)).expand_as(at)
        wrong = counts & ((at < 0) | (at >= len(self.memory)))
        if wrong.any():
            raise IndexError(f"element {int(at[wrong][0])} of a tensor of {len(self.memory)}")
        return at, counts


def pointer_to(tensor: torch.Tensor) -> Pointer:
    size = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return Pointer(tensor.as_strided((size,), (1,)))


def arange(start: int, end: int, layout: Any = None) -> Value:
    return Value(torch.arange(start, end, dtype=torch.int32), layout)


def full(shape: list, value: Any, dtype: tl.dtype, layout: Any = None) -> Value:
    return Value(torch.full(shape, data_of(value), dtype=TORCH[dtype]), layout)


def zeros(shape: list, dtype: tl.dtype, layout: Any = None) -> Value:
    return full(shape, 0, dtype, layout)


def load(
    pointer: Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = "", eviction_policy: str = ""
) -> Value:
    at, counts = pointer.places(mask)
    found = torch.full(at.shape, other, dtype=pointer.memory.dtype)
    found[counts] = pointer.memory[at[counts]]
    return Value(found, getattr(pointer.offset, "layout", None))


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    at, counts = pointer.places(mask)
    data = torch.as_tensor(data_of(value)).expand(at.shape)
    pointer.memory[at[counts]] = data[counts].to(pointer.memory.dtype)


def atomic_add(pointer: Pointer, value: Any, sem: str = "acq_rel") -> Value:
    before = load(pointer)
    store(pointer, before + value)
    return before


def where(condition: Any, a: Any, b: Any) -> Value:
    layout = next((v.layout for v in (condition, a, b) if isinstance(v, Value) and v.layout is not None), None)
    return Value(torch.where(torch.as_tensor(data_of(condition)), data_of(a), data_of(b)), layout)


def minimum(a: Any, b: Any) -> Value:
    return where(a < b, a, b)


def maximum(a: Any, b: Any) -> Value:
    return where(a > b, a, b)


def exp2(value: Value) -> Value:
    return Value(value.data.exp2(), value.layout)


def fma(a: Any, b: Any, c: Any) -> Value:
    """a * b + c, rounded once."""
    a, b, c = (part if isinstance(part, Value) else Value(torch.tensor(part)) for part in (a, b, c))
    dtype = torch.promote_types(a.data.dtype, b.data.dtype)
    return Value((a.data.double() * b.data.double() + c.data.double()).to(dtype), a.layout or b.layout)


def expand_dims(value: Value, dim: int) -> Value:
    layout = value.layout
    if layout is not None:
        if not isinstance(layout, SliceLayout) or layout.dim != dim:
            raise AssertionError(f"dimension {dim} of {layout}")
        layout = layout.parent
    return Value(value.data.unsqueeze(dim), layout)


def broadcast(a: Value, b: Value) -> tuple[Value, Value]:
    shape = torch.broadcast_shapes(a.data.shape, b.data.shape)
    return Value(a.data.expand(shape), a.layout), Value(b.data.expand(shape), b.layout)


def convert_layout(value: Value, layout: Any, assert_trivial: bool = False) -> Value:
    return Value(value.data, layout)


def permute(value: Value, order: list) -> Value:
    return Value(value.data.permute(order))


def reshape(value: Value, shape: list) -> Value:
    return Value(value.data.reshape(shape))


def cdiv(a: Any, b: Any) -> Any:
    return (a + b - 1) // b


def sum(value: Value, axis: int) -> Value:
    return Value(value.data.sum(axis, dtype=value.data.dtype))


def associative_scan(value: Value, axis: int, combine: Callable[[Any, Any], Any]) -> Value:
    parts = [Value(part) for part in value.data.unbind(axis)]
    for i in range(1, len(parts)):
        parts[i] = combine(parts[i - 1], parts[i])
    return Value(torch.stack([part.data for part in parts], axis), value.layout)


def split(value: Value) -> tuple[Value, Value]:
    return Value(value.data[..., 0].clone()), Value(value.data[..., 1].clone())


def pointer_type(element_ty: tl.dtype) -> tl.pointer_type:
    return tl.pointer_type(element_ty)


def mma_v2(a: Value, b: Value, total: Value) -> Value:
    return Value((a.data.double() @ b.data.double() + total.data).float(), total.layout)


def inline_asm_elementwise(asm: str, constraints: str, args: list, dtype: Any, is_pure: bool, pack: int) -> Any:
    """PTX on `pack` elements at once, which are neighbours in the last dimension and in a thread's registers.

    dtype: of the result, or of each of several.
    """
    layout, shape = args[0].layout, args[0].data.shape
    for i in range(pack.bit_length() - 1):
        assert layout.reg_bases[i] == [0] * (len(shape) - 1) + [1 << i], "other elements are packed"
    registers = []
    for arg in args:
        data = arg.data.expand(shape).contiguous().reshape(-1, pack)
        data = data.view(torch.int16) if data.dtype == torch.bfloat16 else data
        words = data.numpy().view(np.uint32)
        registers += [np.ascontiguousarray(words[:, i]) for i in range(words.shape[1])]
    dtype = getattr(dtype, "value", dtype)
    kinds = [TORCH[kind] for kind in (dtype if isinstance(dtype, (tuple, tl.tuple)) else [dtype])]
    counts = [pack * kind.itemsize // 4 for kind in kinds]
    outputs = builtins.sum(counts)
    assert constraints.replace("&", "") == ",".join(["=r"] * outputs + ["r"] * len(registers))
    words, results = run_ptx(asm, registers, outputs), []
    for kind, count in zip(kinds, counts):
        own, words = np.stack(words[:count], -1), words[count:]
        results.append(Value(torch.from_numpy(own.view(np.uint8)).view(kind).reshape(shape), layout))
    return tuple(results) if isinstance(dtype, (tuple, tl.tuple)) else results[0]
