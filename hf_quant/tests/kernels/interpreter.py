"""Makes Triton's interpreter compute what a GPU does where it does not: bf16 and fp8 arithmetic, and inline PTX.

The interpreter of Triton 3.6 to 3.9 holds bf16 as uint16 and adds, multiplies and rounds it as such, and has no inline
assembly. Here both go through fp32 (bf16 results are rounded to nearest even), and the integer instructions of PTX are
emulated, so that the text that is compiled for a GPU is what the tests run. Triton 3.6 also rounds the product of an
fma, and takes no bounds of loops that are arguments if numpy is 2.4. Reductions by a function go over whole slices: an
element at a time took most of the time.
"""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype


_TORCH = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def _to_float32(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    if dtype not in _TORCH:
        return data
    raw = torch.from_numpy(np.ascontiguousarray(data).view(np.int16 if dtype == tl.bfloat16 else np.uint8))
    return raw.view(_TORCH[dtype]).float().numpy().reshape(np.shape(data))


def _from_float32(values: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    if dtype not in _TORCH:
        return values.astype(_get_np_dtype(dtype))
    values = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    if dtype != tl.bfloat16:  # conversions of the GPU saturate, torch's give NaN
        limit = torch.finfo(_TORCH[dtype]).max
        values = torch.where(values.isnan(), values, values.clamp(-limit, limit))
    raw = values.to(_TORCH[dtype]).view(torch.int16 if dtype == tl.bfloat16 else torch.uint8)
    return raw.numpy().view(_get_np_dtype(dtype)).reshape(values.shape)


def install() -> None:
    """Patch the interpreter of this process; a second call changes nothing."""
    if getattr(InterpreterBuilder, "_computes_like_a_gpu", False):
        return
    InterpreterBuilder._computes_like_a_gpu = True
    binary_op, create_fma, cast_impl = (
        InterpreterBuilder.binary_op,
        InterpreterBuilder.create_fma,
        InterpreterBuilder.cast_impl,
    )

    def patched_binary_op(self, lhs, rhs, op):
        dtype = lhs.dtype.scalar
        if dtype not in _TORCH:
            return binary_op(self, lhs, rhs, op)
        result = op(_to_float32(lhs.data, dtype), _to_float32(rhs.data, rhs.dtype.scalar))
        if result.dtype == np.bool_:
            return TensorHandle(result, tl.int1)
        return TensorHandle(_from_float32(result, dtype), dtype)

    def patched_fma(self, x, y, z):
        dtype = z.dtype.scalar
        if dtype not in _TORCH and dtype != tl.float32:
            return create_fma(self, x, y, z)
        product = _to_float32(x.data, x.dtype.scalar).astype(np.float64) * _to_float32(y.data, y.dtype.scalar)
        return TensorHandle(_from_float32((product + _to_float32(z.data, dtype)).astype(np.float32), dtype), dtype)

    def patched_cast(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if source not in _TORCH and target not in _TORCH:
            return cast_impl(self, src, dst_type)
        return TensorHandle(_from_float32(_to_float32(src.data, source), target), target)

    def patched_fp_to_fp(self, src, dst_type, rounding_mode):
        return patched_cast(self, src, dst_type)

    def patched_neg(self, arg):
        dtype = arg.dtype.scalar
        return TensorHandle(_from_float32(-_to_float32(arg.data, dtype), dtype), dtype)

    def patched_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        left, right = _to_float32(a.data, a.dtype.scalar), _to_float32(b.data, b.dtype.scalar)
        exact = np.int64 if left.dtype.kind == "i" else np.float64
        product = np.matmul(left.astype(exact), right.astype(exact)) + d.data
        return TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)

    def get_bf16(self, value):  # missing from Triton 3.6
        return TensorHandle(_from_float32(np.array([value], dtype=np.float32), tl.bfloat16), tl.bfloat16)

    def patched_tensor(tensor, scope, patch=interpreter._patch_lang_tensor):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    replaced: set[str] = set()  # the modules whose functions the launch that runs has replaced

    def patched_lang(fn, patch=interpreter._patch_lang):
        """Once for a launch: once more for each call of a device function took half of the time."""
        modules = {m.__name__ for m in (tl, tl.core) if any(value is m for value in fn.__globals__.values())}
        if modules <= replaced:
            return None  # the caller is a device function, which does not restore anything
        scope = patch(fn)
        restore = scope.restore
        scope.restore = lambda: (replaced.clear(), restore())
        replaced.update(modules)
        return scope

    def reduce_slices(self, input):
        arguments, axis = self.unravel(input, self.axis)
        slices = zip(*(np.moveaxis(argument.handle.data, axis, 0) for argument in arguments))
        total = None
        for parts in slices:
            values = [self.to_tensor(part, argument.dtype) for part, argument in zip(parts, arguments)]
            if total is not None:
                combined = self.combine_fn.fn(*total, *values)
                combined = combined if isinstance(combined, tuple) else (combined,)
                values = [self.to_tensor(c.handle.data, v.dtype) for c, v in zip(combined, values)]
            total = values
        shape = arguments[0].handle.data.shape
        kept = (*shape[:axis], *((1,) if self.keep_dims else ()), *shape[axis + 1 :])
        kept = (1,) * len(input[0].handle.data.shape) if self.keep_dims and self.axis is None else kept
        results = [value.handle.data.reshape(kept) for value in total]
        return [self.to_tensor(data if kept else data.item(), a.dtype) for data, a in zip(results, arguments)]

    def patched_overflow(self, lhs, rhs, operation, checked=TritonSemantic.binary_op_sanitize_overflow_impl):
        """An assertion that only kernels with `debug` make: to compute what it asks took a seventh of the time."""
        if not isinstance(self.builder, InterpreterBuilder):
            checked(self, lhs, rhs, operation)

    _remember_types()
    TritonSemantic.binary_op_sanitize_overflow_impl = patched_overflow
    interpreter.ReduceOps.generic_reduce = reduce_slices
    interpreter._patch_lang = patched_lang
    interpreter._patch_lang_tensor = patched_tensor
    InterpreterBuilder.get_bf16 = get_bf16
    InterpreterBuilder.binary_op = patched_binary_op
    InterpreterBuilder.create_fma = patched_fma
    InterpreterBuilder.cast_impl = patched_cast
    InterpreterBuilder.create_fp_to_fp = patched_fp_to_fp
    InterpreterBuilder.create_fneg = patched_neg
    InterpreterBuilder.create_dot = patched_dot
    InterpreterBuilder.create_inline_asm = _inline_asm


def _remember_types() -> None:
    """Make the types of values once for each shape: they took half of the time of kernels on small tensors."""
    make_block, make_tensor = tl.core.block_type.__init__, tl.core.tensor.__init__
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, Any] = {}  # one object for each, whatever the elements
    tensors: dict[Any, dict[str, Any]] = {}
    dtypes: dict[str, np.dtype] = {}

    def block_type(self, element_ty, shape):
        sizes = tuple(getattr(size, "value", size) for size in shape)
        key = (element_ty.name, sizes)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = {**self.__dict__, "shape": shapes.setdefault(sizes, self.shape)}
        self.__dict__.update(blocks[key], element_ty=element_ty)

    def tensor(self, handle, type):
        key = tuple(type.shape) if type.is_block() else ()
        if key not in tensors:
            make_tensor(self, handle, type)
            tensors[key] = {"shape": self.shape, "numel": self.numel}
        self.__dict__.update(tensors[key], handle=handle, type=type, dtype=type.scalar)

    def broadcast(self, lhs, rhs, of=TritonSemantic.broadcast_impl_value):
        left, right = (value.type.shape if value.type.is_block() else None for value in (lhs, rhs))
        return (lhs, rhs) if left is right else of(self, lhs, rhs)

    def numpy_dtype(dtype, of=interpreter._get_np_dtype):
        if dtype.name not in dtypes:
            dtypes[dtype.name] = of(dtype)
        return dtypes[dtype.name]

    tl.core.block_type.__init__ = block_type
    tl.core.tensor.__init__ = tensor
    TritonSemantic.broadcast_impl_value = broadcast
    interpreter._get_np_dtype = numpy_dtype


def _inline_asm(self, text, constraints, values, types, is_pure, pack):
    """Inline PTX on elements that fill registers: 8-bit ones by fours, 16-bit ones in pairs, or 32-bit ones.

    Results may be wider than that: each of them then takes several registers, one after the other.
    """
    if any(v.data.dtype.itemsize * pack != 4 for v in values):
        raise NotImplementedError("the emulation knows 8-bit elements by fours, 16-bit ones in pairs, 32-bit ones")
    shape = np.broadcast_shapes(*(np.shape(v.data) for v in values))
    inputs = [np.ascontiguousarray(np.broadcast_to(v.data, shape)).reshape(-1).view(np.uint32) for v in values]
    widths = [t.scalar.primitive_bitwidth // 8 * pack // 4 for t in types]
    registers = iter(run_ptx(text, inputs, num_outputs=sum(widths)))
    results = [np.stack([next(registers) for _ in range(width)], -1) for width in widths]
    handles = [TensorHandle(r.view(_get_np_dtype(t.scalar)).reshape(shape), t.scalar) for r, t in zip(results, types)]
    return SimpleNamespace(get_result=handles.__getitem__)


def run_ptx(text: str, inputs: list[np.ndarray], num_outputs: int) -> list[np.ndarray]:
    """Run the instructions of PTX `text` on uint32 arrays: $0.. are the outputs, then come the inputs.

    Raises NotImplementedError on an instruction that it does not know, ValueError on a register never written.
    """
    registers = {f"${num_outputs + i}": value for i, value in enumerate(inputs)}

    def value(operand: str) -> np.ndarray:
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)", operand):
            return np.uint32(int(operand, 0) & 0xFFFFFFFF)
        if re.fullmatch(r"0f[0-9a-fA-F]{8}", operand):
            return np.uint32(int(operand[2:], 16))
        if operand not in registers:
            raise ValueError(f"{operand} is read before it is written")
        return registers[operand]

    for statement in text.replace("{", " ").replace("}", " ").split(";"):
        statement = " ".join(statement.split())
        if not statement or statement.startswith(".reg"):
            continue
        name, rest = statement.split(" ", 1)
        target, *operands = (part.strip() for part in rest.split(","))
        a, *more = (value(operand) for operand in operands)
        registers[target] = np.broadcast_to(_execute(name, a, more), inputs[0].shape).astype(np.uint32)
    return [registers[f"${i}"] for i in range(num_outputs)]


def _flush(value: np.ndarray) -> np.ndarray:
    """Subnormal numbers become zeros of their sign, as `.ftz` says."""
    return np.where(np.abs(value) < np.float32(2.0**-126), np.copysign(np.float32(0), value), value)


_FLOAT = {  # `.approx` is within 2 units in the last place of these
    "mul.f32": np.multiply,
    "add.f32": np.add,
    "ex2.approx.ftz.f32": lambda a: _flush(np.exp2(_flush(a))),
    "rcp.approx.ftz.f32": lambda a: _flush(np.float32(1) / _flush(a)),
}


_PAIRS = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": lambda a, b, c: a * b + c}


def _execute(name: str, a: np.ndarray, more: list[np.ndarray]) -> np.ndarray:
    if name == "mov.b32":
        return a
    if name in ("and.b32", "or.b32", "xor.b32"):
        return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[name[:-4]](a, more[0])
    if name in ("shl.b32", "shr.b32", "shr.u32"):
        return a << more[0] if name.startswith("shl") else a >> more[0]
    if name == "lop3.b32":
        b, c, table = more
        result = np.zeros_like(a | b | c)
        for row in range(8):
            if int(table) >> row & 1:
                result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        return result
    if name == "prmt.b32":
        return _prmt(a, *more)
    operation = _PAIRS.get(name.split(".")[0])
    if operation and name.endswith(".rn.f16x2"):
        pairs = [np.ascontiguousarray(x).view(np.float16).astype(np.float64) for x in _full(a, *more)]
        return operation(*pairs).astype(np.float16).view(np.uint32)
    if operation and name.endswith(".rn.bf16x2"):  # exact in fp64, rounded once
        pairs = [
            _to_float32(np.ascontiguousarray(x).view(np.uint16), tl.bfloat16).astype(np.float64)
            for x in _full(a, *more)
        ]
        return _from_float32(operation(*pairs).astype(np.float32), tl.bfloat16).view(np.uint32)
    if name in _FLOAT:
        with np.errstate(all="ignore"):
            values = (np.asarray(value, dtype=np.uint32).view(np.float32) for value in (a, *more))
            return np.asarray(_FLOAT[name](*values), dtype=np.float32).view(np.uint32)
    raise NotImplementedError(name)


def _full(*values: np.ndarray) -> list[np.ndarray]:
    return [value.copy() for value in np.broadcast_arrays(*(np.atleast_1d(value) for value in values))]


def _prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """PTX ISA, "prmt": byte i of the result is the byte that nibble i of the selector names; bit 3 copies its sign."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.uint32(0)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & np.uint32(15)
        byte = (both >> (8 * (nibble & np.uint32(7))).astype(np.uint64)) & np.uint64(255)
        byte = np.where(nibble & 8, np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0)), byte)
        result = result | (byte.astype(np.uint32) << np.uint32(8 * i))
    return result
