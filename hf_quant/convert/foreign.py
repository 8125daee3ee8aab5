"""Records that a reader of another library's checkpoint returns, and the writer that makes our checkpoint of them."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import hf_quant.integrations.transformers.conv1d  # noqa: F401  (makes Conv1D known)
from hf_quant.algorithms import PackedWeight
from hf_quant.checkpoint import TensorInfo, check_info, check_values, expected_tensors
from hf_quant.config import QuantizerConfig
from hf_quant.convert.files import TensorFiles, rewrite, write_config
from hf_quant.convert.hosts import Empty
from hf_quant.integrations.loading import prepare_from_checkpoint
from hf_quant.modules import STORED_NAMES, QuantizedModule, packed_key, stored_dtype
from hf_quant.planning import schemes_to_list
from hf_quant.resolve import fields_of
from hf_quant.scheme import LinearScheme


# Names of tensors that belong to quantized layers.
_PARTS = {
    *("qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_global_scale", "weight_g_idx"),
    *("input_scale", "input_zero_point"),
    *("absmax", "quant_map", "nested_absmax", "nested_quant_map", "bitsandbytes__nf4", "bitsandbytes__fp4", "SCB"),
    *("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales"),
    *("weight_scale_inv", "activation_scale", "weight_scale_2", "_data", "_scale", "_shift"),
    *("W_q", "zero", "packing", "nbits", "_weight_qdata", "_weight_scale"),
}


class ForeignWeight(NamedTuple):
    """A quantized weight of another library's checkpoint."""

    module: str  # name of its layer
    scheme: LinearScheme
    shape: tuple[int, ...]  # (N, K); (E, N, K) for fused experts
    keys: tuple[str, ...]  # names of its tensors; our tensors are written into the file of the first one
    unpack: Callable[[], PackedWeight]  # reads the tensors and returns our bytes, scales in their true dtype
    name: str = "weight"  # of the 16-bit weight in its module
    input_scale: Callable[[], Tensor] | None = None  # reads the static scale of its input, one floating-point number

    @property
    def expected(self) -> dict[str, TensorInfo]:
        """{name in the checkpoint: TensorInfo} of our tensors."""
        tensors = expected_tensors(self.scheme, {self.name: self.shape})
        return {f"{self.module}.{part}": info for part, info in tensors.items()}


class Foreign(NamedTuple):
    """The result of a reader: weights, tensors to leave out, and notes for the user."""

    weights: list[ForeignWeight]
    dropped: set[str]
    notes: list[str]


def write_foreign(
    target: Path,
    fields: dict[str, Any],
    files: TensorFiles,
    found: Foreign,
    host: Empty,
    *,
    where: str,
    origin: dict[str, str | None],
) -> None:
    """Write the checkpoint of a model.

    `where` is the name of the source in errors, `origin` the value of `imported_from` in the config.

    Raises ValueError if the model has no such layers, or a value is beyond our grids.
    """
    weights = {weight.keys[0]: weight for weight in found.weights}
    config = _config_of(found.weights)
    config.imported_from = origin
    consumed = {key for weight in found.weights for key in weight.keys} | found.dropped
    _check_model(files, found.weights, config, consumed, host, where)
    # A linear layer, if there is one: see `checkpoint.guard_entry`.
    guarded = min(found.weights, key=lambda weight: weight.name != "weight")

    def convert(name: str) -> dict[str, Tensor]:
        if name in weights:
            tensors = _stored(weights[name])
            if weights[name] is guarded:
                tensors[f"{guarded.module}.{guarded.name}"] = torch.empty(0, dtype=host.dtype)
            return tensors
        return {} if name in consumed else {name: files.read(name)}

    rewrite(files, target, convert, stem=host.stem)
    kept = {name: value for name, value in fields.items() if name != "compression_config"}
    write_config(target, {**kept, "quantization_config": config.to_dict()})


def _config_of(weights: list[ForeignWeight]) -> QuantizerConfig:
    """Return the config of the new checkpoint: the most frequent scheme, and the plan of all.

    Raises ValueError if hf_quant has no such scheme, or not for all weights of one module.
    """
    schemes: dict[str, LinearScheme] = {}
    for weight in weights:
        try:
            fields_of(weight.scheme)
        except ValueError as error:
            raise ValueError(f"{weight.module}: {error}") from None
        if schemes.setdefault(weight.module, weight.scheme) != weight.scheme:
            raise ValueError(f"{weight.module} has weights of two schemes: {schemes[weight.module]}, {weight.scheme}")
    config = QuantizerConfig(**fields_of(Counter(schemes.values()).most_common(1)[0][0]))
    config.plan = schemes_to_list(schemes)
    return config


def _check_model(
    files: TensorFiles,
    weights: list[ForeignWeight],
    config: QuantizerConfig,
    consumed: set[str],
    host: Empty,
    where: str,
) -> None:
    """Raise ValueError unless the model has a layer of the right shape for every weight, and no part is left over."""
    keys = {key: info for key, info in files.tensors.items() if key not in consumed}
    for weight in weights:
        keys.update(weight.expected)
    model, rename, parameters = host.model, host.rename, dict(host.model.named_parameters())
    for key, info in files.tensors.items():  # what is left over of a quantized layer would be copied as a weight
        if key in consumed:
            continue
        parameter = parameters.get(rename(key))
        if parameter is None and key.rpartition(".")[2] in _PARTS:
            raise ValueError(f"{where} has {key}, but not all that belongs to it; is a shard missing?")
        is_code = info.dtype.itemsize == 1 or not info.dtype.is_floating_point
        if parameter is not None and parameter.is_floating_point() and is_code:
            raise ValueError(f"{where} has {key} as {info}, but no scale for it; is a shard missing?")
    names = prepare_from_checkpoint(model, config, keys, rename, host.tied)
    modules = dict(model.named_modules())
    owners = {w.module: rename(f"{w.module}.{w.name}").rpartition(".")[0] for w in weights}
    lost = [module for module, owner in owners.items() if not isinstance(modules.get(owner), QuantizedModule)]
    if lost:
        raise ValueError(
            f"{where} has {len(lost)} quantized layers, {lost[0]} among them, that {type(model).__name__} of "
            f"{'diffusers' if host.is_diffusers else 'transformers'} does not have: they cannot be imported"
        )
    host.check_names(keys, names)


def _stored(weight: ForeignWeight) -> dict[str, Tensor]:
    """Return {name: tensor} of a weight as our checkpoint stores it; the values are checked."""
    tensors: dict[str, Tensor] = {}
    expected = weight.expected
    input_scale = None if weight.input_scale is None else weight.input_scale().float().reshape(1)
    for part, tensor in zip(STORED_NAMES, (*weight.unpack(), input_scale)):
        if tensor is None:
            continue
        key = packed_key(part, weight.name)
        name = f"{weight.module}.{key}"
        stored = tensor.contiguous()
        stored = stored.view(stored_dtype(stored.dtype))
        check_info(TensorInfo(stored.dtype, tuple(stored.shape)), expected[name], name)
        check_values(stored, key, weight.scheme.weight, name)
        tensors[name] = stored
    return tensors
