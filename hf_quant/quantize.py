"""`quantize_` and `dequantize_`: carry out a plan on a model, in place, one layer at a time."""

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from tqdm.auto import tqdm

from hf_quant._wording import first_few
from hf_quant.algorithms import PackedWeight
from hf_quant.auto import search
from hf_quant.calibration import Solved, needs_data, solve, takes_data
from hf_quant.config import NON_WEIGHT_FIELDS, QuantizerConfig, as_config
from hf_quant.kernels.native import use_huge_pages
from hf_quant.modules import (
    STORED_NAMES,
    QuantizedModule,
    check_model,
    convert_module_,
    fuse_where_possible,
    packed_key,
    restore_module_,
    share_inputs_,
    unfuse_projections_,
)
from hf_quant.planning import QuantPlan, plan, resolved, schemes_from_list
from hf_quant.scheme import LinearScheme


logger = logging.getLogger(__name__)
_Model = TypeVar("_Model", bound=nn.Module)


class Observer(NamedTuple):
    """Callbacks of a host, which updates its own records (model.config, save_pretrained) after quantization."""

    recognizes: Callable[[nn.Module], bool]
    # Called with the resolved config and the given one; both are None after dequantization.
    update: Callable[[nn.Module, QuantizerConfig | None, QuantizerConfig | None], None]
    # Writes a resolved config into what the host saves, and changes nothing else.
    record: Callable[[nn.Module, QuantizerConfig], None]
    # Called when layers of a model are prepared for training (True), and when they are the host's again (False).
    train: Callable[[nn.Module, bool], None] | None = None
    has_cache: bool = False  # True: its models may generate with a KV cache


OBSERVERS: list[Observer] = []  # filled by `integrations`


