"""Resolve what a user writes of a scheme (names, presets, fields) into a `LinearScheme`."""

import difflib
from collections.abc import Iterable
from dataclasses import replace
from math import gcd
from typing import Any

import torch

from hf_quant.formats import ALIASES, FORMATS
from hf_quant.scheme import GRANULARITIES, PRESETS, TRANSFORM_BLOCKS, InputTransform, LinearScheme, TensorQuant


_PRESET_DEFAULTS = ("group_size", "scale_dtype")  # of a preset's fields, those that a given field replaces
GROUP_SIZES = (16, 32, 64, 96, 128, 192, 256)
ACTIVATION_SCALES = ("dynamic", "static")
ACTIVATIONS = {"int8": "int8", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3"}
SCALE_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "model")
SCHEME_FIELDS = (
    *("weights", "activations", "activation_scale", "cpu_activations"),
    *("granularity", "group_size", "symmetric", "scale_dtype", "algorithm", "sparsity", "input_transform"),
)
# Larger blocks spread outliers no better on any model that was measured, and cost more; 128 divides more widths.
DEFAULT_TRANSFORM = InputTransform(128)


def entry_fields(entry: str | dict[str, Any]) -> dict[str, Any]:
    """Return the scheme fields of one value of `modules`."""
    if isinstance(entry, str):
        return {"weights": entry}
    if not isinstance(entry, dict):
        raise ValueError(f"got {entry!r}; needs a format name, a dict of scheme fields, or None")
    for name in entry:
        if name not in SCHEME_FIELDS:
            raise ValueError(unknown("field", name, SCHEME_FIELDS))
    return entry


def resolve_scheme(fields: dict[str, Any], dtype: torch.dtype) -> tuple[LinearScheme, str | None]:
    """Return (scheme, algorithm) for scheme fields and a weight of `dtype`. Raises ValueError if unsupported.

    An input transform without a block size has the largest one; `fitted` adapts it to a layer.
    """
    fields = _expand_preset(fields)
    format = FORMATS[fields["weights"]]
    activation = _activation(fields)
    sparsity, algorithm = fields.get("sparsity"), fields.get("algorithm")
    if sparsity not in (None, "2:4"):
        raise ValueError(f"sparsity is {sparsity!r}; allowed: None, '2:4'")
    if algorithm is not None:
        from hf_quant.algorithms import ALGORITHMS, SOLVERS  # code that most configs do not need

        if not isinstance(algorithm, str) or algorithm not in {**ALGORITHMS, **SOLVERS}:
            raise ValueError(unknown("algorithm", algorithm, [*ALGORITHMS, *SOLVERS]))
    granularity, group_size = _granularity(fields)
    symmetric = fields.get("symmetric")
    if not isinstance(symmetric, bool | None):
        raise ValueError(f"symmetric is {symmetric!r}; needs True, False or None")
    if symmetric is False and not format.allows_asymmetric:
        names = ", ".join(other.name for other in FORMATS.values() if other.allows_asymmetric)
        raise ValueError(f"symmetric is False, but {format.name} has no zero point; {names} have one")
    weight = TensorQuant(
        format=format.name,
        granularity=granularity,
        group_size=group_size,
        symmetric=format.symmetric if symmetric is None else symmetric,
        scale_dtype=_scale_dtype(fields, granularity, activation, dtype),
    )
    on_cpu = _cpu_activation(fields, weight, activation)
    if sparsity is not None:
        _check_sparse(fields, weight, algorithm)
    # fp8 has the same relative error at every magnitude: outliers cost it nothing that a rotation could save.
    has_steps = "int8" in (q.format for q in (activation, on_cpu) if q is not None)
    # A rotation and the corrections of gptq add up: docs/accuracy.md.
    transform = _input_transform(fields, is_default=(has_steps or algorithm == "gptq") and sparsity is None)
    return LinearScheme(weight, activation, sparsity, on_cpu, transform), algorithm


def _check_sparse(fields: dict[str, Any], weight: TensorQuant, algorithm: str | None) -> None:
    """Raise ValueError if something that was asked for would fill the zeros of sparse weights."""
    from hf_quant.algorithms import SOLVERS

    if not weight.symmetric:
        raise ValueError(f"sparsity '2:4' needs symmetric weights: {weight.format} with zero points has no code for 0")
    if algorithm in SOLVERS:
        raise ValueError(
            f"sparsity '2:4' with algorithm {algorithm!r}, which moves weights: prune the model by its data "
            "(hf_quant.training.prune_ with method='wanda'), and leave algorithm out"
        )
    if fields.get("input_transform") not in (None, "none"):
        raise ValueError("sparsity '2:4' with an input_transform: rotated weights have no zeros; leave one out")


