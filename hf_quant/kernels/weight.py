"""`Weight`: the packed tensors of one quantized weight together with its format, group size and width."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from torch import Size, Tensor, device, float32, uint8

from hf_quant.kernels.codes import BLOCK_SIZE, CODES, CodeSpec, packed_words


_R = TypeVar("_R")
LARGEST_BLOCK = 1024  # of columns that a transform of the input mixes


class PackedWeight(NamedTuple):
    """A quantized weight [..., N, K] in its canonical bytes (see `codes`); scales in their true dtype.

    qdata [..., N, K] or [..., N, words] int32; scale [..., N | 1 | ceil(N/128), groups], whose sign may be negative;
    zero_point of the scale's shape or None: uint8, from 0 to the largest code, or floating-point, see
    `Weight.has_float_zeros`; global_scale fp32 [...] (at least [1]) or None.
    """

    qdata: Tensor
    scale: Tensor
    zero_point: Tensor | None
    global_scale: Tensor | None

    def to(self, target: device | str) -> "PackedWeight":
        """Return the weight with its tensors on a device."""
        zero_point = None if self.zero_point is None else self.zero_point.to(target)
        global_scale = None if self.global_scale is None else self.global_scale.to(target)
        return PackedWeight(self.qdata.to(target), self.scale.to(target), zero_point, global_scale)


class Weight(NamedTuple):
    """A weight [N, K], or experts [E, N, K], as products take it: the tensors of `PackedWeight`, and their geometry.

    Made by `weight_of`, which checks it; whoever gets a Weight checks nothing. With one scale for a whole row
    `group_size` is K.

    With `input_diagonal` [K / b, b] fp32 the codes are of a weight for transformed input: products first multiply each
    row of x with the K values, then each b columns of it with the orthonormal Hadamard matrix of b, a power of two.
    With `input_scale` [1] fp32 products that quantize x take this scale for every row, see `quantize_static`.
    """

    qdata: Tensor
    scale: Tensor
    zero_point: Tensor | None
    global_scale: Tensor | None
    format: str
    group_size: int
    K: int
    input_diagonal: Tensor | None = None
    input_scale: Tensor | None = None

    @property
    def spec(self) -> CodeSpec:
        return CODES[self.format]

    @property
    def N(self) -> int:
        return self.qdata.shape[-2]

    @property
    def is_row_scaled(self) -> bool:
        """True if a row, or the whole weight, has one scale."""
        return self.scale.shape[-1] == 1

    @property
    def has_float_zeros(self) -> bool:
        """True if zero points are floating-point numbers, the value of code 0: a weight is code * scale + zero_point.

        See `float_zeros`.
        """
        return self.zero_point is not None and self.zero_point.is_floating_point()

    @property
    def zeros(self) -> str:
        """The kind of the zero points: "" (there are none), "codes" or "values", see `has_float_zeros`."""
        return "" if self.zero_point is None else "values" if self.has_float_zeros else "codes"

    @property
    def packed(self) -> PackedWeight:
        return PackedWeight(*self[:4])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the weight that are there, the codes first."""
        return tuple(tensor for tensor in self[:4] if tensor is not None)

    def expert(self, e: int) -> "Weight":
        """The weight [N, K] of one expert."""
        return self._replace(
            qdata=self.qdata[e],
            scale=self.scale[e],
            zero_point=None if self.zero_point is None else self.zero_point[e],
            global_scale=None if self.global_scale is None else self.global_scale[e],
        )

    def contiguous(self) -> "Weight":
        """The same weight with contiguous tensors; itself if they are."""
        if all(tensor.is_contiguous() for tensor in self.tensors):
            return self
        return Weight(*(part if part is None else part.contiguous() for part in self[:4]), *self[4:])

    def with_plain_rows(self) -> "Weight":
        """The same weight [N, K] with contiguous rows, its zero points with the strides of its scales.

        It is itself if it is so.
        """
        qdata, scale, zero_point, _ = self.packed
        if qdata.stride(1) != 1:
            qdata = qdata.contiguous()
        if scale.stride(1) != 1 or (zero_point is not None and zero_point.stride() != scale.stride()):
            scale, zero_point = scale.contiguous(), None if zero_point is None else zero_point.contiguous()
        if qdata is self.qdata and scale is self.scale and zero_point is self.zero_point:
            return self
        return self._replace(qdata=qdata, scale=scale, zero_point=zero_point)


