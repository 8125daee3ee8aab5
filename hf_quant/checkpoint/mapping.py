"""The steps of quanto under their names: `quantization_map`, `requantize_`, `freeze_`.

A state dict and a map of schemes are a checkpoint, too, for a program that saves both itself.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hf_quant._wording import first_few
from hf_quant.checkpoint.header import TensorInfo
from hf_quant.checkpoint.packed import check_info, check_values, expected_tensors
from hf_quant.checkpoint.store import DTYPE_NAMES, config_of, matrix_shapes
from hf_quant.modules import INPUT_SCALE, STORED_NAMES, QuantizedModule, packed_key
from hf_quant.quantize import convert_empty_, notify_observers
from hf_quant.scheme import LinearScheme


_Model = TypeVar("_Model", bound=nn.Module)


def quantization_map(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the quantized modules of a model as JSON: {name: {"scheme", "algorithm", "dtype"}}.

    "dtype" is that of the 16-bit weight. Together with `model.state_dict()` it is all that `requantize_` needs.
    Raises ValueError if nothing in the model is quantized.
    """
    found = {
        name: {
            "scheme": module.scheme.to_dict(),
            "algorithm": module.algorithm,
            "dtype": str(module.compute_dtype).removeprefix("torch."),
        }
        for name, module in model.named_modules()
        if isinstance(module, QuantizedModule)
    }
    if not found:
        raise ValueError(f"nothing in this {type(model).__name__} is quantized: quantize_ it first")
    return found


def freeze_(model: _Model) -> _Model:
    """Return the model, after a check that it is complete: every static activation scale is set.

    In quanto this step replaces weights by codes; here `quantize_` has done it. Raises ValueError if nothing is
    quantized, or if scales are missing, with the names of the layers.
    """
    quantization_map(model)
    missing = []
    for name, module in model.named_modules():
        for weight in module.weight_names if isinstance(module, QuantizedModule) else ():
            scale = module._parameters.get(packed_key(INPUT_SCALE, weight))
            if scale is not None and not bool(scale.view(torch.float32).isfinite().all()):
                missing.append(name)
    if missing:
        raise ValueError(f"no static activation scale is set for {first_few(missing)}: calibrate the model")
    return model


def requantize_(
    model: _Model,
    state_dict: Mapping[str, Tensor],
    *,
    quantization_map: Mapping[str, Mapping[str, Any]],
    device: torch.device | str | None = None,
) -> _Model:
    """Turn a 16-bit model into the quantized one of a state dict and a map, in place, and return it.

    Args:
        model: of the same class and config, with any weights, or on the meta device.
        state_dict: of the quantized model; its tensors are used, not copied.
        quantization_map: by `quantization_map`, also after a way through JSON.
        device: for all parameters and buffers; None: where the tensors of the state dict are.

    Raises:
        ValueError: if map, state dict and model do not fit together, or the model has buffers on the meta device that
            the state dict lacks. The model is then unchanged.
    """
    modules = dict(model.named_modules())
    targets: list[tuple[str, nn.Module, LinearScheme, str | None, torch.dtype, list[str]]] = []
    expected_keys = set()
    for name, entry in quantization_map.items():
        if name not in modules or isinstance(modules[name], QuantizedModule):
            state = "does not have" if name not in modules else "has quantized already"
            raise ValueError(f"the quantization map names {name}, which this {type(model).__name__} {state}")
        if not isinstance(entry, Mapping) or entry.get("dtype") not in DTYPE_NAMES:
            raise ValueError(f"the quantization map has {str(entry)[:200]} for {name}; needs scheme, algorithm, dtype")
        scheme, module = LinearScheme.from_dict(dict(entry.get("scheme") or {})), modules[name]
        shapes = matrix_shapes(module)
        if not shapes:
            raise ValueError(f"the quantization map names {name}, a {type(module).__name__} that cannot be quantized")
        for key, info in expected_tensors(scheme, shapes).items():
            path = f"{name}.{key}" if name else key
            tensor = state_dict.get(path)
            check_info(None if tensor is None else TensorInfo(tensor.dtype, tuple(tensor.shape)), info, path)
            assert tensor is not None  # check_info has refused it
            check_values(tensor, key, scheme.weight, path)
            expected_keys.add(path)
        targets.append((name, module, scheme, entry.get("algorithm"), getattr(torch, entry["dtype"]), list(shapes)))
    replaced = {f"{name}.{weight}".lstrip(".") for name, *_, weights in targets for weight in weights}
    own = set(model.state_dict()) - replaced
    lost = [n for n, b in model.named_buffers() if b.is_meta and n not in own]
    missing, unknown = sorted(own - set(state_dict)), sorted(set(state_dict) - own - expected_keys)
    if missing or unknown or lost:
        problems = (
            f"the state dict lacks {first_few(missing)}" if missing else "",
            f"the model has no {first_few(unknown)}" if unknown else "",
            f"{first_few(lost)} is on the meta device, and no state dict holds it: make the model on the CPU"
            if lost
            else "",
        )
        raise ValueError("; ".join(filter(None, problems)))
    tied: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    for name, module, scheme, algorithm, dtype, weights in targets:
        convert_empty_(module, weights, scheme, algorithm=algorithm, dtype=dtype, name=name)
    model.load_state_dict(state_dict, assign=True)
    for first, *others in tied.values():
        for other in others:
            _tie(model, first, other)
    notify_observers(model, config_of(model), {name: scheme for name, _, scheme, *_ in targets})
    return model if device is None else model.to(device)


def _tie(model: nn.Module, first: str, other: str) -> None:
    """Let a parameter be another one again, or the codes of a weight those of another."""
    sources = [model.get_submodule(name.rpartition(".")[0]) for name in (first, other)]
    leaves = [name.rpartition(".")[2] for name in (first, other)]
    if isinstance(sources[0], QuantizedModule) and isinstance(sources[1], QuantizedModule):
        for part in STORED_NAMES:
            shared = sources[0]._parameters.get(packed_key(part, leaves[0]))
            if shared is not None:
                sources[1]._parameters[packed_key(part, leaves[1])] = shared
        sources[0].shares_codes = sources[1].shares_codes = True
    elif not any(isinstance(source, QuantizedModule) for source in sources):
        sources[1]._parameters[leaves[1]] = sources[0]._parameters[leaves[0]]