def fitted(scheme: LinearScheme, fields: dict[str, Any], widths: Iterable[int]) -> tuple[LinearScheme, str | None]:
    """Adapt the input transform of a resolved scheme to a layer with weights of these input features.

    Returns the scheme, and the reason if there is no transform: no block size is a divisor of the widths. Raises
    ValueError if the fields ask for a block size that is none.
    """
    given, transform = fields.get("input_transform"), scheme.input_transform
    if transform is None:
        return scheme, None
    common = gcd(*widths)
    if isinstance(given, dict):
        if common % transform.block_size:
            raise ValueError(
                f"input_transform has blocks of {transform.block_size}, which do not divide {common} input features; "
                "leave the block size out, or give the layer another scheme in `modules`"
            )
        return scheme, None
    block = min(common & -common, transform.block_size)
    if block not in TRANSFORM_BLOCKS:
        return replace(scheme, input_transform=None), f"input not rotated: {common} has no power of two from 32 on"
    return replace(scheme, input_transform=InputTransform(block)), None


def _input_transform(fields: dict[str, Any], is_default: bool) -> InputTransform | None:
    given = fields.get("input_transform")
    if given is None:
        return DEFAULT_TRANSFORM if is_default else None
    if isinstance(given, dict) and set(given) == {"block_size"}:
        return InputTransform(given["block_size"])
    if given not in ("hadamard", "none"):
        raise ValueError(
            f"input_transform is {given!r}; allowed: None (the default of the scheme), 'hadamard', 'none', or "
            f"{{'block_size': n}} with n one of {', '.join(map(str, TRANSFORM_BLOCKS))}"
        )
    return DEFAULT_TRANSFORM if given == "hadamard" else None


def without_float_zeros(scheme: LinearScheme) -> LinearScheme:
    """Return the scheme of the same codes without floating-point zero points, which no field asks for."""
    if not scheme.weight.has_float_zeros:
        return scheme
    return replace(scheme, weight=replace(scheme.weight, symmetric=True, zero_point_dtype="uint8"))


def fields_of(scheme: LinearScheme) -> dict[str, Any]:
    """Return the scheme fields that `resolve_scheme` turns into this scheme for a weight of any dtype.

    No field asks for floating-point zero points, which only imported weights have: the fields are those of the same
    codes without them. Raises ValueError if there are none, because this version has no such scheme.
    """
    if scheme.weight.has_float_zeros:
        format = FORMATS.get(scheme.weight.format)
        if format is None or not format.spec.is_integer or scheme.sparsity is not None:
            raise ValueError(f"this version has no scheme {scheme.to_dict()}")
        scheme = without_float_zeros(scheme)
    weight, activation, on_cpu = scheme.weight, scheme.activation, scheme.cpu_activation
    transform = scheme.input_transform
    fixed = any(f.name == weight.format and f.fixed_group_size for f in FORMATS.values())
    fields: dict[str, Any] = {
        "weights": weight.format,
        "activations": None if activation is None else activation.format,
        "activation_scale": "static" if scheme.is_static else "dynamic",
        "cpu_activations": None if on_cpu is None else on_cpu.format,
        "granularity": weight.granularity,
        "group_size": weight.group_size,
        "symmetric": weight.symmetric,
        "scale_dtype": None if fixed else weight.scale_dtype,
        "sparsity": scheme.sparsity,
        "input_transform": None if transform is None else {"block_size": transform.block_size},
    }
    if transform is None and resolve_scheme(fields, torch.bfloat16)[0].input_transform is not None:
        fields["input_transform"] = "none"
    if resolve_scheme(fields, torch.bfloat16)[0] != scheme:
        raise ValueError(f"this version has no scheme {scheme.to_dict()}")
    return fields


def _expand_preset(fields: dict[str, Any]) -> dict[str, Any]:
    name = fields.get("weights")
    if not isinstance(name, str):
        raise ValueError(f"weights is {name!r}; needs a format or preset name")
    preset = {p.lower(): f for p, f in PRESETS.items()}.get(name.lower())
    given = {n: v for n, v in fields.items() if v is not None and n != "weights"}
    if preset is None:
        expanded = {"weights": name.lower(), **given}
    else:
        for n in sorted(given.keys() & preset.keys()):
            if n not in _PRESET_DEFAULTS and _canonical(given[n]) != _canonical(preset[n]):
                raise ValueError(f"preset {name!r} sets {n}={preset[n]!r}, but {n}={given[n]!r} is given too")
        expanded = {**preset, **given}
        if "group_size" not in given and given.get("granularity", "group") != "group":
            expanded.pop("group_size", None)
    expanded["weights"] = ALIASES.get(expanded["weights"], expanded["weights"])
    if expanded["weights"] not in FORMATS:
        raise ValueError(unknown("format or preset", name, [*FORMATS, *ALIASES, *PRESETS]))
    return expanded


