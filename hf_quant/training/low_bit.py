"""`prepare_training_` and `finish_training_`: linear layers and experts that train by products in 8 bits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from hf_quant.config import QuantizerConfig
from hf_quant.modules import QuantizedModule, route
from hf_quant.modules.products import autocast
from hf_quant.patterns import matches
from hf_quant.planning import format_table, plan, template
from hf_quant.training.products import RECIPES, Codes, Recipe, may_keep, product, weight_codes
from hf_quant.training.swapped import FAMILIES, LayerInTraining, class_in_training


_Model = TypeVar("_Model", bound=nn.Module)
PRODUCTS = ("output", "grad_input", "grad_weight")
MIN_SIZE = 256  # of rows and of columns of a weight, below which quantizing takes what the products save


class LayerProducts(NamedTuple):
    """A layer's recipe, and which of its products are computed by it: output, grad_input, grad_weight."""

    recipe: str
    in_low_bits: tuple[bool, bool, bool]

    def __str__(self) -> str:
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
    _kept: dict[str, tuple[int, int, Codes]]  # the codes of weights, with the address and the version of these
    _reuses: bool

    def __reduce_ex__(self, protocol: Any, /) -> tuple[Any, ...]:
        make, arguments, state = super().__reduce_ex__(protocol)
        return make, arguments, {**state, "_kept": {}}

    def multiply(self, input: Tensor, key: str, parameter: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """input [..., K] @ weight [N, K].T + bias, by the layer's recipe; the weight is a part of a parameter."""
        if hasattr(weight, "full_tensor"):
            raise ValueError(
                f"a weight of this {type(self).__name__} is sharded by tensor parallelism, and its parts do not train "
                "in low bits: shard by fully_shard, or keep such layers in 16 bit by modules="
            )
        device = input.device.type
        x = autocast(input, device) if torch.is_autocast_enabled(device) else input
        return product(x, weight, bias, *self.low_bit, self._codes(key, parameter, weight), input)

    def _codes(self, key: str, parameter: Tensor, weight: Tensor) -> Codes | None:
        """The codes of a weight, if they are those of an earlier call; None: to be computed.

        Weights stay as they are while gradients are accumulated, and until the backward pass that computes a block
        again. Only then codes are reused: elsewhere weights may change without a new version, as by `.data`. Layers
        keep codes from the first call on that could have reused them.
        """
        if not torch.is_grad_enabled() or not may_keep(parameter):
            return None
        is_same = parameter.grad is not None or torch._C._current_graph_task_id() != -1
        self._reuses |= is_same
        if not self._reuses:
            return None
        now = weight.data_ptr(), parameter._version
        kept = self._kept.get(key)
        if kept is None or kept[:2] != now or not is_same:
            kept = self._kept[key] = (*now, weight_codes(weight, RECIPES[self.low_bit.recipe]))
        return kept[2]


class LowBitLinear(LowBitModule):
    """A linear layer, of torch or of GPT-2, in low-bit training."""

    def forward(self, input: Tensor) -> Tensor:
        return self.multiply(input, "weight", self.weight, self.matrix("weight"), self.bias)


class LowBitExperts(LowBitModule):
    """Fused experts in low-bit training; one product for each expert."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        num_experts = self.down_proj.shape[0]

        def project(name: str, x: Tensor, offsets: Tensor) -> Tensor:
            parameter, weight = getattr(self, name), self.matrix(name)
            biases = getattr(self, f"{name}_bias") if getattr(self, "has_bias", False) else [None] * num_experts
            ends = [0, *offsets.tolist()]
            y = [
                self.multiply(x[ends[e] : ends[e + 1]], f"{name}.{e}", parameter, weight[e], biases[e])
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
    min_size: int = MIN_SIZE,
    modules: Mapping[str, str | None] | None = None,
) -> TrainingPlan:
    """Let the linear layers and experts of a model train by products in 8 bits, in place, and return the plan.

    Weights, optimizers, `state_dict` and `save_pretrained` stay as they are: only the products change, and what is
    kept for the backward pass, 1 byte for each value of an input instead of 2. `print` the plan to see which layers
    compute what, and why the others do not.

    Args:
        model: any nn.Module, not quantized. Adapters of PEFT may be added before or after.
        recipe: "int8": codes of rows and columns, with a scale each (https://arxiv.org/abs/2403.12422). "fp8_row": the
            same in fp8_e4m3, scales are powers of two. "fp8_row_gw16": the gradient of the weight in 16 bit.
            "fp8_tensor": one scale for each matrix, gradients in fp8_e5m2 (https://arxiv.org/abs/2209.05433).
            "bitnet": weights of -1, 0 and 1, inputs in int8 (https://arxiv.org/abs/2402.17764). CPUs have no products
            of fp8: there codes are multiplied in 16 bit, which is exact but not faster.
        output, grad_input, grad_weight: False computes this product in 16 bit.
        min_size: layers with fewer rows or columns stay in 16 bit.
        modules: {name, glob or "re:" pattern: a recipe, or None for 16 bit}, as in QuantizerConfig; the first match
            counts. The output layer, which stays in 16 bit, trains in low bits if it is named.

    Raises:
        ValueError: an unknown recipe, no product, no layer to train so, a model that is quantized or in training
            already, fp8 on a GPU without products of it (before sm89). The model is then unchanged.
    """
    rules = dict(modules or {})
    for name in (recipe, *filter(None, rules.values())):
        if name not in RECIPES:
            raise ValueError(f"recipe is {name!r}; allowed: {', '.join(RECIPES)}")
    in_low_bits = (output, grad_input, grad_weight)
    if not any(in_low_bits) or in_low_bits == (False, False, True) and not RECIPES[recipe].grad_weight:
        raise ValueError(f"recipe {recipe!r} computes no product in low bits: switch on output or grad_input")
    _check_model(model)
    config = QuantizerConfig("int8", modules={pattern: given and "int8" for pattern, given in rules.items()})
    found = TrainingPlan()
    for name, entry in plan(model, config).entries.items():
        found.shapes[name] = " + ".join("x".join(map(str, shape)) for shape in entry.shapes.values())
        own = next((rules[pattern] for pattern in rules if matches(pattern, name)), recipe)
        smallest = min(min(shape[-2:]) for shape in entry.shapes.values()) if entry.kind != "other" else 0
        if entry.scheme is None or own is None:
            found.reasons[name] = entry.reason or "named in modules"
        elif entry.kind not in FAMILIES[LowBitModule.family]:
            found.reasons[name] = f"a {entry.kind}: only linear layers and experts train in low bits"
        elif smallest < min_size:
            found.reasons[name] = f"smaller than min_size={min_size}"
        else:
            found.layers[name] = LayerProducts(own, in_low_bits)
    if not found.layers:
        reasons = "; ".join(sorted(set(found.reasons.values())))
        raise ValueError(f"no layer of this {type(model).__name__} would train in low bits: {reasons}")
    _check_devices(model, found)
    for name, layer in found.layers.items():
        module = model.get_submodule(name)
        module.__class__ = class_in_training(type(module), LowBitModule.family)
        assert isinstance(module, LowBitModule)
        module.low_bit, module._kept, module._reuses = layer, {}, False
    return found


def finish_training_(model: _Model) -> _Model:
    """Give the layers that `prepare_training_` has changed their classes back, in place, and return the model.

    Of the recipe "bitnet" the weights become what the layers compute with: -1, 0 or 1 times a scale, which
    `quantize_` with "int2" stores without loss. Raises ValueError if no layer is in low-bit training.
    """
    layers = [module for module in model.modules() if isinstance(module, LowBitModule)]
    if not layers:
        raise ValueError(f"no layer of this {type(model).__name__} trains in low bits: call prepare_training_ first")
    for module in layers:
        recipe = RECIPES[module.low_bit.recipe]
        if recipe.is_ternary:
            _make_ternary_(module, recipe)
        for attribute in ("low_bit", "_kept", "_reuses"):
            module.__dict__.pop(attribute, None)
        # Its type was narrowed by the class that it loses.
        module.__class__ = module.host_class  # pyrefly: ignore[bad-argument-type]
    return model


@torch.no_grad()
def _make_ternary_(module: LowBitModule, recipe: Recipe) -> None:
    for weight in module.quantized.weight_names_of(module):
        matrices = module.matrix(weight)
        for matrix in matrices.view(-1, *matrices.shape[-2:]):
            codes, scale, *_ = weight_codes(matrix, recipe)
            matrix.copy_(codes * scale.to(matrix.dtype))


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            raise ValueError(f"{name or 'the model'} is quantized: train the 16-bit model, or adapters of this one")
        if isinstance(module, LayerInTraining):
            raise ValueError(f"{name or 'the model'} is in training already: finish_training_ or convert_qat_ first")


def _check_devices(model: nn.Module, found: TrainingPlan) -> None:
    """Raise ValueError if a GPU has no products of a layer's format."""
    for name, layer in found.layers.items():
        if RECIPES[layer.recipe].format == "int8":
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