def quantize_(
    model: _Model,
    config: QuantizerConfig | str | dict[str, Any] = "int8",
    *,
    calibration: Any = None,
    tokenizer: Any = None,
    quant_plan: QuantPlan | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> _Model:
    """Quantize a model in place, layer by layer, and return it.

    Args:
        model: any nn.Module with its weights loaded. A quantized model of transformers or diffusers takes a config
            without `weights`: a KV cache, or `modules` that name what is left in 16 bit.
        config: a QuantizerConfig, a format or preset name, or a dict of fields.
        calibration: data for an algorithm that needs it, see `hf_quant.calibrate`; a `Calibration` that has seen data;
            or statistics, or their file. None: `config.calibration`, else text that a causal language model writes.
        tokenizer: for texts; None: the tokenizer of the model's checkpoint.
        quant_plan: the plan for this model and config, if it is made already: by `auto_plan`, which takes long.
        device: device that computes the codes, e.g. "cuda"; they are stored on the device of each weight. Default:
            the device of each weight.
        progress: True shows a progress bar.

    Raises:
        ValueError: if the model is quantized already, has weights on the meta device or with NaN or inf, a pattern
            matches nothing, nothing would be quantized, or the calibration data does not fit. The model is then
            unchanged.
    """
    check_model(model)
    config = as_config(config)
    calibration = config.calibration if calibration is None else calibration
    known = stored_config(model) if config.weights is None else None  # to which this one adds
    if config.quantizes_no_weights and known is not None:  # the weights are left unchanged
        _check_config(model, config, calibration)
        known = _joined(known, config)
        if calibration is not None:
            found = solve(model, config, QuantPlan([], 0), calibration, tokenizer=tokenizer, progress=progress).config
            known.kv_scales = found.kv_scales
        notify_observers(model, known, schemes_from_list(known.plan or []))
        return model
    device = device if device is not None else config.quantization_device
    options = {"tokenizer": tokenizer, "device": device, "progress": progress}
    if config.weights is None and known is None and any(isinstance(m, QuantizedModule) for m in model.modules()):
        raise ValueError(
            f"the model is quantized already, and this {type(model).__name__} is no model of transformers or "
            "diffusers, to which more is added: dequantize_ it first"
        )
    packed, amax, quant_plan, config = decide(model, config, calibration, quant_plan=quant_plan, **options)
    modules = dict(model.named_modules())
    names = apply_plan(model, quant_plan, device=device, packed=packed)
    for name in tqdm(names, total=len(quant_plan.quantized), desc="Quantizing", disable=not progress):
        module = modules[name]
        for weight, largest in amax.get(name, {}).items():
            assert isinstance(module, QuantizedModule)  # apply_plan has converted it
            module.calibrate_input_(weight, largest)
    fuse_as_configured_(model, config.fuse_projections)
    schemes = quant_plan.schemes
    if known is not None:
        config, schemes = _joined(known, config), {**schemes_from_list(known.plan or []), **schemes}
    notify_observers(model, config, schemes)
    use_huge_pages(model)
    return model


def _joined(known: QuantizerConfig, config: QuantizerConfig) -> QuantizerConfig:
    """The config of a quantized model, and what another one without `weights` adds to it."""
    added = {name: value for name in NON_WEIGHT_FIELDS if (value := getattr(config, name)) is not None}
    modules = {**config.modules, **{name: v for name, v in known.modules.items() if name not in config.modules}}
    fields: dict[str, Any] = {**known.to_dict(), **added, "modules": modules}
    joined = QuantizerConfig(**fields)
    joined.fuse_activations = config.fuse_activations
    return joined


def _check_config(model: nn.Module, config: QuantizerConfig, calibration: Any) -> None:
    """Raise ValueError if data is given that nothing needs, or a KV cache to a model that has none."""
    if calibration is not None and not takes_data(config, calibration):
        raise ValueError(
            f"calibration data is given, but {config} needs none: choose algorithm='gptq' or 'imatrix', "
            "activation_scale='static' or kv_cache='fp8', or leave it out"
        )
    hosts = [observer for observer in OBSERVERS if observer.has_cache]
    if config.kv_cache is not None and not any(o.recognizes(m) for o in hosts for m in model.modules()):
        raise ValueError(
            f"kv_cache is {config.kv_cache!r}, but a {type(model).__name__} is no model of transformers: leave it out"
        )


def decide(
    model: nn.Module,
    config: QuantizerConfig,
    calibration: Any = None,
    *,
    tokenizer: Any = None,
    quant_plan: QuantPlan | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Solved:
    """Make the plan of `quantize_`, and the codes that need data. The model is not changed.

    The arguments are those of `quantize_`. Raises ValueError as it does: everything is checked before a layer changes.
    """
    if _is_in_training(model):
        raise ValueError(
            f"this {type(model).__name__} is prepared for training: convert_qat_ makes the quantized model of it, "
            "finish_training_ the 16-bit one"
        )
    _check_config(model, config, calibration)
    options = {"tokenizer": tokenizer, "device": device, "progress": progress}
    if quant_plan is not None:
        _check_plan(model, quant_plan)
    elif config.is_auto:
        quant_plan, calibration, _ = search(model, config, calibration, **options)
        _check_choice(model, quant_plan)
    else:
        quant_plan = plan(model, config)
    if quant_plan.record is not None:
        config = copy.copy(config)
        config.calibrated_with = quant_plan.record
    quant_plan.warn(type(model).__name__)
    modules = dict(model.named_modules())
    for name, entry in quant_plan.quantized.items():
        for weight in entry.shapes:
            check_weight(modules[name].get_parameter(weight), f"{name}.{weight}" if name else weight)
    if needs_data(config) or (calibration is not None and config.has_fp8_cache):
        return solve(model, config, quant_plan, calibration, **options)
    return Solved({}, {}, quant_plan, config)


def stored_config(model: nn.Module) -> QuantizerConfig | None:
    """Return the config that a host's model was quantized with, or None if it is not quantized."""
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    return config if isinstance(config, QuantizerConfig) else None


def notify_observers(
    model: nn.Module, config: QuantizerConfig | None, schemes: dict[str, LinearScheme] | None = None
) -> None:
    """Notify the host observers of `model`, and of host models inside it.

    config: the config of a quantization, None after dequantization. schemes: {module name in `model`: scheme}.
    """
    for observer, host, own in _hosts(model, schemes or {}):
        if own or config is None or host is model:
            observer.update(host, None if config is None else resolved(config, own), config)


def notify_training(model: nn.Module, is_prepared: bool) -> None:
    """Notify the host observers of a model, and of host models inside it, that layers train, or that they do not."""
    for observer, host, _ in _hosts(model, {}):
        if observer.train is not None:
            observer.train(host, is_prepared)


def record_schemes(model: nn.Module, config: QuantizerConfig, schemes: dict[str, LinearScheme]) -> None:
    """Have a model, and host models inside it, save the record of layers that hold codes, {module name: scheme}."""
    for observer, host, own in _hosts(model, schemes):
        if own:
            observer.record(host, resolved(config, own))


def _hosts(
    model: nn.Module, schemes: dict[str, LinearScheme]
) -> Iterator[tuple[Observer, nn.Module, dict[str, LinearScheme]]]:
    """Yield the host models in a model, or itself, with their observers and the schemes of their modules.

    Models inside a host's model are skipped, because the outer model saves them.
    """
    for observer in OBSERVERS:
        if observer.recognizes(model):
            yield observer, model, schemes
            return
    for name, child in model.named_children():
        prefix = f"{name}."
        yield from _hosts(child, {n.removeprefix(prefix): s for n, s in schemes.items() if n.startswith(prefix)})


def apply_plan(
    model: nn.Module,
    quant_plan: QuantPlan,
    *,
    device: torch.device | str | None = None,
    keep_placeholder: bool = False,
    packed: Mapping[str, Mapping[str, PackedWeight]] | None = None,
) -> Iterator[str]:
    """Convert the modules of the plan one by one; yield the name of each converted module.

    `packed` holds the codes of weights that are quantized already, {module: {weight: codes}}.
    """
    modules, schemes = dict(model.named_modules()), quant_plan.schemes
    entries = sorted(quant_plan.quantized.values(), key=lambda entry: entry.shared_with is not None)
    for entry in entries:
        module = modules[entry.name]
        if entry.shared_with is None:
            convert_module_(
                module,
                schemes[entry.name],
                algorithm=entry.algorithm,
                dtype=entry.dtype,
                device=device,
                name=entry.name,
                keep_placeholder=keep_placeholder,
                packed=(packed or {}).get(entry.name),
            )
        else:
            source = modules[entry.shared_with]
            assert isinstance(source, QuantizedModule)  # sorted: the modules that others share come first
            share_codes_(module, source, name=entry.name)
        yield entry.name


def convert_empty_(
    module: nn.Module,
    weights: Iterable[str],
    scheme: LinearScheme,
    *,
    algorithm: str | None,
    dtype: torch.dtype,
    name: str,
) -> QuantizedModule:
    """Convert a module without the values of its weights; the packed parameters are set afterwards."""
    for weight in weights:
        old = module.get_parameter(weight)
        empty = torch.empty(old.shape, dtype=old.dtype, device="meta")  # empty_like would import sympy: 0.5 s
        module._parameters[weight] = nn.Parameter(empty, requires_grad=old.requires_grad)
    return convert_module_(module, scheme, algorithm=algorithm, dtype=dtype, name=name)


def share_codes_(module: nn.Module, source: QuantizedModule, *, name: str = "") -> None:
    """Quantize a module whose weight is tied to a quantized module: both then hold the same parameters."""
    own = {"algorithm": source.algorithm, "dtype": source.compute_dtype, "name": name}
    quantized = convert_empty_(module, ["weight"], source.scheme, **own)
    for part in STORED_NAMES:
        shared = source._parameters.get(packed_key(part, "weight"))
        if shared is not None:
            quantized._parameters[packed_key(part, "weight")] = shared
    quantized.shares_codes = source.shares_codes = True


def dequantize_(model: _Model, dtype: torch.dtype | None = None) -> _Model:
    """Replace the codes of every quantized module by a 16-bit weight, in place, and return the model.

    dtype: dtype of the weights, and of all other tensors in its state that have the dtype which most weights had;
    default: the dtype that each weight had, and the others stay as they are. Raises ValueError if nothing in the model
    is quantized, or if the model is sharded, because the host's hooks expect sharded weights.
    """
    check_model(model)
    found = [module for module in model.modules() if isinstance(module, QuantizedModule)]
    config = stored_config(model)
    is_plain = config is None or (_is_in_training(model) and not config.has_more_than_weights)
    if not found and is_plain:
        raise ValueError(f"nothing in this {type(model).__name__} is quantized")
    if any(module.is_sharded for module in found):
        raise ValueError(f"this {type(model).__name__} is sharded: dequantize it in one process")
    unfuse_projections_(model)
    before = Counter(module.compute_dtype for module in found).most_common(1)[0][0] if found else None
    restored: dict[int, nn.Parameter] = {}
    for module in found:
        first = packed_key("qdata", module.weight_names[0])
        codes, name = id(module._parameters[first]), module.weight_names[0]
        restore_module_(module, dtype)
        if name == "weight":  # tied modules share the weight again
            module._parameters[name] = restored.setdefault(codes, module.get_parameter(name))
    for tensor in model.state_dict(keep_vars=True).values() if dtype is not None else ():
        if isinstance(tensor, torch.Tensor) and tensor.dtype == before:
            gradient, tensor.grad = tensor.grad, None
            tensor.data = tensor.data.to(dtype)
            tensor.grad = None if gradient is None else gradient.to(dtype)
    notify_observers(model, None)
    return model


def fuse_as_configured_(model: nn.Module, fuse_projections: bool | None) -> None:
    """Fuse projections as `QuantizerConfig.fuse_projections` says; None: on a GPU, unless the model is in training.

    In every case, layers that read the same tensor quantize it only once.
    """
    share_inputs_(model)
    if fuse_projections is False or (fuse_projections is None and model.training):
        return
    num_groups, why = fuse_where_possible(model, only_on=None if fuse_projections else ("cuda", "xpu"))
    if fuse_projections and not num_groups:
        logger.warning("fuse_projections is True, but %s has nothing to fuse: %s", type(model).__name__, why)


def _is_in_training(model: nn.Module) -> bool:
    return any(getattr(module, "is_in_training", False) for module in model.modules())


def _check_plan(model: nn.Module, quant_plan: QuantPlan) -> None:
    """Raise ValueError if a plan is of another model."""
    modules = dict(model.named_modules())
    known = {name: getattr(modules.get(name), "_parameters", {}) for name in quant_plan.quantized}
    other = [name for name, entry in quant_plan.quantized.items() if not set(entry.shapes) <= set(known[name])]
    if other or not quant_plan.quantized:
        missing = first_few(other or ["quantized modules"])
        raise ValueError(f"quant_plan is of another model: this {type(model).__name__} has no {missing}")


def _check_choice(model: nn.Module, quant_plan: QuantPlan) -> None:
    """Raise ValueError if a search quantizes nothing."""
    if not quant_plan.quantized:
        raise ValueError(
            f"the search leaves all layers of this {type(model).__name__} in 16 bit, which is the fastest: keep it as "
            "it is, or bound its size, too"
        )


def check_weight(weight: torch.Tensor, name: str) -> None:
    """Raise ValueError if a weight is sharded, on the meta device, or contains NaN or inf."""
    if hasattr(weight, "full_tensor"):
        raise ValueError(f"{name} is sharded: quantize or prepare the model before that, or while it loads")
    if weight.device.type == "meta":
        raise ValueError(f"{name} is on the meta device: load the model's weights before quantizing it")
    # aminmax propagates NaN and inf, in one pass without a temporary. All weights are checked before the first is
    # converted: an error half way would leave the model half converted.
    low, high = torch.aminmax(weight.detach())
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise ValueError(f"{name} contains NaN or inf and cannot be quantized; repair the checkpoint or exclude it")
