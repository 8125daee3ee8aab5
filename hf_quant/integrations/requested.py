"""Compare the config that a user gives for a quantized checkpoint with the one that the checkpoint has."""

from dataclasses import replace

import torch

from hf_quant.config import AUTO, QuantizerConfig
from hf_quant.patterns import matches
from hf_quant.planning import schemes_from_list
from hf_quant.resolve import SCHEME_FIELDS, fields_of, resolve_scheme, without_float_zeros
from hf_quant.scheme import LinearScheme


def take_requested(config: QuantizerConfig) -> QuantizerConfig | None:
    """Take the config that a user gave for a quantized checkpoint out of the checkpoint's own, where hosts put it.

    Raises:
        ValueError: it asks for another quantization.
    """
    requested = vars(config).pop("requested", None)
    if requested is not None:
        if requested.calibration is not None:
            raise ValueError("the checkpoint is quantized already and cannot be calibrated: leave calibration out")
        if not requested.quantizes_no_weights:
            _refuse_other(config, requested)
    return requested


def _refuse_other(config: QuantizerConfig, requested: QuantizerConfig) -> None:
    """Raise ValueError if a user asks for another quantization than the checkpoint has."""
    stored = schemes_from_list(config.plan)
    rest = {scheme for name, scheme in stored.items() if not any(matches(p, name) for p in config.modules or ())}
    is_other = (config.modules, config.modules_to_not_convert) != (requested.modules, requested.modules_to_not_convert)
    if {None, AUTO} & {config.weights, requested.weights}:
        own = [(c.weights, c.budget, c.candidates, c.algorithm) for c in (config, requested)]
        is_other |= own[0] != own[1]
    else:
        is_other |= not all(_asks_for(scheme, config, requested) for scheme in rest)
    if is_other:
        more = "; hf_quant.quantize_(model, config) adds it to a loaded model" if requested.weights is None else ""
        raise ValueError(
            f"the checkpoint is quantized already, by {config}: {', '.join(sorted({*map(str, stored.values())}))}; "
            f"the given {requested} cannot be applied to it. Leave quantization_config out, or quantize the "
            f"16-bit model{more}"
        )


def _asks_for(stored: LinearScheme, config: QuantizerConfig, requested: QuantizerConfig) -> bool:
    """True if `requested` stands for this scheme of a checkpoint, which `config` stood for when it was made.

    A field that both leave out, or have alike, is as it is stored, and so is an input transform that is not asked for:
    defaults have changed between versions.
    """
    given, asked = config.scheme_fields(), requested.scheme_fields()
    alike = {name for name in SCHEME_FIELDS if asked[name] == given[name]}
    kept = (alike if given["weights"].lower() == asked["weights"].lower() else alike & {"input_transform"}) | (
        {"input_transform"} if asked["input_transform"] is None else set()
    )
    fields = asked | {name: value for name, value in fields_of(stored).items() if name in kept}
    dtype = torch.bfloat16 if "float8" in stored.weight.scale_dtype else getattr(torch, stored.weight.scale_dtype)
    try:
        scheme, _ = resolve_scheme(fields, dtype)
    except ValueError:  # a field does not go with what is stored, such as group_size with scales of rows
        return False
    if asked["input_transform"] == "hadamard" and scheme.input_transform and stored.input_transform:
        scheme = replace(scheme, input_transform=stored.input_transform)  # of the block size that fits the layer
    return scheme == without_float_zeros(stored) and given["algorithm"] == asked["algorithm"]
