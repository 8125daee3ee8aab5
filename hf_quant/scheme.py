"""Records of a quantization scheme: the format of one tensor, and the scheme of one layer.

The records are plain data (standard library only): the plan creates them, `config.json` stores them, modules and
kernels read them.
"""

from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from typing import Any


GRANULARITIES = ("tensor", "row", "group", "block")
_FLOATS = ("float16", "bfloat16", "float32")
ZERO_POINT_DTYPES = ("uint8", *_FLOATS)
TRANSFORM_BLOCKS = (32, 64, 128, 256, 512, 1024)
BLOCK_SIZE = 128  # the only block of "block" granularity: 128 x 128, as DeepSeek-V3 and vLLM store fp8


@dataclass(frozen=True)
class TensorQuant:
    """Quantization of one tensor: number format, scales, zero points.

    Attributes:
        format: key of `hf_quant.FORMATS`, e.g. "int4", "fp8_e4m3", "nf4".
        granularity: the values that share a scale: "tensor", "row" (one output channel, or one token), "group"
            (`group_size` consecutive values of a row), "block" (128 x 128).
        group_size: values per scale along K; set if and only if `granularity` is "group".
        symmetric: True: there is no zero point.
        scale_dtype: dtype of the stored scale, e.g. "bfloat16", "float8_e4m3fn" (then with one fp32 `global_scale`,
            a power of two).
        dynamic: activations only: True computes a scale for each token at run time, False takes the calibrated scale
            that the layer stores; then `granularity` is "tensor".
        zero_point_dtype: "uint8": a zero point z is a code, and a weight is (code - z) * scale. A floating-point
            dtype: z is the value of code 0, and a weight is code * scale + z; only of rows or groups of integers.
    """

    format: str
    granularity: str
    group_size: int | None = None
    symmetric: bool = True
    scale_dtype: str = "float32"
    dynamic: bool = True
    zero_point_dtype: str = "uint8"

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"granularity is {self.granularity!r}; allowed: {', '.join(GRANULARITIES)}")
        if (self.group_size is not None) != (self.granularity == "group"):
            raise ValueError(
                f"granularity {self.granularity!r} with group_size {self.group_size}: "
                'group_size is given with granularity "group" and only then'
            )
        if self.zero_point_dtype not in ZERO_POINT_DTYPES:
            raise ValueError(f"zero_point_dtype is {self.zero_point_dtype!r}; allowed: {', '.join(ZERO_POINT_DTYPES)}")
        is_fit = not self.symmetric and self.granularity in ("row", "group") and self.scale_dtype in _FLOATS
        if self.has_float_zeros and not is_fit:
            raise ValueError(
                f"zero_point_dtype {self.zero_point_dtype!r} with granularity {self.granularity!r}, "
                f"symmetric={self.symmetric} and scale_dtype {self.scale_dtype!r}: it needs granularity 'row' or "
                f"'group', symmetric=False, and scales in {', '.join(_FLOATS)}"
            )

    @property
    def has_float_zeros(self) -> bool:
        """True if the zero points are floating-point numbers: added to the products of codes and scales."""
        return self.zero_point_dtype != "uint8"

    def columns_per_scale(self, K: int) -> int:
        """The number of consecutive values of a row of K that share a scale."""
        return BLOCK_SIZE if self.granularity == "block" else self.group_size or K

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        if not self.has_float_zeros:  # unknown to versions that wrote checkpoints without it
            del fields["zero_point_dtype"]
        return fields

    def __str__(self) -> str:
        extent = f"g{self.group_size}" if self.granularity == "group" else self.granularity
        zero_points = " floating-point zero points" if self.has_float_zeros else "" if self.symmetric else " asym"
        return f"{self.format} {extent}{zero_points}"


@dataclass(frozen=True)
class InputTransform:
    """A rotation of a layer's input, which spreads outliers over the columns, before it is quantized or multiplied.

    The columns change their signs by a fixed pattern (`modules.rotation`), then each block of them is multiplied with
    the orthonormal Hadamard matrix. The weight is stored in the rotated basis, so that the product is the same.
    Ashkboos et al., "QuaRot", https://arxiv.org/abs/2404.00456.

    Attributes:
        kind: "hadamard".
        block_size: columns of a block, a power of two from 32 to 1024 that divides the input features.
    """

    block_size: int
    kind: str = "hadamard"

    def __post_init__(self) -> None:
        if self.kind != "hadamard" or self.block_size not in TRANSFORM_BLOCKS:
            raise ValueError(
                f"the input transform is {self.kind!r} in blocks of {self.block_size!r}; allowed: 'hadamard', "
                f"{', '.join(map(str, TRANSFORM_BLOCKS))}"
            )

    def __str__(self) -> str:
        return f"rotated by {self.block_size}"


