"""`prepare_training_` and `finish_training_`: linear layers and experts that train by products in 8 bits."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_quant.algorithms import PackedWeight
from hf_quant.coded_weight import CodedWeight
from hf_quant.config import QuantizerConfig
from hf_quant.modules import (
    QuantizedModule,
    check_model,
    convert_module_,
    packed_key,
    route,
    set_class_,
    stored_dtype,
)
from hf_quant.modules.products import autocast
from hf_quant.patterns import matches
from hf_quant.planning import PlanEntry, format_table, plan, template
from hf_quant.quantize import check_weight, notify_observers, notify_training, record_schemes
from hf_quant.scheme import LinearScheme
from hf_quant.training.products import RECIPES, Codes, Recipe, grouped_product, may_keep, product, weight_codes
from hf_quant.training.shards import by_shards
from hf_quant.training.sparse import Pruned, mask_24
from hf_quant.training.swapped import (
    FAMILIES,
    LayerInTraining,
    check_trainable,
    class_in_training,
    counterpart,
    reason_not_called,
)


_logger = logging.getLogger(__name__)
_Model = TypeVar("_Model", bound=nn.Module)
PRODUCTS = ("output", "grad_input", "grad_weight")
MIN_SIZE = 256  # of rows and of columns of a weight, below which quantizing takes what the products save


class LayerProducts(NamedTuple):
    """A layer's recipe, and which of its products are computed by it: output, grad_input, grad_weight."""

    recipe: str
    in_low_bits: tuple[bool, bool, bool]

    @property
    def is_whole(self) -> bool:
        """True if all three products are in 8 bits."""
        recipe = RECIPES[self.recipe]
        return all(self.in_low_bits) and recipe.format is not None and recipe.grad_weight

    def __str__(self) -> str:
        if RECIPES[self.recipe].is_sparse:
            return f"{self.recipe}: half of the weights are zero"
        kept = RECIPES[self.recipe].grad_weight
        names = [n for n, low in zip(PRODUCTS, self.in_low_bits) if low and (kept or n != "grad_weight")]
        return f"{self.recipe}: {', '.join(names)}"


@dataclass
class TrainingPlan:
    """The layers that train in low bits, and why others do not; `print` shows both.

    Attributes:
        layers: {module name: its recipe and products}.
        reasons: {module name: why it computes in 16 bit}.
        shapes: {module name: the shapes of its weights}.
    """

    layers: dict[str, LayerProducts] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        groups: dict[tuple[str, ...], int] = {}
        for name, shape in self.shapes.items():
            products = str(self.layers.get(name, "16-bit"))
            key = (template(name) or "(model)", shape, products, self.reasons.get(name, ""))
            groups[key] = groups.get(key, 0) + 1
        rows = [("modules", "count", "shape", "products", "reason")]
        rows += [(name, str(count), *rest) for (name, *rest), count in groups.items()]
        return f"{format_table(rows)}\n{len(self.layers)} of {len(self.shapes)} modules train in low bits"

    __repr__ = __str__


