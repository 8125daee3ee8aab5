"""Read GPTQ and AWQ: words packed along rows or columns, unsigned codes with zero points, fp16 scales.

GPTQ (https://github.com/ModelCloud/GPTQModel): `qweight` int32 [K * bits / 32, N], packed along K, low bits first;
`qzeros` int32 [groups, N * bits / 32], packed along N; `scales` [groups, N]; `g_idx` int32 [K], the group of each
column. Version 1 of the format stores zero points less one, version 2 as they are.

AWQ, version "gemm" (https://github.com/casper-hansen/AutoAWQ): `qweight` int32 [K, N / 8] and `qzeros` [groups,
N / 8], packed along N; the eight codes of a word belong to columns 0, 2, 4, 6, 1, 3, 5, 7.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_quant.algorithms import PackedWeight
from hf_quant.convert.compressed_tensors.tensors import unpack_nibbles
from hf_quant.convert.files import TensorFiles
from hf_quant.convert.foreign import Foreign, ForeignWeight
from hf_quant.convert.layers import float_zero_points
from hf_quant.formats import INT4
from hf_quant.kernels.codes import packed_words
from hf_quant.scheme import LinearScheme, TensorQuant


_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of the codes in a word, low bits first
_SIGN = 0x80  # of a byte: unsigned code ^ _SIGN is the code - 128 as int8


def read_gptq(files: TensorFiles, fields: dict[str, Any], dtype: torch.dtype | None) -> Foreign:
    """Read the weights of a GPTQ checkpoint. Raises ValueError with the reason if one is unsupported."""
    layout = str(fields.get("checkpoint_format") or "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise ValueError(f"it is a GPTQ checkpoint of the format {layout!r}; readable: 'gptq', 'gptq_v2'")
    weights = [_gptq_weight(files, module, fields, layout == "gptq") for module in _modules(files)]
    dropped = {key for key in files.tensors if key.endswith(".g_idx")}
    return Foreign(weights, dropped, list(_scale_notes(weights, dtype)))


def read_awq(files: TensorFiles, fields: dict[str, Any], dtype: torch.dtype | None) -> Foreign:
    """Read the weights of an AWQ checkpoint. Raises ValueError with the reason if one is unsupported."""
    bits, version = fields.get("bits", fields.get("w_bit")), str(fields.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm" or fields.get("zero_point") is False:
        raise ValueError(
            f"it is an AWQ checkpoint with bits {bits}, version {version!r}, zero_point {fields.get('zero_point')}; "
            "readable: bits 4, version 'gemm', with zero points"
        )
    weights = [_awq_weight(files, module, fields) for module in _modules(files)]
    return Foreign(weights, set(), list(_scale_notes(weights, dtype)))


def _modules(files: TensorFiles) -> list[str]:
    """Return the names of the quantized layers. Raises ValueError if there are none, or one lacks a tensor."""
    modules = [key.removesuffix(".qweight") for key in files.tensors if key.endswith(".qweight")]
    if not modules:
        raise ValueError("it holds no tensor named `qweight`: no layer of it is quantized")
    for module in modules:
        for part in ("qweight", "qzeros", "scales"):
            info = files.tensors.get(f"{module}.{part}")
            if info is None or len(info.shape) != 2 or 0 in info.shape:
                raise ValueError(f"{module}.{part} is {info or 'missing'}; needs a matrix")
            if part == "scales" and not info.dtype.is_floating_point:
                raise ValueError(f"{module}.{part} is {info}; needs floating-point numbers")
            if part != "scales" and info.dtype != torch.int32:
                raise ValueError(f"{module}.{part} is {info}; needs int32 words")
    return modules


def _scheme(
    files: TensorFiles, module: str, bits: int, K: int, *, stated: Any, symmetric: bool
) -> tuple[LinearScheme, int]:
    """Return (scheme, columns that share a scale) of a layer.

    Of groups of the `stated` size the last may be shorter: 192 columns are one of 128 and one of 64.
    """
    scales = files.tensors[f"{module}.scales"]
    groups = scales.shape[0]
    columns = K if groups == 1 else -(-K // groups)
    if groups > 1 and type(stated) is int and stated > 0 and -(-K // stated) == groups:
        columns = stated
    if -(-K // columns) != groups:
        raise ValueError(f"{module}.scales is {scales}, which {K} columns cannot be divided by")
    granularity, size = ("row", None) if groups == 1 else ("group", columns)
    dtype = str(scales.dtype).removeprefix("torch.")
    kind = "uint8" if symmetric or bits < 8 else "float32"  # int8 has no zero points that are codes
    return LinearScheme(TensorQuant(f"int{bits}", granularity, size, symmetric, dtype, zero_point_dtype=kind)), columns


def _gptq_weight(files: TensorFiles, module: str, fields: dict[str, Any], minus_one: bool) -> ForeignWeight:
    g_idx = files.read(f"{module}.g_idx") if f"{module}.g_idx" in files.tensors else None
    rows, N = files.tensors[f"{module}.qweight"].shape
    # `dynamic` may give layers bits of their own; the length of g_idx tells.
    bits = fields.get("bits") if g_idx is None else rows * 32 // max(g_idx.numel(), 1)
    if bits not in (4, 8):
        raise ValueError(f"{module} has {bits}-bit codes; GPTQ's can be read with 4 or 8 bits")
    K = rows * 32 // bits
    zeros = _gptq_zeros(files, module, bits, N, minus_one)
    middle = 2 ** (bits - 1)
    symmetric = bool((zeros == middle).all())
    # `dynamic` may give layers groups of their own, too; the columns of the first one tell.
    stated = fields.get("group_size") if g_idx is None else int((g_idx == 0).sum())
    scheme, columns = _scheme(files, module, bits, K, stated=stated, symmetric=symmetric)
    if g_idx is not None and not torch.equal(g_idx.long(), torch.arange(K) // columns):
        raise ValueError(
            f"{module}.g_idx orders the columns by activation (desc_act): groups that are scattered over a row "
            "have no form in hf_quant. Take a checkpoint that was made with desc_act=False"
        )
    keys = tuple(f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))

    def unpack() -> PackedWeight:
        words, scale = files.read(f"{module}.qweight").T.contiguous(), files.read(f"{module}.scales").T
        zero_point = None if symmetric else zeros
        if bits == 4:
            qdata = torch.nn.functional.pad(words, (0, packed_words(K, bits) - words.shape[1]))
        else:
            qdata = (words.view(torch.uint8) ^ _SIGN).view(torch.int8)
            zero_point = None if symmetric else float_zero_points(zeros, scale, middle)
        return PackedWeight(qdata, scale, zero_point, None)

    return ForeignWeight(module, scheme, (N, K), keys, unpack)


def _gptq_zeros(files: TensorFiles, module: str, bits: int, N: int, minus_one: bool) -> Tensor:
    """Return zero points uint8 [N, groups]. Raises ValueError if readers of version 1 disagree on their meaning."""
    words, scales = files.read(f"{module}.qzeros"), files.tensors[f"{module}.scales"]
    if words.shape[1] != -(-N * bits // 32) or scales.shape != (words.shape[0], N):
        raise ValueError(f"{module}.qzeros is {list(words.shape)} beside scales of {scales} for {N} rows")
    zeros = unpack_nibbles(words, N) if bits == 4 else words.contiguous().view(torch.uint8)[:, :N]
    if minus_one:
        largest = 2**bits - 1
        if bool((zeros == largest).any()):
            raise ValueError(
                f"{module}.qzeros stores {largest} in version 1 of GPTQ's format, a zero point that some readers take "
                f"for {largest + 1} and others for 0: the file does not show which one is meant"
            )
        zeros = zeros + 1
    return zeros.T.contiguous()


def _awq_weight(files: TensorFiles, module: str, fields: dict[str, Any]) -> ForeignWeight:
    K, words = files.tensors[f"{module}.qweight"].shape
    N, scales = words * 8, files.tensors[f"{module}.scales"]
    zeros = files.tensors[f"{module}.qzeros"]
    if zeros.shape != (scales.shape[0], words) or scales.shape[1] != N:
        raise ValueError(f"{module}.qzeros is {zeros} beside scales of {scales} for {N} rows")
    stated = fields.get("group_size", fields.get("q_group_size"))
    scheme, _ = _scheme(files, module, 4, K, stated=stated, symmetric=False)
    keys = tuple(f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
    return ForeignWeight(module, scheme, (N, K), keys, partial(_unpack_awq, files, module))


def _unpack_awq(files: TensorFiles, module: str) -> PackedWeight:
    def codes(part: str) -> Tensor:
        words = files.read(f"{module}.{part}")
        R, C = words.shape
        stored = unpack_nibbles(words, C * 8).view(R, C, 8)
        ordered = torch.empty_like(stored)
        ordered[..., list(_AWQ_COLUMNS)] = stored
        return ordered.view(R, C * 8).T.contiguous()  # [N, K], [N, groups]

    return PackedWeight(INT4.pack(codes("qweight")), files.read(f"{module}.scales").T, codes("qzeros"), None)


def _scale_notes(weights: list[ForeignWeight], dtype: torch.dtype | None) -> Iterator[str]:
    stored = {weight.scheme.weight.scale_dtype for weight in weights}
    model = str(dtype).removeprefix("torch.")
    if dtype is not None and stored != {model}:
        yield f"scales stay {', '.join(sorted(stored))}, the model's other tensors {model}: nothing is rounded"