@dataclass(frozen=True)
class LinearScheme:
    """The scheme of one layer: its weight, and its input if that is quantized too.

    Attributes:
        weight: how the weight is stored.
        activation: how the input is quantized on the fly before the product; None keeps it in 16 bit.
        sparsity: None, or "2:4".
        cpu_activation: quantization of the input on CPUs only; needs `activation` None.
        input_transform: rotation of the input, in which basis the weight is stored; None: there is none.
    """

    weight: TensorQuant
    activation: TensorQuant | None = None
    sparsity: str | None = None
    cpu_activation: TensorQuant | None = None
    input_transform: InputTransform | None = None

    @property
    def is_static(self) -> bool:
        """True if the layer stores the scale of its input."""
        return self.activation is not None and not self.activation.dynamic

    def activation_on(self, device_type: str) -> str | None:
        """Return the format that the input is quantized to on a device, or None for 16 bit."""
        activation = self.cpu_activation if self.activation is None and device_type == "cpu" else self.activation
        return None if activation is None else activation.format

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        for name in ("cpu_activation", "input_transform"):  # unknown to versions that wrote checkpoints without it
            if fields[name] is None:
                del fields[name]
        for name in ("weight", "activation", "cpu_activation"):
            if fields.get(name) is not None:
                fields[name] = getattr(self, name).to_dict()
        return fields

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "LinearScheme":
        """Inverse of `to_dict`. Raises ValueError on fields that this version does not know."""
        known = ("weight", "activation", "sparsity", "cpu_activation", "input_transform")
        if not isinstance(fields, dict) or set(fields) - set(known) or "weight" not in fields:
            raise ValueError(f"a scheme is {{{', '.join(known)}}}, got {fields!r}")
        activation, on_cpu = fields.get("activation"), fields.get("cpu_activation")
        transform = fields.get("input_transform")
        if transform is not None and (not isinstance(transform, dict) or set(transform) != {"kind", "block_size"}):
            raise ValueError(f"not an input transform: {transform!r}; needs {{kind, block_size}}")
        return cls(
            weight=_tensor_quant(fields["weight"]),
            activation=None if activation is None else _tensor_quant(activation),
            sparsity=fields.get("sparsity"),
            cpu_activation=None if on_cpu is None else _tensor_quant(on_cpu),
            input_transform=None if transform is None else InputTransform(**transform),
        )

    def __str__(self) -> str:
        static = ", static" if self.is_static else ""
        activation = "" if self.activation is None else f", {self.activation.format} activations{static}"
        if self.cpu_activation is not None:
            activation = f", {self.cpu_activation.format} activations on CPUs"
        more = "".join(f", {part}" for part in (self.sparsity, self.input_transform) if part is not None)
        return f"{self.weight}{activation}{more}"


def _tensor_quant(fields: Any) -> TensorQuant:
    known = [field.name for field in dataclass_fields(TensorQuant)]
    if not isinstance(fields, dict) or not {"format", "granularity"} <= set(fields) <= set(known):
        raise ValueError(f"not a tensor quantization record: {fields!r}; needs some of {', '.join(known)}")
    return TensorQuant(**fields)


# Common names of whole schemes, which a user may write for `weights`. Values are QuantizerConfig fields. W4A16 is what
# that name means to engines (vLLM, SGLang): they read scales of the model's dtype only.
# Where activations are int8, inputs are rotated unless input_transform="none" is given, too: engines need that.
PRESETS: dict[str, dict[str, Any]] = {
    "W8A16": {"weights": "int8"},
    "W4A16": {"weights": "int4", "group_size": 128, "scale_dtype": "model"},
    "W4A16_ASYM": {"weights": "int4", "symmetric": False, "group_size": 128, "scale_dtype": "model"},
    "W3A16": {"weights": "int3"},
    "W2A16": {"weights": "int2"},
    "W8A16_FP8": {"weights": "fp8_e4m3"},
    "W6A16_FP6": {"weights": "fp6_e3m2"},
    "NF4": {"weights": "nf4"},
    "MXFP4A16": {"weights": "mxfp4"},
    "NVFP4A16": {"weights": "nvfp4"},
    "W8A8": {"weights": "int8", "activations": "int8"},
    "W8A8_FP8": {"weights": "fp8_e4m3", "activations": "fp8"},
    "FP8_BLOCK": {"weights": "fp8_e4m3", "activations": "fp8", "granularity": "block"},
    "W4A8": {"weights": "int4", "activations": "int8"},
    "W4A8_FP8": {"weights": "int4", "activations": "fp8"},
}
