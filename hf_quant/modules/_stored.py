"""The parts of a weight as they are stored: their names and dtypes, and the part that belongs to the input.

That part is `input_scale`: the one scale of the input of a product where scales of activations are static.
"""

import math

import torch
from torch import Tensor, nn

from hf_quant.algorithms import PackedWeight, Statistics
from hf_quant.kernels.codes import SMALLEST_SCALE, row_max
from hf_quant.kernels.dispatch import is_plain
from hf_quant.kernels.prepack import constant
from hf_quant.kernels.rowwise.op import row_scale
from hf_quant.scheme import LinearScheme


PACKED_NAMES = PackedWeight._fields  # qdata, scale, zero_point, global_scale
INPUT_SCALE = "input_scale"
STORED_NAMES = (*PACKED_NAMES, INPUT_SCALE)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """The integer dtype under which a tensor of `dtype` is stored: its bit view if it is floating-point."""
    return _BITS[dtype.itemsize] if dtype.is_floating_point else dtype


def packed_key(part: str, weight_name: str) -> str:
    """Parameter name of a part ("qdata", "scale", ...) of a weight: `qdata`, or `qdata_gate_up_proj` for experts.

    The weight's own name comes last, so that hosts' patterns for "weight..." and "...gate_up_proj" do not match.
    """
    return part if weight_name == "weight" else f"{part}_{weight_name}"


def restored_bits(global_scale: Tensor) -> Tensor:
    """The bits of a global scale [...] int32 that a host has cast to a floating-point dtype; itself if they are lost.

    Recipes for adapters cast parameters of one dimension to fp32, and mean those of norms. The bits of a power of two
    are a number of 8 digits, which fp32 and bf16 hold exactly.
    """
    bits = global_scale.to(torch.int32)
    exact = torch.compiler.is_compiling() or not bool((bits & 0x7FFFFF).any() | (bits <= 0).any())
    return bits if exact else global_scale


class StaticInput(nn.Module):
    """The part of `QuantizedModule` that stores and reads the scale of an input."""

    scheme: LinearScheme
    shares_codes: bool
    statistics: dict[str, list[Statistics]] | None

    def parameters_changed(self) -> None:
        raise NotImplementedError

    def add_input_scale_(self, name: str, device: torch.device) -> None:
        """Register the scale of the input of weight `name`, not set yet (NaN), unless it is there."""
        key = packed_key(INPUT_SCALE, name)
        if key not in self._parameters:
            unset = torch.full((1,), torch.nan, dtype=torch.float32, device=device).view(torch.int32)
            self.register_parameter(key, nn.Parameter(unset, requires_grad=False))

    def static_scale(self, name: str = "weight", parameters: dict[str, Tensor | None] | None = None) -> Tensor | None:
        """The scale [1] fp32 that is stored for the input of a product, a view; None if each row has its own.

        `parameters` are other tensors of the same scheme. Raises ValueError if no calibration has set the scale;
        torch.compile and torch.export see no values, and then the product is NaN.
        """
        stored = (self._parameters if parameters is None else parameters).get(packed_key(INPUT_SCALE, name))
        if stored is None:
            return None
        if stored.dtype != torch.int32:
            raise ValueError(
                f"the input_scale of this {type(self).__name__} was cast to {stored.dtype}, but its bits are what is "
                "stored: load the model again, and cast parameters only where parameter.is_floating_point()"
            )
        if not torch.compiler.is_compiling() and is_plain(stored) and not stored.is_meta:
            if not constant(INPUT_SCALE, stored, _is_set, stored):
                raise ValueError(
                    f"this {type(self).__name__} has static activation scales, but none is set for {name}: calibrate "
                    "the model, or call set_input_scale_"
                )
        return stored.view(torch.float32)

    @torch.no_grad()
    def set_input_scale_(self, name: str, scale: Tensor) -> None:
        """Set the static scale of the input of a product; a tied module has the same.

        scale: one finite number of at least 2**-90, of any shape and dtype; it is stored in fp32. Raises ValueError if
        it is another, or if this scheme stores no scale.
        """
        key = packed_key(INPUT_SCALE, name)
        old = self._parameters.get(key)
        if old is None:
            raise ValueError(f"a {type(self).__name__} with the scheme {self.scheme} stores no scale of its input")
        if scale.numel() != 1 or not SMALLEST_SCALE <= float(scale) < math.inf:
            given = float(scale) if scale.numel() == 1 else tuple(scale.shape)
            raise ValueError(f"the scale of {name}'s input is {given}; needs one finite number of at least 2**-90")
        stored = scale.detach().float().reshape(1).view(torch.int32)
        stored = stored.to(self._parameters[packed_key("qdata", name)].device)
        if self.shares_codes:
            old.copy_(stored)
            torch.autograd.graph.increment_version(old)
        else:
            self._parameters[key] = nn.Parameter(stored.clone(), requires_grad=False)
        self.parameters_changed()

    def calibrate_input_(self, name: str, amax: Tensor) -> None:
        """Set the static scale of an input from its largest magnitudes, so that the largest becomes the largest code.

        amax: of each column of the input as the product sees it, rotated: [K], or of all together. A tied module keeps
        the larger of its scale and this one. Raises ValueError as `set_input_scale_`.
        """
        scale = self.scale_for(amax)
        old = self._parameters.get(packed_key(INPUT_SCALE, name))
        if self.shares_codes and old is not None:
            scale = torch.fmax(scale, old.view(torch.float32).to(scale.device))
        self.set_input_scale_(name, scale)

    def loaded_input_scale(self, name: str) -> Tensor | None:
        """`input_scale` as it is stored, by the statistics with which weight `name` is loaded; None without any."""
        found = None if self.statistics is None or not self.scheme.is_static else self.statistics.get(name)
        if found is None:
            return None
        largest = torch.stack([of.amax.max() for of in found if of.amax is not None])
        return self.scale_for(largest).view(torch.int32)

    def scale_for(self, amax: Tensor) -> Tensor:
        """The scale [1] fp32 of an input with these largest magnitudes, see `calibrate_input_`."""
        activation = self.scheme.activation
        if activation is None:
            raise ValueError(f"a {type(self).__name__} with the scheme {self.scheme} stores no scale of its input")
        return row_scale(amax.detach().float().max(), row_max(activation.format)).reshape(1)


def _is_set(stored: Tensor) -> bool:
    return not math.isnan(stored.view(torch.float32).item())
