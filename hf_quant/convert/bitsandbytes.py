"""Read bitsandbytes: NF4 and FP4 in blocks of a flattened weight, with plain or quantized scales, and LLM.int8.

Layout (https://github.com/bitsandbytes-foundation/bitsandbytes/blob/main/bitsandbytes/functional.py). 4 bits: `weight`
holds the codes of the flattened [N, K], two to a byte, the first in the high half; `weight.absmax` the scale of each
block, fp32; `weight.quant_map` the level of each code; `weight.quant_state.bitsandbytes__nf4` (or `fp4`) the block
size, dtype and shape, as JSON in bytes. With double quantization `absmax` holds bytes, which `nested_quant_map`,
`nested_absmax` and `nested_offset` decode. The levels of FP4 are twelfths of numbers that fp6_e3m2 has. 8 bits:
`weight` int8 [N, K], and `SCB` [N], the largest magnitude of each row.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_quant.algorithms import PackedWeight
from hf_quant.checkpoint import parse_json, shorten
from hf_quant.convert.files import TensorFiles
from hf_quant.convert.foreign import Foreign, ForeignWeight
from hf_quant.convert.layers import FLOATS, groups_of, tensor_info, without_zero_scales
from hf_quant.formats import FORMATS
from hf_quant.scheme import LinearScheme, TensorQuant


_STATE = re.compile(r"(?P<module>.+)\.weight\.quant_state\.bitsandbytes__(?P<kind>\w+)")
_MAX_STATE = 10_000  # bytes of JSON
_RECIPROCAL = 7.874015718698502e-3  # 1 / 127 as bitsandbytes writes it
_NEIGHBOURS = 8  # scales around the exact one that are tried
_ROWS = 256  # of scales at a time
_NF4 = list(FORMATS["nf4"].spec.levels)
_TWELFTHS = [*(sign * n for sign in (1, -1) for n in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))]  # levels of FP4
_FP4 = (torch.tensor(_TWELFTHS, dtype=torch.float32) / 12).tolist()
_FP6_CODES = [FORMATS["fp6_e3m2"].spec.levels.index(n) for n in _TWELFTHS]
_FORMATS = {"nf4": "nf4", "fp4": "fp6_e3m2"}


class _Blocks(NamedTuple):
    """The layout of a weight in 4 bits."""

    block: int
    shape: tuple[int, int]
    nested_block: int | None
    nested_offset: float


def read_bitsandbytes(files: TensorFiles, fields: dict[str, Any], dtype: torch.dtype | None) -> Foreign:
    """Read the weights of a bitsandbytes checkpoint. Raises ValueError with the reason if one is unsupported."""
    dropped = {key for key in files.tensors if key.endswith(".weight_format")}
    for key in dropped:
        if prod(files.tensors[key].shape) != 1 or int(files.read(key)) != 0:
            raise ValueError(f"{key} is not 0: its codes are in the order of another release's GPU kernels")
    states = [match for key in files.tensors if (match := _STATE.fullmatch(key)) is not None]
    dtype = dtype or torch.float16
    weights = [_four_bits(files, match["module"], match["kind"], dtype) for match in states]
    rows = [key.removesuffix(".SCB") for key in files.tensors if key.endswith(".SCB")]
    weights += [_eight_bits(files, module, dtype) for module in rows]
    if not weights:
        raise ValueError(
            "it holds no tensor named `SCB` or `weight.quant_state.bitsandbytes__nf4` (or `fp4`): no layer of it is "
            "quantized"
        )
    return Foreign(weights, dropped, list(_notes(files, weights)))


def _notes(files: TensorFiles, weights: list[ForeignWeight]) -> Iterator[str]:
    if any(key.endswith(".weight.nested_absmax") for key in files.tensors):
        yield "scales that were quantized themselves are stored as the fp32 numbers that they decode to"
    if any(weight.scheme.weight.format == _FORMATS["fp4"] for weight in weights):
        yield "FP4 is stored as fp6_e3m2, which has 12 times its levels: 2 bits more for each weight"
    if any(weight.scheme.weight.format == "int8" for weight in weights):
        yield "inputs stay in 16 bit; bitsandbytes rounds all but its outliers to 8 bits"


def _four_bits(files: TensorFiles, module: str, kind: str, dtype: torch.dtype) -> ForeignWeight:
    if kind not in _FORMATS:
        raise ValueError(f"{module} has {shorten(kind)} codes; those that can be imported: {', '.join(_FORMATS)}")
    prefix = f"{module}.weight"
    layout = _state(files, f"{prefix}.quant_state.bitsandbytes__{kind}", module)
    N, K = layout.shape
    weight, blocks = files.tensors.get(prefix), -(-N * K // layout.block)
    if weight is None or weight.nbytes != -(-N * K // 2):
        raise ValueError(f"{prefix} is {weight or 'missing'}; {N} x {K} codes of 4 bits need {-(-N * K // 2)} bytes")
    tensor_info(files, f"{prefix}.quant_map", [torch.float32], [(16,)])
    names = ["quant_map", "absmax", f"quant_state.bitsandbytes__{kind}"]
    if layout.nested_block is None:
        tensor_info(files, f"{prefix}.absmax", [torch.float32], [(blocks,)])
    else:
        names += ["nested_absmax", "nested_quant_map"]
        tensor_info(files, f"{prefix}.absmax", [torch.uint8], [(blocks,)])
        tensor_info(files, f"{prefix}.nested_quant_map", [torch.float32], [(256,)])
        nested = -(-blocks // layout.nested_block)
        tensor_info(files, f"{prefix}.nested_absmax", [torch.float32], [(nested,)])
    granularity, size, columns = groups_of(module, K, layout.block)
    scheme = LinearScheme(TensorQuant(_FORMATS[kind], granularity, size, True, "float32"))
    keys = (prefix, *(f"{prefix}.{name}" for name in names))
    unpack = partial(_unpack_four, files, prefix, layout, columns, None if kind == "nf4" else dtype)
    return ForeignWeight(module, scheme, (N, K), keys, unpack)


def _state(files: TensorFiles, name: str, module: str) -> _Blocks:
    """Read the JSON beside a weight in 4 bits."""
    info = tensor_info(files, name, [torch.uint8], dims=1)
    if info.nbytes > _MAX_STATE:
        raise ValueError(f"{name} has {info.nbytes} bytes of JSON; at most {_MAX_STATE} can be right")
    state = parse_json(bytes(files.read(name).tolist()), name)
    given, nested, offset = state.get("shape"), state.get("nested_blocksize"), state.get("nested_offset", 0.0)
    block, shape = state.get("blocksize", 0), given if isinstance(given, list) else []
    numbers = [block, *shape, 1 if nested is None else nested]
    if not shape or not all(type(n) is int and n > 0 for n in numbers) or not isinstance(offset, float | int):
        raise ValueError(f"{name} has {shorten(str(state))}; needs a blocksize and a shape of positive integers")
    if len(shape) != 2:
        raise ValueError(f"{module} has a weight of {shape}; needs a matrix")
    return _Blocks(block, (shape[0], shape[1]), nested, float(offset))


def _unpack_four(
    files: TensorFiles, prefix: str, layout: _Blocks, columns: int, fp4: torch.dtype | None
) -> PackedWeight:
    """Return the codes and scales of NF4, or with `fp4`, the dtype that its weights have to agree in, of FP4."""
    if files.read(f"{prefix}.quant_map").tolist() != (_NF4 if fp4 is None else _FP4):
        raise ValueError(f"{prefix}.quant_map has other levels than {'NF4' if fp4 is None else 'FP4'}")
    N, K = layout.shape
    pairs = files.read(prefix).contiguous().view(torch.uint8).flatten()
    codes = torch.stack([pairs >> 4, pairs & 15], -1).flatten()[: N * K].view(N, K)
    absmax = files.read(f"{prefix}.absmax")
    if layout.nested_block is not None:
        levels = files.read(f"{prefix}.nested_quant_map")[absmax.int()]
        nested = files.read(f"{prefix}.nested_absmax").repeat_interleave(layout.nested_block)[: len(levels)]
        absmax = levels * nested + torch.tensor(layout.nested_offset, dtype=torch.float32)
    if fp4 is not None:
        codes = torch.tensor(_FP6_CODES, dtype=torch.uint8)[codes.int()]
        twelfths, wanted = (torch.tensor(each, dtype=torch.float32) for each in (_TWELFTHS, _FP4))
        absmax = _agreeing(absmax[:, None], 12, twelfths, lambda part: wanted * part, fp4, prefix)[:, 0]
    # Blocks run on from row to row.
    scale = absmax.repeat_interleave(layout.block // columns)[: N * K // columns].view(N, K // columns)
    codes, scale = without_zero_scales(codes, scale, columns, _NF4.index(0.0) if fp4 is None else 0)
    return PackedWeight(FORMATS["nf4" if fp4 is None else _FORMATS["fp4"]].pack(codes), scale, None, None)


def _eight_bits(files: TensorFiles, module: str, dtype: torch.dtype) -> ForeignWeight:
    N, K = tensor_info(files, f"{module}.weight", [torch.int8], dims=2).shape
    tensor_info(files, f"{module}.SCB", FLOATS, [(N,), (N, 1), (1, N)])
    scheme = LinearScheme(TensorQuant("int8", "row", None, True, "float32"))

    def unpack() -> PackedWeight:
        codes = files.read(f"{module}.weight")
        largest, every = files.read(f"{module}.SCB").float().view(N, 1), torch.arange(1, 129).float()
        # bitsandbytes multiplies a code with SCB, then with 1 / 127.
        scale = _agreeing(largest, 127, every, lambda part: every * part * _RECIPROCAL, dtype, f"{module}.SCB")
        return PackedWeight(*without_zero_scales(codes, scale, K), None, None)

    return ForeignWeight(module, scheme, (N, K), (f"{module}.weight", f"{module}.SCB"), unpack)


def _agreeing(
    largest: Tensor,
    divisor: int,
    levels: Tensor,
    decode: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    name: str,
) -> Tensor:
    """Return the fp32 scales [N, 1] whose products with our levels are the library's weights in `dtype`.

    `decode` gives the library's weights of all levels for some of `largest` [N, 1]. Of the numbers around `largest` /
    `divisor` the closest one is taken with which all levels agree. Raises ValueError if there is none.
    """
    scales = (largest.double() / divisor).float()
    for part, scale in zip(largest.split(_ROWS), scales.split(_ROWS)):
        wanted = decode(part).to(dtype)
        bits, left = scale.view(torch.int32).clone(), torch.ones(len(part), dtype=torch.bool)
        for step in sorted(range(-_NEIGHBOURS, _NEIGHBOURS + 1), key=abs):
            candidate = (bits + step).clamp_(min=0).view(torch.float32)
            if not bool(left.any()):
                break
            found = left & ((levels * candidate).to(dtype) == wanted).all(1)
            scale[found] = candidate[found]
            left &= ~found
        if bool(left.any()):
            raise ValueError(f"{name} has a number of which no fp32 scale gives the same weights in {str(dtype)[6:]}")
    return scales