def dtype_name(value: Any) -> Any:
    """Return "bfloat16" for torch.bfloat16, because JSON has no dtypes; any other value is returned unchanged."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _canonical(value: Any) -> Any:
    """Return the key of FORMATS for a format name or alias; any other value is returned unchanged."""
    return ALIASES.get(value.lower(), value.lower()) if isinstance(value, str) else value


def _activation(fields: dict[str, Any]) -> TensorQuant | None:
    name = fields.get("activations")
    if name is not None and (not isinstance(name, str) or name.lower() not in ACTIVATIONS):
        raise ValueError(f"activations is {name!r}; allowed: None, 'int8', 'fp8' (fewer bits lose the model's output)")
    scale = fields.get("activation_scale") or "dynamic"
    if scale not in ACTIVATION_SCALES:
        raise ValueError(
            f"activation_scale is {scale!r}; allowed: 'dynamic' (one per token), 'static' (one per layer, calibrated)"
        )
    if scale == "static" and name is None:
        raise ValueError(
            "activation_scale is 'static', but activations is None, and inputs in 16 bit have no scale: give "
            "activations, or take 'dynamic'"
        )
    if name is None:
        return None
    dynamic = scale == "dynamic"
    return TensorQuant(ACTIVATIONS[name.lower()], "row" if dynamic else "tensor", dynamic=dynamic)


def _cpu_activation(fields: dict[str, Any], weight: TensorQuant, activation: TensorQuant | None) -> TensorQuant | None:
    name = fields.get("cpu_activations")
    if name is None:
        return None
    if name != "int8":
        raise ValueError(f"cpu_activations is {name!r}; allowed: None, 'int8'")
    if activation is not None:
        raise ValueError(f"cpu_activations is {name!r}, but activations={activation.format!r} holds on CPUs already")
    if weight.format not in ("int2", "int4", "int8"):
        raise ValueError(
            f"cpu_activations is {name!r} with weights {weight.format!r}; only int2, int4 and int8 gain from it"
        )
    return TensorQuant(name, "row")


def _granularity(fields: dict[str, Any]) -> tuple[str, int | None]:
    format = FORMATS[fields["weights"]]
    granularity, group_size = fields.get("granularity"), fields.get("group_size")
    if granularity is None:
        granularity = format.granularity if group_size is None else "group"
    if granularity not in GRANULARITIES:
        raise ValueError(unknown("granularity", granularity, GRANULARITIES))
    if granularity not in format.granularities:
        raise ValueError(
            f"{format.name} has no granularity {granularity!r}; allowed: {', '.join(format.granularities)}"
        )
    if granularity != "group":
        if group_size is not None:
            raise ValueError(f"group_size is {group_size!r} with granularity {granularity!r}; it needs 'group'")
        return granularity, None
    if group_size is None:
        group_size = format.group_size or 128
    if format.fixed_group_size and group_size != format.group_size:
        raise ValueError(f"group_size is {group_size!r}, but {format.name} is defined with {format.group_size}")
    if type(group_size) is not int or (not format.fixed_group_size and group_size not in GROUP_SIZES):
        raise ValueError(f"group_size is {group_size!r}; allowed: {', '.join(map(str, GROUP_SIZES))}")
    return granularity, group_size


def _scale_dtype(fields: dict[str, Any], granularity: str, activation: TensorQuant | None, dtype: torch.dtype) -> str:
    format, given = FORMATS[fields["weights"]], fields.get("scale_dtype")
    model_dtype = "float32" if dtype == torch.float64 else str(dtype).removeprefix("torch.")
    if given is not None:
        if given not in SCALE_DTYPES:
            raise ValueError(unknown("scale_dtype", given, SCALE_DTYPES))
        if format.fixed_group_size and given != format.scale_dtype:
            raise ValueError(f"scale_dtype is {given!r}, but {format.name} is defined with {format.scale_dtype}")
        if given == "float8_e4m3fn" and granularity != "group":
            raise ValueError("scale_dtype 'float8_e4m3fn' needs granularity 'group': there it saves memory")
        return model_dtype if given == "model" else given
    if format.fixed_group_size:
        return format.scale_dtype
    if granularity == "group":
        return format.group_scale_dtype or model_dtype
    # Integer products are scaled in fp32; one fp32 per row costs 0.01 bits per weight.
    return "float32" if format.scale_dtype == "float32" or activation is not None else model_dtype


def unknown(what: str, given: object, known: Iterable[str]) -> str:
    """Text of the error for a name that does not exist, with the names that are close to it."""
    known = list(known)
    text = repr(given) if not isinstance(given, str) or len(given) <= 200 else f"{given[:200]!r}..."
    close = difflib.get_close_matches(str(given)[:200], known, n=3)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"known: {', '.join(known)}"
    return f"unknown {what} {text}; {hint}"