def weight_of(
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    format: str,
    group_size: int,
    K: int,
    input_diagonal: Tensor | None = None,
    input_scale: Tensor | None = None,
) -> Weight:
    """The tensors of a weight [..., N, K] as one `Weight`.

    qdata [..., N, K] or, packed, [..., N, words] int32; scale floating [..., N | 1 | ceil(N/128), ceil(K/group_size)];
    zero_point uint8 or floating-point of the scale's shape, integer formats only, uint8 for packed ones only;
    global_scale fp32, one element per leading index, not beside floating-point zero points;
    input_diagonal fp32 [K / b, b]; input_scale fp32 [1].

    Raises:
        ValueError: the tensors are no weight of this format, group size and width.
    """
    spec = CODES.get(format)
    if spec is None:
        raise ValueError(f"format is {format!r}; known: {', '.join(CODES)}")
    shape, scale_shape, groups = qdata.shape, scale.shape, -(-K // max(group_size, 1))
    width = packed_words(K, spec.bits) if spec.planes else K
    if qdata.dtype != spec.dtype or shape[-1] != width:
        raise ValueError(
            f"qdata is {tuple(shape)} {qdata.dtype}; {format} with K={K} needs [..., {width}] {spec.dtype}"
        )
    if group_size < 1 or scale_shape[-1] != groups or not scale.is_floating_point():
        raise ValueError(
            f"scale is {tuple(scale_shape)} {scale.dtype}; K={K} in groups of {group_size} needs a floating-point "
            f"[..., {groups}]"
        )
    if scale_shape[-2] not in (shape[-2], 1, -(-shape[-2] // BLOCK_SIZE)):
        raise ValueError(f"scale has {scale_shape[-2]} rows; qdata has {shape[-2]}")
    if scale_shape[:-2] != shape[:-2]:
        raise ValueError(f"scale is {tuple(scale_shape)}; qdata is {tuple(shape)}, their leading sizes must be equal")
    if zero_point is not None:
        _check_zero_point(zero_point, scale_shape, spec, global_scale)
    if global_scale is not None:
        weights = shape[:-2].numel()
        if global_scale.dtype != float32 or global_scale.numel() != weights:
            raise ValueError(
                f"global_scale is {tuple(global_scale.shape)} {global_scale.dtype}; qdata is {tuple(shape)}, which "
                f"needs {weights} of torch.float32"
            )
    if input_diagonal is not None:
        check_diagonal(input_diagonal, K)
    if input_scale is not None:
        check_input_scale(input_scale)
    group_size = K if groups == 1 else group_size
    return Weight(qdata, scale, zero_point, global_scale, format, group_size, K, input_diagonal, input_scale)


def check_input_scale(input_scale: Tensor) -> None:
    """Raise ValueError unless input_scale is fp32 [1]."""
    if input_scale.shape != (1,) or input_scale.dtype != float32:
        raise ValueError(
            f"input_scale is {tuple(input_scale.shape)} {input_scale.dtype}; needs one value, [1] torch.float32"
        )


def check_diagonal(input_diagonal: Tensor, K: int) -> None:
    """Raise ValueError unless input_diagonal is fp32 [K / b, b], contiguous, b a power of two from 2 to 1024."""
    shape, b = tuple(input_diagonal.shape), input_diagonal.shape[-1]
    if len(shape) != 2 or shape[0] * b != K or b & (b - 1) or not 2 <= b <= LARGEST_BLOCK:
        raise ValueError(
            f"input_diagonal is {shape}; K={K} needs [{K} / b, b], where b is a power of two from 2 to {LARGEST_BLOCK}"
        )
    if input_diagonal.dtype != float32 or not input_diagonal.is_contiguous():
        raise ValueError(f"input_diagonal is {input_diagonal.dtype}; needs contiguous torch.float32")


def _check_zero_point(zero_point: Tensor, scale_shape: Size, spec: CodeSpec, global_scale: Tensor | None) -> None:
    is_float = zero_point.is_floating_point()
    if zero_point.shape != scale_shape or not (is_float or zero_point.dtype == uint8):
        raise ValueError(
            f"zero_point is {tuple(zero_point.shape)} {zero_point.dtype}; needs {tuple(scale_shape)} torch.uint8, or "
            "a floating-point dtype"
        )
    if not (spec.is_integer and (spec.is_packed or is_float)):
        raise ValueError(f"{spec.name} has no zero point")
    if is_float and global_scale is not None:
        raise ValueError(
            f"zero_point is {zero_point.dtype} beside a global_scale; floating-point zero points need scales that are "
            "complete: multiply them by it"
        )


def takes_weight(
    check: Callable[..., None] | None = None,
    *,
    K_is_option: bool = False,
    transforms: bool = False,
    quantizes: bool = False,
) -> Callable[[Callable[..., _R]], Callable[..., _R]]:
    """Decorate a function of a `Weight` for torch.library, whose ops take nothing but tensors and plain values.

    `fn(x, w: Weight, bias, *, activation)` becomes `fn(x, qdata, scale, zero_point, global_scale, bias, *, format,
    group_size, activation)`. It raises ValueError unless the tensors are a weight of x's width, and calls `check` with
    the arguments of fn. With `K_is_option` the width is the option K, as no argument has it; with `transforms` the
    last argument is `input_diagonal=None`, with `quantizes` followed by `input_scale=None`.
    """
    inputs = (*(["input_diagonal"] if transforms else []), *(["input_scale"] if quantizes else []))

    def wrap(fn: Callable[..., _R]) -> Callable[..., _R]:
        signature = inspect.signature(fn)
        parameters = list(signature.parameters.values())
        at = next(i for i, parameter in enumerate(parameters) if parameter.annotation is Weight)

        plain = [p for p in parameters[at + 1 :] if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        own = [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
        count = at + 4 + len(plain)

        @wraps(fn)
        def call(*args: Any, format: str, group_size: int, **options: Any) -> Any:
            given = dict(zip(inputs, args[count:]))
            for name in inputs[len(given) :]:
                given[name] = options.pop(name, None)
            if inputs:
                args = args[:count]
            tensors = args[at : at + 4]
            if K_is_option:
                w = weight_of(*tensors, format, group_size, options.pop("K"))
            else:
                w = _weight_for(args[0], tensors, format, group_size, **given)
            arguments = (*args[:at], w, *args[at + 4 :])
            if check is not None:
                check(*arguments, **options)
            return fn(*arguments, **options)

        def option(name: str, kind: type) -> inspect.Parameter:
            return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind)

        kind = parameters[at].kind
        last = [inspect.Parameter(name, kind, annotation=Tensor | None, default=None) for name in inputs]
        call.__signature__ = signature.replace(
            parameters=[
                *parameters[:at],
                *(inspect.Parameter(name, kind, annotation=annotation) for name, annotation in _TENSORS),
                *plain,
                *last,
                *(option("format", str), option("group_size", int)),
                *([option("K", int)] if K_is_option else []),
                *own,
            ]
        )
        return call

    return wrap


_TENSORS = tuple(PackedWeight.__annotations__.items())


def _weight_for(
    x: Tensor, tensors: tuple[Tensor | None, ...], format: str, group_size: int, **inputs: Tensor | None
) -> Weight:
    """The weight whose rows are as long as the rows of x [..., K]; `inputs` as `weight_of` takes them."""
    if x.dim() == 0:
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}; needs [..., K]")
    try:
        return weight_of(*tensors, format, group_size, x.shape[-1], **inputs)
    except ValueError as error:
        raise ValueError(f"x is {tuple(x.shape)}, so K={x.shape[-1]}, but {error}") from None
