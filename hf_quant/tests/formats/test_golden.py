"""Checkpoint bytes are forever: what earlier versions stored must be made, and read, bit for bit the same.

One safetensors file per scheme in `golden/`: the weight, its packed tensors (float8 scales as their bytes, as on disk)
and the fp32 weight they decode to. Written once by `python -m hf_quant.tests.formats.test_golden`, which never
replaces a file. Of `OLDER` the bytes are only read: they are made otherwise now.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_quant.algorithms import PackedWeight, geometry, quantize_matrix
from hf_quant.formats import FORMATS
from hf_quant.kernels.weight_only.op import dequantize_reference
from hf_quant.scheme import TensorQuant


FOLDER = Path(__file__).parent / "golden"
N, K = 3, 150  # a ragged last group, and padding within the last word


# Defaults of the first version where later ones have others; None: one scale per row.
EARLIER_GROUPS = {"int4": 128, "int3": 128, "int2": 64, "nf4": 64, "fp6_e2m3": None}


def _schemes() -> dict[str, TensorQuant]:
    schemes = {}
    for format in FORMATS.values():
        dtype = "bfloat16" if format.scale_dtype == "model" else format.scale_dtype
        group_size = EARLIER_GROUPS.get(format.name, format.group_size)
        granularity = "row" if format.name in EARLIER_GROUPS and group_size is None else format.granularity
        for symmetric in (True, False) if format.allows_asymmetric else (True,):
            quant = TensorQuant(format.name, granularity, group_size, symmetric, dtype)
            schemes[format.name + ("" if symmetric else "-asym")] = quant
            # Groups of 32 were the default of all of them.
            for size in {32: None, format.group_size: None} if format.group_scale_dtype is not None else ():
                quant = TensorQuant(format.name, "group", size, symmetric, format.group_scale_dtype)
                schemes[f"{format.name}-{quant.group_size}" + ("" if symmetric else "-asym")] = quant
    schemes["fp8_e4m3-block"] = TensorQuant("fp8_e4m3", "block")
    return schemes


SCHEMES = _schemes()
_NF4 = TensorQuant("nf4", "group", 64, scale_dtype="float8_e4m3fn")
OLDER = {
    "nvfp4-any_global_scale": SCHEMES["nvfp4"],  # global scales were no powers of two
    "nf4-fp8_scales-any_global_scale": _NF4,
    "nf4-fp8_scales": _NF4,  # each weight had a global scale of its own
}


def _weight() -> Tensor:
    """Numbers that every machine computes alike, in bf16: all signs, several magnitudes, one row of zeros."""
    steps = torch.arange(N * K).view(N, K)
    weight = ((steps * 7919 % 2003 - 1001).double() / 997 * 2.0 ** -(steps % 5)).bfloat16()
    weight[1, :64] = 0
    return weight


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 and tensor.is_floating_point() else tensor


def _decoded(packed: PackedWeight, quant: TensorQuant) -> Tensor:
    return dequantize_reference(
        *packed, format=quant.format, group_size=geometry(quant, N, K)[1], K=K, dtype=torch.float32
    )


def _contents(quant: TensorQuant) -> dict[str, Tensor]:
    weight = _weight()
    packed = quantize_matrix(weight, quant, "absmax")
    tensors = {name: _bytes(t) for name, t in packed._asdict().items() if t is not None}
    return {"weight": weight, "decoded": _decoded(packed, quant), **tensors}


@pytest.mark.parametrize("name", SCHEMES)
def test_bytes_are_those_of_earlier_versions(name: str) -> None:
    golden, made = load_file(FOLDER / f"{name}.safetensors"), _contents(SCHEMES[name])
    assert golden.keys() == made.keys()
    for key, tensor in golden.items():
        assert tensor.dtype == made[key].dtype and torch.equal(tensor, made[key]), key


@pytest.mark.parametrize("name", [*SCHEMES, *OLDER])
def test_stored_bytes_decode_to_the_same_weights(name: str) -> None:
    golden, quant = load_file(FOLDER / f"{name}.safetensors"), (SCHEMES | OLDER)[name]
    dtypes = {"qdata": FORMATS[quant.format].spec.dtype, "scale": getattr(torch, quant.scale_dtype)}
    packed = PackedWeight(
        *(
            None if golden.get(field) is None else golden[field].view(dtypes.get(field, golden[field].dtype))
            for field in PackedWeight._fields
        )
    )
    assert torch.equal(_decoded(packed, quant), golden["decoded"])
    error = (golden["decoded"] - golden["weight"].float()).norm() / golden["weight"].float().norm()
    assert 0 < error < 0.6


def test_nothing_else_is_golden() -> None:
    assert {path.stem for path in FOLDER.glob("*.safetensors")} == {*SCHEMES, *OLDER}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 100_000


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for scheme, quant in SCHEMES.items():
        if not (FOLDER / f"{scheme}.safetensors").exists():
            save_file(_contents(quant), FOLDER / f"{scheme}.safetensors")
