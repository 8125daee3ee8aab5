"""`prepare_qat_` and `convert_qat_`: a model into quantization-aware training, and out of it as a quantized model."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from tqdm.auto import tqdm

from hf_quant._wording import first_few
from hf_quant.algorithms import PackedWeight
from hf_quant.config import QuantizerConfig, as_config
from hf_quant.modules import QuantizedModule, check_model, convert_module_, set_class_
from hf_quant.planning import PlanEntry, QuantPlan
from hf_quant.quantize import (
    check_weight,
    decide,
    fuse_as_configured_,
    notify_observers,
    notify_training,
    share_codes_,
)
from hf_quant.training import layers as _layers  # noqa: F401 - they register themselves
from hf_quant.training.module import Prepared, QatModule
from hf_quant.training.swapped import class_in_training, reason_not_called


_Model = TypeVar("_Model", bound=nn.Module)

# Filled by `integrations`: from the module that holds a layer as `base_layer` to the class that the holder has in
# training, or None if it is not that host's. Raises ValueError if the adapter cannot be trained so.
WRAPPERS: list[Callable[[nn.Module], type[nn.Module] | None]] = []


class _Before(NamedTuple):
    """State of a module before it was prepared."""

    module: nn.Module
    host_class: type[nn.Module]
    attributes: dict[str, Any]
    parameters: dict[str, nn.Parameter | None]

    @classmethod
    def of(cls, module: nn.Module) -> "_Before":
        return cls(module, type(module), dict(module.__dict__), dict(module._parameters))

    def restore(self) -> None:
        """Undo every change of the module; the values of its parameters stay."""
        set_class_(self.module, self.host_class)
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes)
        self.module._parameters.clear()
        self.module._parameters.update(self.parameters)


@torch.inference_mode(False)
@torch.no_grad()
def prepare_qat_(
    model: nn.Module,
    config: QuantizerConfig | str | dict[str, Any] = "int4",
    *,
    learn_scales: bool = True,
    calibration: Any = None,
    tokenizer: Any = None,
    quant_plan: QuantPlan | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> QuantPlan:
    """Prepare a model for quantization-aware training in place, and return the plan.

    From then on the planned layers compute with the weights, and the rounded inputs, that `quantize_` with the same
    config would give them. Their 16-bit weights stay parameters, and are trained through the rounding; `convert_qat_`
    makes the quantized model of them. Make the optimizer after this call, as it adds parameters.

    Args:
        model: any nn.Module with its weights loaded, not quantized. Adapters of PEFT (LoRA) may be on it: then the sum
            of weight and adapter is rounded.
        config: a QuantizerConfig, a format or preset name, or a dict of fields.
        learn_scales: True adds a parameter `qat_log_scale` to each layer whose weight is trained, in the weight's
            dtype and of its scales' shape. A scale becomes scale * exp(10 * qat_log_scale), by a factor of e at most
            (Esser et al., https://arxiv.org/abs/1902.08153). Powers of two (the scales of mxfp4) stay as they are.
        calibration, tokenizer, quant_plan, device, progress: as in `quantize_`.

    Raises:
        ValueError: as `quantize_`, and if the model is prepared already, scales of activations are static, an adapter
            is none that can be rounded with its weight, or 16 bits are too coarse for the codes in the basis of the
            weight. The model is then unchanged.
    """
    config = as_config(config)
    _check_unprepared(model)
    if config.quantizes_no_weights:
        raise ValueError(f"nothing of {type(model).__name__} would be trained: {config} quantizes no weights")
    calibration = config.calibration if calibration is None else calibration
    device = device if device is not None else config.quantization_device
    options = {"tokenizer": tokenizer, "quant_plan": quant_plan, "device": device, "progress": progress}
    packed, _, quant_plan, config = decide(model, config, calibration, **options)
    modules = dict(model.named_modules())
    _check_layers(quant_plan, model)
    before: list[_Before] = []
    try:
        before += _prepare_wrappers(modules, quant_plan)
        starts: list[tuple[QatModule, dict[str, PackedWeight]]] = []
        entries = sorted(quant_plan.quantized.values(), key=lambda entry: entry.shared_with is not None)
        for entry in tqdm(entries, desc="Preparing", disable=not progress):
            module = modules[entry.name]
            before.append(_Before.of(module))
            if entry.shared_with is not None:
                _swap_class(module, entry, config).__dict__["scales_of"] = modules[entry.shared_with]
                continue
            codes = _codes(module, entry, packed.pop(entry.name, {}), device)
            before[-1].restore()
            prepared = _swap_class(module, entry, config)
            for name, of in codes.items():
                prepared.take_scales_(name, of, learn_scales=learn_scales)
            starts.append((prepared, codes))
        for prepared, codes in starts:  # what can fail comes before weights change
            if prepared.qat.scheme.input_transform is not None:
                for name, of in codes.items():
                    prepared.moved_to_codes(name, of)
        for prepared, codes in starts:
            for name, of in codes.items():
                prepared.start_from_(name, of)
    except BaseException:  # out of memory and Ctrl-C, too, must leave a model that works
        for state in reversed(before):
            state.restore()
        raise
    notify_training(model, True)
    return quant_plan


@torch.inference_mode(False)
@torch.no_grad()
def convert_qat_(model: _Model) -> _Model:
    """Convert a prepared model into the quantized one in place, and return it.

    The codes and scales are those that the prepared layers compute with: nothing is chosen again. The result is as a
    model after `quantize_`: it generates, and is saved and loaded as any quantized model.

    Raises:
        ValueError: no layer of the model is prepared, an adapter is not merged, a layer is sharded, or a weight
            contains NaN or inf. The model is then unchanged.
    """
    check_model(model)
    found = {name: module for name, module in model.named_modules() if isinstance(module, QatModule)}
    if not found:
        raise ValueError(f"no layer of this {type(model).__name__} is prepared: prepare_qat_ it, and train it, first")
    for name, module in found.items():
        _check_converts(name, module)
    packed: dict[int, PackedWeight] = {}  # by the weight, which tied modules share
    for module in found.values():
        for weight in module.qat.weight_names:
            key = id(module._parameters[weight])
            packed[key] = packed[key] if key in packed else module.pack(weight)
    config = next(iter(found.values())).qat.config
    first: dict[int, QuantizedModule] = {}
    for name, module in found.items():
        record, key = module.qat, id(module._parameters[module.qat.weight_names[0]])
        codes = {weight: packed[id(module._parameters[weight])] for weight in record.weight_names}
        restore_host_(module)
        if key in first:
            share_codes_(module, first[key], name=name)
        else:
            dtype = module.get_parameter(record.weight_names[0]).dtype
            options = {"algorithm": record.algorithm, "dtype": dtype, "name": name, "packed": codes}
            first[key] = convert_module_(module, record.scheme, **options)
    notify_training(model, False)
    schemes = {name: module.scheme for name, module in model.named_modules() if isinstance(module, QuantizedModule)}
    fuse_as_configured_(model, config.fuse_projections)
    notify_observers(model, config, schemes)
    return model


def restore_host_(module: QatModule) -> None:
    """Give a prepared layer its class back, with its trained weights; what training added goes."""
    for name in [name for name in module._parameters if name.startswith("qat_")]:
        del module._parameters[name]
    for attribute in ("qat", "_versions", "scales_of"):
        module.__dict__.pop(attribute, None)
    set_class_(module, module.host_class)


def _check_layers(quant_plan: QuantPlan, model: nn.Module) -> None:
    """Raise ValueError if a planned layer cannot be trained so."""
    static = [name for name, scheme in quant_plan.schemes.items() if scheme.is_static]
    if static:
        raise ValueError(
            f"{first_few(static)} would have static scales of activations, which are not trained: leave out "
            "activation_scale='static'"
        )
    sparse = [name for name, scheme in quant_plan.schemes.items() if scheme.sparsity is not None]
    if sparse:
        raise ValueError(
            f"{first_few(sparse)} would be sparse, which is not trained here: prune the model, train it by recipe "
            "'sparse24' of prepare_training_, and quantize_ it then"
        )
    reasons: dict[str, list[str]] = {}
    for name in quant_plan.quantized:
        reasons.setdefault(reason_not_called(model, name), []).append(name)
    reasons.pop("", None)
    for reason, names in reasons.items():
        raise ValueError(
            f"{first_few(names)} would not compute in training what it computes when it is converted: {reason}. Keep "
            "such layers in 16 bit by modules=, or prepare the model before a hook replaces their forward"
        )


def _check_unprepared(model: nn.Module) -> None:
    check_model(model)
    name = next((n for n, m in model.named_modules() if isinstance(m, QatModule)), None)
    if name is not None:
        raise ValueError(f"the model is prepared already ({name or 'it'} is): train it, or convert_qat_ it")


def _prepare_wrappers(modules: dict[str, nn.Module], quant_plan: QuantPlan) -> list[_Before]:
    """Give adapters around planned layers the classes that they have in training; return their state before."""
    before = []
    for name in quant_plan.quantized:
        holder, _, leaf = name.rpartition(".")
        if leaf != "base_layer":
            continue
        found = next((c for rule in WRAPPERS if (c := rule(modules[holder])) is not None), None)
        if found is not None:
            before.append(_Before.of(modules[holder]))
            set_class_(modules[holder], found)
    return before


def _codes(
    module: nn.Module, entry: PlanEntry, packed: dict[str, PackedWeight], device: torch.device | str | None
) -> dict[str, PackedWeight]:
    """The codes of a layer's weights, as `quantize_` makes them; the layer is then quantized."""
    assert entry.scheme is not None  # it is planned
    options = {"algorithm": entry.algorithm, "dtype": entry.dtype, "device": device, "name": entry.name}
    quantized = convert_module_(module, entry.scheme, packed=packed, **options)
    return {name: quantized.packed(name) for name in quantized.weight_names}


def _swap_class(module: nn.Module, entry: PlanEntry, config: QuantizerConfig) -> QatModule:
    assert entry.scheme is not None  # it is planned
    set_class_(module, class_in_training(type(module), QatModule.family))
    assert isinstance(module, QatModule)
    module.qat = Prepared(entry.scheme, entry.algorithm, tuple(entry.shapes), config)
    module._versions = {}
    return module


def _check_converts(name: str, module: QatModule) -> None:
    """Raise ValueError if a prepared layer cannot be converted now."""
    holder, _, leaf = name.rpartition(".")
    if leaf == "base_layer":
        raise ValueError(
            f"{holder} has an adapter, which was trained as a part of its weight: merge it first, "
            "convert_qat_(model.merge_and_unload())"
        )
    for weight in module.qat.weight_names:
        parameter = module.get_parameter(weight)
        if hasattr(parameter, "full_tensor"):
            raise ValueError(f"{name}.{weight} is sharded: gather the model in one process, and convert it there")
        check_weight(parameter, f"{name}.{weight}" if name else weight)
