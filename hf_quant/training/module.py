"""Layers in quantization-aware training: the host's classes, whose products take weights as they will be stored.

A prepared layer keeps its plain `weight` (experts: `gate_up_proj`, `down_proj`), in the host's shape and basis, which
an optimizer trains. Beside it are the frozen scales that quantization has chosen, as integers, and the logarithm of
the factor by which training has changed them. The forward takes scale = round(scale at the start * exp(r)), rounded to
the dtype that it is stored in, and weights that are the values of their codes under this scale.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_quant.algorithms import SOLVERS, PackedWeight, empty_packed, quantize_matrix
from hf_quant.config import QuantizerConfig
from hf_quant.formats import FORMATS
from hf_quant.kernels import dequantize
from hf_quant.kernels.codes import expand_rows, expand_scale
from hf_quant.modules import PACKED_NAMES, in_basis, packed_key
from hf_quant.modules import stored_dtype as integer_dtype
from hf_quant.modules.rotation import rotated_back
from hf_quant.scheme import LinearScheme
from hf_quant.training.functions import FakeQuantize, InBasis, StoredScale
from hf_quant.training.swapped import LayerInTraining


# r = _RATE * qat_log_scale: one learning rate serves weights and scales. Adam moves every value by about its learning
# rate. 1e-4 is 1e-2 of a step of the grid for a weight of a language model, and should be about as much for a scale.
_RATE = 10.0
_LARGEST = 1.0  # of |r|: a scale changes by a factor of e at most
_ROUNDS = 20  # of moving weights, in another basis than their codes, away from borders between these


@dataclass
class Prepared:
    """Record of a prepared layer: what its quantization needs.

    Attributes:
        scheme, algorithm: as the plan has them.
        weight_names: the host's names of the weights.
        config: that of the model, with the record of a calibration.
        is_on: False: the layer computes in 16 bit.
    """

    scheme: LinearScheme
    algorithm: str | None
    weight_names: tuple[str, ...]
    config: QuantizerConfig
    is_on: bool = True


class FrozenBits(nn.Parameter):
    """The bits of a scale or zero point, as integers. They stay frozen when a whole model is unfrozen."""

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> "FrozenBits":
        return super().__new__(cls, data, False)

    def __reduce_ex__(self, proto: Any) -> Any:
        return type(self), (self.data,)

    def detach(self) -> "FrozenBits":
        """Give the same bits; torch asks for one of its own kind where it makes a parameter of a parameter."""
        return type(self)(super().detach())

    @property
    def requires_grad(self) -> bool:
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        """Stay frozen: integers have no gradient."""

    def requires_grad_(self, mode: bool = True) -> "FrozenBits":
        return self


class QatModule(LayerInTraining):
    """Mixin of all prepared layers. Instances come from `prepare_qat_`, not from a constructor.

    Attributes:
        qat: the record of its quantization.
    """

    family = "Qat"
    qat: Prepared
    _versions: dict[str, tuple[int, int]]  # of weight and log_scale when they were prepared

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key, value in destination.items():
            if isinstance(value, FrozenBits) and not keep_vars:
                destination[key] = value.data

    def weight_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a weight as the host has it."""
        return tuple(self.get_parameter(name).shape)

    def part(self, part: str, name: str) -> Tensor | None:
        """`scale`, `zero_point`, `global_scale` or `log_scale` of a weight; None if it has none.

        Of tied modules only the first has them, as hosts refuse to save a tensor under two names: `scales_of`.
        """
        return getattr(self.__dict__.get("scales_of", self), qat_key(part, name), None)

    def stored(self, name: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """scale, zero_point and global_scale of a weight as they were at the start, in their true dtypes (views)."""
        scale, zero_point, global_scale = (self.part(part, name) for part in PACKED_NAMES[1:])
        assert scale is not None
        return (
            scale.view(getattr(torch, self.qat.scheme.weight.scale_dtype)),
            zero_point,
            None if global_scale is None else global_scale.view(torch.float32),
        )

    def own_scale(self, name: str) -> Tensor:
        """The scale of a weight as training has changed it, fp32, of the stored shape and without the global scale."""
        scale = self.stored(name)[0]
        learned = self.part("log_scale", name)
        if learned is None:
            return scale.float()
        factor = (learned.float() * _RATE).clamp(-_LARGEST, _LARGEST).exp()
        return StoredScale.apply(scale.float() * factor, scale.dtype)

    def scale_of_rows(self, name: str, N: int) -> tuple[Tensor, Tensor | None]:
        """Scale, with the global scale in it, and zero point of each group: [..., N, ceil(K / group size)]."""
        scale, (_, zero_point, global_scale) = self.own_scale(name), self.stored(name)
        if global_scale is not None:
            scale = scale * global_scale.reshape(*scale.shape[:-2], 1, 1)
        return expand_rows(scale, N), None if zero_point is None else expand_rows(zero_point, N)

    def weight_as_stored(self, name: str, weight: Tensor | None = None) -> Tensor:
        """The values of the codes of a weight, its own by default: [..., N, K] in the basis of the input."""
        own, quant = self.matrix(name, weight), self.qat.scheme.weight
        self._check_optimizer(name)
        if self.qat.scheme.input_transform is not None:
            own = InBasis.apply(own, self.qat.scheme.input_transform)
        N, K = own.shape[-2:]
        scale, zero_point = self.scale_of_rows(name, N)
        return FakeQuantize.apply(own, scale, zero_point, quant.format, quant.columns_per_scale(K))

    def _check_optimizer(self, name: str) -> None:
        """Raise ValueError if an optimizer has changed the weight, but not the scale that is to learn with it."""
        learned, weight = self.part("log_scale", name), getattr(self, name)
        if torch.compiler.is_compiling() or learned is None or not (learned.requires_grad and weight.requires_grad):
            return
        before = self.__dict__.get("scales_of", self)._versions[name]
        if weight._version > before[0] and learned._version == before[1]:
            raise ValueError(
                f"an optimizer changes the {name} of this {self.host_class.__name__}, but not its scales: it was made "
                "before prepare_qat_. Make it anew, or prepare with learn_scales=False"
            )

    @torch.no_grad()
    def pack(self, name: str) -> PackedWeight:
        """The codes and scales that the layer computes with, as they are stored."""
        quant = self.qat.scheme.weight
        matrix = in_basis(self.matrix(name).detach(), self.qat.scheme.input_transform)
        _, zero_point, global_scale = self.stored(name)
        scale = self.own_scale(name).detach().to(getattr(torch, quant.scale_dtype))
        packed = empty_packed(matrix.shape, quant, matrix.device)
        packed.scale.copy_(scale)
        for target, source in ((packed.zero_point, zero_point), (packed.global_scale, global_scale)):
            if target is not None and source is not None:
                target.copy_(source)
        packed.qdata.copy_(FORMATS[quant.format].pack(self.codes(name, matrix)))
        return packed

    @torch.no_grad()
    def codes(self, name: str, matrix: Tensor) -> Tensor:
        """The codes [..., N, K] of a matrix in the basis of the input, under the present scales."""
        quant, (N, K) = self.qat.scheme.weight, matrix.shape[-2:]
        format, group_size = FORMATS[quant.format], quant.columns_per_scale(K)
        scale, zero_point = self.scale_of_rows(name, N)
        relative = matrix.float() / expand_scale(scale, N, K, group_size)
        if zero_point is not None:
            relative.round_().add_(expand_scale(zero_point.float() - 2 ** (format.bits - 1), N, K, group_size))
        return format.round(relative)

    @torch.no_grad()
    def take_scales_(self, name: str, packed: PackedWeight, *, learn_scales: bool) -> None:
        """Take the scales of a quantized weight, not changed by training yet; the weight stays."""
        weight, quant = self.get_parameter(name), self.qat.scheme.weight
        for part, tensor in zip(PACKED_NAMES[1:], packed[1:]):
            if tensor is not None:
                self._set(qat_key(part, name), FrozenBits(tensor.view(integer_dtype(tensor.dtype)).clone()))
        # Scales that are powers of two have no values near to them.
        if learn_scales and weight.requires_grad and quant.scale_dtype != "float8_e8m0fnu":
            zeros = torch.zeros(packed.scale.shape, dtype=weight.dtype, device=weight.device)
            self._set(qat_key("log_scale", name), nn.Parameter(zeros))

    @torch.no_grad()
    def start_from_(self, name: str, packed: PackedWeight) -> None:
        """Move the weights whose codes are not those of the quantized weight to these, once its scales are taken."""
        weight, moved = self.get_parameter(name), self.moved_to_codes(name, packed)
        if moved is not None:
            weight.copy_(moved)
        learned = self.part("log_scale", name)
        if learned is not None:
            self._versions[name] = (weight._version, learned._version)

    def _set(self, key: str, value: nn.Parameter) -> None:
        """Set a parameter, or its values if it is there: an optimizer goes on with the same one."""
        found = self._parameters.get(key)
        if found is None:
            self.register_parameter(key, value)
        else:
            found.copy_(value)

    @torch.no_grad()
    def moved_to_codes(self, name: str, packed: PackedWeight) -> Tensor | None:
        """The weight, in its shape and dtype, with those of its values changed whose codes are others; None: it is so.

        Weights have other codes where the algorithm has corrected them before it rounded (GPTQ), or where it divides
        by another number than the scale (norm). They go to the middle of their cell: at its border the first step of
        an optimizer would undo the choice. Raises ValueError if the dtype of the weights is too coarse for that, in
        another basis than that of the codes.
        """
        weight, quant, transform = self.get_parameter(name), self.qat.scheme.weight, self.qat.scheme.input_transform
        found = weight.detach()
        matrix = in_basis(self.matrix(name, found), transform).float()
        wanted = FORMATS[quant.format].unpack(packed.qdata, matrix.shape[-1])
        is_other = self.codes(name, matrix) != wanted
        if not bool(is_other.any()):
            return None
        middle = self._middle(name, packed, matrix.shape)
        if transform is not None:
            is_other |= self._near_borders(name, matrix, wanted)
        target = torch.where(is_other, middle, matrix)
        for _ in range(_ROUNDS):
            # `from_matrix` reads only what the host's module has, and `weight_shape`.
            host = rotated_back(target, transform).to(weight.dtype)
            found = self.quantized.from_matrix(self, name, host)  # pyrefly: ignore[bad-argument-type]
            matrix = in_basis(self.matrix(name, found), transform).float()
            is_other = self.codes(name, matrix) != wanted
            if not bool(is_other.any()):
                return found
            target = torch.where(is_other, target + (middle - matrix), target)  # what rounding has taken off
        raise ValueError(
            f"{weight.dtype} is too coarse for weights that have these codes of {self.qat.scheme}: prepare the model "
            "in torch.float32, or with input_transform='none', or with an algorithm without data"
        )

    def _middle(self, name: str, packed: PackedWeight, shape: torch.Size) -> Tensor:
        """The values of codes, fp32 [..., N, K]; for the two codes of 0 that floats have, one on each side of it."""
        quant, (N, K) = self.qat.scheme.weight, shape[-2:]
        spec, group_size = FORMATS[quant.format].spec, quant.columns_per_scale(K)
        options = {"format": quant.format, "group_size": group_size, "K": K, "dtype": torch.float32}
        values = dequantize(*packed, **options)
        if spec.minifloat is None:
            return values
        _, mantissa_bits, bias = spec.minifloat
        smallest = 2.0 ** (1 - bias - mantissa_bits)
        scale = expand_scale(self.scale_of_rows(name, N)[0], N, K, group_size)
        return torch.where(values == 0, (scale.abs() * smallest / 4).copysign(values), values)

    def _near_borders(self, name: str, matrix: Tensor, wanted: Tensor) -> Tensor:
        """True for the values of a matrix that rounding in the host's basis could take to another code."""
        dtype = self.get_parameter(name).dtype
        room = matrix.square().mean(-1, keepdim=True).sqrt() * torch.finfo(dtype).eps * 2  # 6 sigma of that rounding
        return (self.codes(name, matrix + room) != wanted) | (self.codes(name, matrix - room) != wanted)

    @torch.no_grad()
    def restart_(self) -> None:
        """Choose codes and scales for the weights as they are now, without data, and go on from these."""
        algorithm = None if self.qat.algorithm in SOLVERS else self.qat.algorithm
        for name in self.qat.weight_names:
            matrix = in_basis(self.matrix(name).detach(), self.qat.scheme.input_transform)
            packed = quantize_matrix(matrix, self.qat.scheme.weight, algorithm)
            self.take_scales_(name, packed, learn_scales=self.part("log_scale", name) is not None)
            self.start_from_(name, packed)

    def extra_repr(self) -> str:
        host = self.host_class.extra_repr(self)
        return f"{host}, prepared for {self.qat.scheme}" if host else f"prepared for {self.qat.scheme}"


def qat_key(part: str, weight_name: str) -> str:
    """Parameter name of a part of a weight in training: `qat_scale`, or `qat_scale_gate_up_proj` for experts."""
    return f"qat_{packed_key(part, weight_name)}"