class LowBitModule(LayerInTraining):
    """Mixin of all layers in low-bit training. Instances come from `prepare_training_`, not from a constructor.

    Attributes:
        low_bit: the recipe and the products.
    """

    family = "LowBit"
    low_bit: LayerProducts
    stored_as: tuple[LinearScheme, QuantizerConfig] | None  # of codes, without 16-bit weights
    _kept: dict[str, tuple[int, int, Codes]]  # the codes of weights, with the address and the version of these
    _reuses: bool

    def __reduce_ex__(self, protocol: Any, /) -> tuple[Any, ...]:
        make, arguments, state = super().__reduce_ex__(protocol)
        return make, arguments, {**state, "_kept": {}}

    def multiply(self, input: Tensor, key: str, parameter: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """input [..., K] @ weight [N, K].T + bias, by the layer's recipe; the weight is a part of a parameter."""
        if hasattr(weight, "full_tensor"):
            self._check_shards(weight)
            return by_shards(input, weight, bias, lambda x, w, b: self.multiply(x, key, parameter, w, b))
        if RECIPES[self.low_bit.recipe].is_sparse:
            return F.linear(input, Pruned.apply(weight), bias)
        device = input.device.type
        x = autocast(input, device) if torch.is_autocast_enabled(device) else input
        return product(x, weight, bias, *self.low_bit, self._codes(key, parameter, weight), input)

    def _check_shards(self, weight: Tensor) -> None:
        recipe = RECIPES[self.low_bit.recipe]
        if weight.dim() > 2 or recipe.is_ternary or recipe.scaling == "tensor":
            raise ValueError(
                f"a weight of this {type(self).__name__} is sharded by tensor parallelism, and its parts do not train "
                f"by {self.low_bit.recipe!r}: take 'int8' or 'fp8_row' for linear layers, or keep it in 16 bit by "
                "modules="
            )

    def _codes(self, key: str, parameter: Tensor, weight: Tensor) -> Codes | None:
        """The codes of a weight, if they are those of an earlier call; None: to be computed.

        Weights stay as they are while gradients are accumulated, and until the backward pass that computes a block
        again. Only then codes are reused: elsewhere weights may change without a new version, as by `.data`. Layers
        keep codes from the first call on that could have reused them.
        """
        memory = weight.codes if isinstance(weight, CodedWeight) else weight
        if not torch.is_grad_enabled() or not may_keep(memory):
            return None
        is_same = parameter.grad is not None or torch._C._current_graph_task_id() != -1
        self._reuses |= is_same
        if not self._reuses:
            return None
        now = memory.data_ptr(), parameter._version
        kept = self._kept.get(key)
        if kept is None or kept[:2] != now or not is_same:
            kept = self._kept[key] = (*now, weight_codes(weight, RECIPES[self.low_bit.recipe]))
        return kept[2]

    def __getattr__(self, name: str) -> Any:
        # torch.distributed.checkpoint looks for every name of a state dict.
        for weight in list(self.__dict__["_parameters"]) if name.startswith(("qdata", "scale")) else ():
            parts = self._codes_of(weight)
            if name in parts:
                return parts[name]
        return super().__getattr__(name)

    def _codes_of(self, weight: str) -> dict[str, Tensor]:
        """Codes and scales of a weight by the names that a quantized layer gives them; nothing if it has none."""
        parameter = self._parameters[weight]
        local = getattr(parameter, "_local_tensor", parameter)
        if not isinstance(local, CodedWeight):
            return {}
        parts = {"qdata": local.codes, "scale": local.scale.view(stored_dtype(torch.float32))}
        return {packed_key(part, weight): sharded_as(parameter, bits.detach()) for part, bits in parts.items()}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Name codes and scales as a quantized layer does."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for weight in self._parameters:
            for name, part in self._codes_of(weight).items():
                destination.pop(prefix + weight, None)
                destination[prefix + name] = part

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take codes and scales, or 16-bit weights, which are quantized."""
        for name, parameter in self._parameters.items():
            key, scale_key = (prefix + packed_key(part, name) for part in ("qdata", "scale"))
            if not isinstance(getattr(parameter, "_local_tensor", parameter), CodedWeight):
                continue
            if key in state_dict:
                given = _checked_codes(state_dict, key, scale_key, parameter)
                codes, scale = (_local_rows(parameter, tensor) for tensor in given)
                coded = CodedWeight(codes, scale.view(torch.float32), parameter.dtype)
                state_dict[prefix + name] = sharded_as(parameter, coded)
            elif prefix + name in state_dict and isinstance(parameter, CodedWeight):
                state_dict[prefix + name] = CodedWeight.of(state_dict[prefix + name])
        super()._load_from_state_dict(state_dict, prefix, *args)


def _checked_codes(state_dict: dict[str, Any], key: str, scale_key: str, parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Take codes and scales out of a state dict. Raises ValueError unless they are those of such a weight."""
    codes, scale = state_dict.pop(key), state_dict.pop(scale_key, None)
    shape, of_scale = tuple(parameter.shape), (*parameter.shape[:-1], 1)
    if codes.dtype != torch.int8 or tuple(codes.shape) != shape:
        raise ValueError(f"{key} is {tuple(codes.shape)} {codes.dtype}; needs {shape} torch.int8")
    if scale is None or scale.dtype != torch.int32 or tuple(scale.shape) != of_scale:
        found = None if scale is None else (tuple(scale.shape), scale.dtype)
        raise ValueError(f"{scale_key} is {found}; needs {of_scale} torch.int32, the bits of fp32 scales of rows")
    return codes, scale


def sharded_as(parameter: Any, part: Tensor) -> Tensor:
    """This process's rows as a tensor that is sharded as a parameter is, of as many rows; itself if that is whole."""
    if not hasattr(parameter, "placements"):
        return part
    from torch.distributed.tensor import DTensor

    shape = (*parameter.shape[:-1], part.shape[-1])
    stride = torch.empty(shape, dtype=part.dtype, device="meta").stride()
    options = {"run_check": False, "shape": torch.Size(shape), "stride": stride}
    return DTensor.from_local(part, parameter.device_mesh, parameter.placements, **options)


def _local_rows(parameter: Any, part: Any) -> Tensor:
    """This process's rows of a part that is sharded as a parameter is, or that is still whole."""
    if hasattr(part, "placements") or not hasattr(parameter, "placements"):
        return getattr(part, "_local_tensor", part)
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(part, mesh, placements, src_data_rank=None).to_local()


class LowBitLinear(LowBitModule):
    """A linear layer, of torch or of GPT-2, in low-bit training."""

    def forward(self, input: Tensor) -> Tensor:
        return self.multiply(input, "weight", self.weight, self.matrix("weight"), self.bias)


class LowBitExperts(LowBitModule):
    """Fused experts in low-bit training: grouped products, or one for each expert where some are in 16 bit."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        num_experts = self.down_proj.shape[0]

        def project(name: str, x: Tensor, offsets: Tensor) -> Tensor:
            parameter, weight = getattr(self, name), self.matrix(name)
            bias = getattr(self, f"{name}_bias") if getattr(self, "has_bias", False) else None
            if hasattr(weight, "full_tensor"):
                self._check_shards(weight)
            if self.low_bit.is_whole:
                x = autocast(x, x.device.type) if torch.is_autocast_enabled(x.device.type) else x
                codes = self._codes(name, parameter, weight)
                return grouped_product(x, weight, bias, offsets, self.low_bit.recipe, codes)
            ends, weights = [0, *offsets.tolist()], weight.unbind()
            biases = [None] * num_experts if bias is None else bias
            y = [
                self.multiply(x[ends[e] : ends[e + 1]], f"{name}.{e}", parameter, weights[e], biases[e])
                for e in range(num_experts)
            ]
            rest = len(x) - ends[-1]  # rows of other processes' experts
            return torch.cat([*y, y[0].new_zeros(rest, y[0].shape[-1])])

        return route(self, hidden_states, top_k_index, top_k_weights, num_experts, project)


FAMILIES[LowBitModule.family] = {"linear": LowBitLinear, "experts": LowBitExperts}


def prepare_training_(
    model: nn.Module,
    recipe: str = "int8",
    *,
    output: bool = True,
    grad_input: bool = True,
    grad_weight: bool = True,
    min_size: int | None = None,
    modules: Mapping[str, str | None] | None = None,
) -> TrainingPlan:
    """Let the linear layers and experts of a model train by products in 8 bits, in place, and return the plan.

    Weights, optimizers, `state_dict` and `save_pretrained` stay as they are, except with "int8_weights": only the
    products change, and what is kept for the backward pass, 1 byte for each value of an input instead of 2. `print`
    the plan to see which layers compute what, and why the others do not.

    Args:
        model: any nn.Module, not quantized. Adapters of PEFT may be added before or after.
        recipe: "int8": codes of rows and columns, with a scale each (https://arxiv.org/abs/2403.12422). "fp8_row": the
            same in fp8_e4m3, scales are powers of two. "fp8_row_gw16": the gradient of the weight in 16 bit.
            "fp8_tensor": one scale for each matrix, gradients in fp8_e5m2 (https://arxiv.org/abs/2209.05433).
            "int8_weights": as "int8", and the weights are int8 codes and nothing else, which `hf_quant.optim` changes
            by random rounding. "bitnet": weights of -1, 0 and 1, inputs in int8 (https://arxiv.org/abs/2402.17764).
            CPUs have no products of fp8: there codes are multiplied in 16 bit, which is exact but not faster.
            "sparse24": products in 16 bit of weights of which two in each four of a row are zero
            (https://arxiv.org/abs/2102.04010); which two is chosen anew in each forward pass.
        output, grad_input, grad_weight: False computes this product in 16 bit.
        min_size: layers with fewer rows or columns stay in 16 bit. None: 256, below which products in 8 bits save
            nothing; of "bitnet" and "sparse24", whose weights are to be stored so, layers of every size train.
        modules: {name, glob or "re:" pattern: a recipe, or None for 16 bit}, as in QuantizerConfig; the first match
            counts. The output layer, which stays in 16 bit, trains in low bits if it is named.

    Raises:
        ValueError: an unknown recipe, no product, no layer to train so, a model that is quantized or in training
            already, fp8 on a GPU without products of it (before sm89); for "int8_weights" a weight with NaN or inf, on
            the meta device, sharded, or shared by two layers. The model is then unchanged.
    """
    rules = dict(modules or {})
    for name in (recipe, *filter(None, rules.values())):
        if not isinstance(name, str) or name not in RECIPES:
            raise ValueError(f"recipe is {name!r}; allowed: {', '.join(RECIPES)}")
    in_low_bits = (output, grad_input, grad_weight)
    if RECIPES[recipe].is_sparse and not all(in_low_bits):
        raise ValueError(f"recipe {recipe!r} has no products to switch off: leave out output, grad_input, grad_weight")
    if not any(in_low_bits[: 2 + RECIPES[recipe].grad_weight]):
        raise ValueError(f"recipe {recipe!r} computes no product in low bits: switch on output or grad_input")
    check_trainable(model)
    fields = {"weights": "int8", "scale_dtype": "float32"}
    config = QuantizerConfig(**fields, modules={pattern: own and fields for pattern, own in rules.items()})
    entries = plan(model, config).entries
    recipes = {name: next((rules[p] for p in rules if matches(p, name)), recipe) for name in entries}
    found = _planned(model, entries, recipes, in_low_bits, min_size)
    _check_devices(model, found)
    stored = {name: entries[name] for name, layer in found.layers.items() if RECIPES[layer.recipe].is_stored}
    _check_stored(model, stored)
    for name, layer in found.layers.items():
        module = model.get_submodule(name)
        if name in stored:
            _store_codes_(module, stored[name])
        set_class_(module, class_in_training(type(module), LowBitModule.family))
        assert isinstance(module, LowBitModule)
        module.low_bit, module._kept, module._reuses = layer, {}, False
        scheme = stored[name].scheme if name in stored else None
        module.stored_as = None if scheme is None else (scheme, config)
    # A checkpoint of training then loads as a quantized model.
    record_schemes(model, config, {name: entry.scheme for name, entry in stored.items() if entry.scheme is not None})
    notify_training(model, True)
    return found


def _planned(
    model: nn.Module,
    entries: Mapping[str, PlanEntry],
    recipes: Mapping[str, str | None],
    in_low_bits: tuple[bool, bool, bool],
    min_size: int | None,
) -> TrainingPlan:
    """Decide which layers train in low bits. Raises ValueError if none does."""
    found = TrainingPlan()
    for name, entry in entries.items():
        own = recipes[name]
        found.shapes[name] = " + ".join("x".join(map(str, shape)) for shape in entry.shapes.values())
        smallest = min(min(shape[-2:]) for shape in entry.shapes.values()) if entry.kind != "other" else 0
        if entry.scheme is None or own is None:
            found.reasons[name] = entry.reason or "named in modules"
        elif entry.kind not in FAMILIES[LowBitModule.family]:
            found.reasons[name] = f"kind {entry.kind}: only linear layers and experts train in low bits"
        elif smallest < (limit := _limit(RECIPES[own]) if min_size is None else min_size):
            found.reasons[name] = f"smaller than min_size={limit}"
        elif reason := reason_not_called(model, name, in_evaluation=RECIPES[own].is_ternary or RECIPES[own].is_sparse):
            found.reasons[name] = reason
        elif RECIPES[own].is_sparse and any(shape[-1] % 4 for shape in entry.shapes.values()):
            found.reasons[name] = "its inputs are no multiple of 4"
        elif RECIPES[own].is_stored and not stores_rows(model.get_submodule(name), entry.shapes):
            found.reasons[name] = "int8 weights need a scale for each output, and this layer stores them transposed"
        else:
            found.layers[name] = LayerProducts(own, in_low_bits)
    if not found.layers:
        reasons = "; ".join(sorted(set(found.reasons.values())))
        raise ValueError(f"no layer of this {type(model).__name__} would train in low bits: {reasons}")
    return found


def _limit(recipe: Recipe) -> int:
    """The default of min_size: what a model is stored with must not depend on what its products save."""
    return 0 if recipe.is_ternary or recipe.is_sparse else MIN_SIZE


def finish_training_(model: _Model) -> _Model:
    """Give the layers that `prepare_training_` has changed their classes back, in place, and return the model.

    Of the recipe "bitnet" the weights become what the layers compute with: -1, 0 or 1 times a scale, which
    `quantize_` with "int2" stores without loss; of "sparse24" two in each four are zero then. With "int8_weights" the
    model is then quantized, as after `quantize_` with "int8", with the codes that were trained. Raises ValueError
    if no layer is in low-bit training, or if codes are sharded. The model is then unchanged.
    """
    check_model(model)
    layers = [module for module in model.modules() if isinstance(module, LowBitModule)]
    if not layers:
        raise ValueError(f"no layer of this {type(model).__name__} trains in low bits: call prepare_training_ first")
    config = None
    for module in layers:
        if module.stored_as is not None and any(hasattr(p, "full_tensor") for p in module._parameters.values()):
            raise ValueError("the int8 weights are sharded: gather the model in one process, and finish it there")
    for module in layers:
        recipe, stored_as = RECIPES[module.low_bit.recipe], module.stored_as
        if recipe.is_ternary or recipe.is_sparse:
            _round_(module, recipe)
        for attribute in ("low_bit", "stored_as", "_kept", "_reuses"):
            module.__dict__.pop(attribute, None)
        set_class_(module, module.host_class)
        if stored_as is not None:
            config = _quantize_stored(module, *stored_as)
    notify_training(model, False)
    if config is not None:
        schemes = {name: m.scheme for name, m in model.named_modules() if isinstance(m, QuantizedModule)}
        notify_observers(model, config, schemes)
    return model


def stores_rows(module: nn.Module, weights: Iterable[str]) -> bool:
    """True if the host stores these weights of a planned layer, or one in training, as matrices [..., N, K]."""
    quantized = counterpart(getattr(module, "host_class", type(module)))
    # `to_matrix` reads only what the host's module has.
    return all(quantized.to_matrix(module, n, w := module.get_parameter(n)) is w for n in weights)  # pyrefly: ignore[bad-argument-type]


def _check_stored(model: nn.Module, stored: Mapping[str, PlanEntry]) -> None:
    """Raise ValueError if weights cannot be stored as codes."""
    holders: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name)
    for name, entry in stored.items():
        for weight in entry.shapes:
            parameter = model.get_submodule(name).get_parameter(weight)
            names = holders[id(parameter)]
            if len(names) > 1:
                raise ValueError(
                    f"{' and '.join(names)} are one weight: only layers of their own train in int8_weights"
                )
            check_weight(parameter, names[0])
            if parameter.dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(f"{names[0]} is {parameter.dtype}; int8_weights trains fp32 and bf16 models: cast it")


def _store_codes_(module: nn.Module, entry: PlanEntry) -> None:
    """Store the weights of a planned layer as codes."""
    for name in entry.shapes:
        weight = module.get_parameter(name)
        coded = nn.Parameter(CodedWeight.of(weight), requires_grad=weight.requires_grad)
        try:
            torch.utils.swap_tensors(weight, coded)  # an optimizer that was made before trains the codes, then
        except RuntimeError:  # a graph, compiled or of a loss, refers to the weight
            module._parameters[name] = coded
            _logger.warning("an optimizer that was made before prepare_training_ must be made anew")


def _quantize_stored(module: nn.Module, scheme: LinearScheme, config: QuantizerConfig) -> QuantizerConfig:
    """Turn a layer with its own class, and codes as its weights, into a quantized one; return the config."""
    codes = {n: p for n, p in module.named_parameters(recurse=False) if isinstance(p, CodedWeight)}
    packed = {name: PackedWeight(w.codes, w.scale, None, None) for name, w in codes.items()}
    convert_module_(module, scheme, dtype=next(iter(codes.values())).dtype, packed=packed)
    return config


@torch.no_grad()
def _round_(module: LowBitModule, recipe: Recipe) -> None:
    """Give a layer the weights that it computes with."""
    for weight in module.quantized.weight_names_of(module):
        whole = module.matrix(weight)
        for matrix in whole if whole.dim() == 3 else [whole]:
            if recipe.is_sparse:
                matrix *= mask_24(matrix.abs())
            else:
                codes, scale, *_ = weight_codes(matrix, recipe)
                matrix.copy_(codes * scale.to(matrix.dtype))


def _check_devices(model: nn.Module, found: TrainingPlan) -> None:
    """Raise ValueError if a GPU has no products of a layer's format."""
    for name, layer in found.layers.items():
        if RECIPES[layer.recipe].format in ("int8", None):
            continue
        devices = {parameter.device for parameter in model.get_submodule(name).parameters()}
        for device in devices:
            if (
                device.type == "cuda"
                and torch.version.hip is None
                and torch.cuda.get_device_capability(device) < (8, 9)
            ):
                raise ValueError(
                    f"{layer.recipe} needs a GPU of compute capability 8.9 or later, for {name}; "
                    f"{torch.cuda.get_device_name(device)} has none: take recipe 'int8'"
                )
