"""PEFT: explain targets that it cannot adapt, find embeddings for prompts, count weights instead of words of codes.

Adapters need no support: quantized layers are subclasses of the layers that PEFT knows, and LoRA and similar methods
train over `QuantLinear`, `QuantConv1D`, `QuantConv2d` and `QuantEmbedding`. A weight stored as codes can neither be
trained nor be wrapped as a parameter; where PEFT would leave such a layer out, or fail far from the cause, this module
raises an error that names the cause.

Merging reads and assigns `weight`, which quantizes the sum again with the layer's own scheme (docs/training.md).
`unmerge` rounds once more, so it does not restore the old codes; `unload` before a merge does.

In quantization-aware training the sum of a weight and its LoRA is rounded, so that merging gives the trained codes.
"""

import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hf_quant.integrations.wrapping import wrap_once
from hf_quant.modules import STORED_NAMES, QuantizedModule, check_model, packed_key, uncounted_weights
from hf_quant.quantize import check_weight
from hf_quant.training import WRAPPERS


def check_modules_to_save(model: nn.Module, names: Iterable[str]) -> None:
    """Raise ValueError if PEFT would train a full copy of a quantized module; `names` is its `modules_to_save`."""
    for name, module in _modules(model):
        quantized = next((m for m in module.modules() if isinstance(m, QuantizedModule)), None)
        target = None if quantized is None else next((t for t in names if name.endswith(t)), None)
        if target is not None:
            raise ValueError(
                f"modules_to_save has {target!r}, but {name} is stored as {quantized.scheme} and cannot be trained: "
                f"quantize the model with modules={{{name!r}: None}}, or adapt it by target_modules"
            )


def quantized_parameters(model: nn.Module, targets: Iterable[str]) -> dict[str, str]:
    """Return {target: reason} for those `target_parameters` that name weights stored as codes."""
    found = {}
    for name, module in _modules(model):
        if not isinstance(module, QuantizedModule):
            continue
        for weight in module.weight_names:
            keys = [f".{name}.{key}" for key in (weight, *(packed_key(part, weight) for part in STORED_NAMES))]
            for target in targets:
                if target not in found and any(key.endswith(f".{target}") for key in keys):
                    found[target] = (
                        f"{name}.{weight} is stored as {module.scheme}, where PEFT finds no parameter to add to; "
                        f"quantize the model with modules={{{name!r}: None}} to adapt it"
                    )
    return found


@torch.no_grad()
def loftq_init_(model: nn.Module, reference: nn.Module, *, adapter_name: str = "default") -> list[str]:
    """Start the LoRA of quantized linear layers as the best correction of their rounding; return the names of these.

    A and B become the rank-r approximation of reference weight - dequantized weight, by its largest singular values
    (Li et al., https://arxiv.org/abs/2310.08659, one step), so that training starts nearer to the 16-bit model. Layers
    of other kinds keep their start.

    Args:
        model: a quantized model with LoRA, as `get_peft_model` returns it, not trained yet.
        reference: the 16-bit model that was quantized, on any device; one weight at a time is moved to the layer's.
        adapter_name: as PEFT knows it.

    Raises:
        ValueError: no quantized linear layer has this adapter, one has DoRA, whose magnitudes would be wrong, or has
            merged adapters, or the reference is no model, or has no such layer of the same shape in 16 bit, loaded and
            without NaN or inf. The model is then unchanged.
    """
    check_model(model)
    check_model(reference, "reference")
    known = dict(reference.named_modules())
    found: dict[str, tuple[Any, QuantizedModule, Tensor]] = {}
    for name, layer in model.named_modules():
        if adapter_name not in getattr(layer, "lora_A", {}):
            continue
        base = layer.get_base_layer()
        if not isinstance(base, QuantizedModule) or base.kind != "linear":
            continue
        if getattr(layer, "use_dora", {}).get(adapter_name):
            raise ValueError(f"{name} has DoRA, whose magnitudes are those of its first start: take plain LoRA")
        if layer.merged:
            raise ValueError(
                f"{name} has the adapters {layer.merged_adapters} in its weight: quantize the reference anew, and "
                "give it the adapter then"
            )
        own = name.removeprefix("base_model.model.")
        other = known.get(own)
        weight = None if isinstance(other, QuantizedModule) else getattr(other, "weight", None)
        if weight is None or weight.shape != base.weight_shape("weight"):
            raise ValueError(f"the reference has no 16-bit layer {own} of shape {base.weight_shape('weight')}")
        check_weight(weight, f"{own}.weight of the reference")
        found[own] = (layer, base, weight)
    if not found:
        raise ValueError(f"no quantized linear layer of this {type(model).__name__} has a LoRA named {adapter_name!r}")
    for layer, base, weight in found.values():
        quantized = base.dequantize_weight("weight", torch.float32)
        error = base.to_matrix("weight", weight.to(quantized.device, torch.float32) - quantized)
        A, B = layer.lora_A[adapter_name].weight, layer.lora_B[adapter_name].weight
        with torch.random.fork_rng(devices=[error.device] if error.is_cuda else []):
            torch.manual_seed(0)
            left, sizes, right = torch.svd_lowrank(error, q=min(2 * len(A) + 16, *error.shape), niter=4)
        root = (sizes[: len(A)] / layer.scaling[adapter_name]).sqrt()
        A.copy_(root.unsqueeze(1) * right[:, : len(A)].t())
        B.copy_(left[:, : len(A)] * root)
    return list(found)


def _modules(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Yield the result of `named_modules` under the names that modules have without earlier adapters."""
    return ((name.replace(".base_layer", ""), module) for name, module in model.named_modules())


def _checked(inject_adapter: Callable[..., None]) -> Callable[..., None]:
    def inject(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        config = self.peft_config[adapter_name]
        check_modules_to_save(model, getattr(config, "modules_to_save", None) or ())
        for target, reason in quantized_parameters(model, getattr(config, "target_parameters", None) or ()).items():
            raise ValueError(f"target_parameters has {target!r}, but {reason}, or adapt linear layers only")
        inject_adapter(self, model, adapter_name, *args, **kwargs)
        # PEFT turns target_modules ("all-linear" too) into target_parameters where experts are fused.
        parameters = getattr(config, "target_parameters", None) or ()
        left_out = quantized_parameters(model, parameters)
        if left_out:
            config.target_parameters = {target for target in parameters if target not in left_out}
            reason = next(iter(left_out.values()))
            warnings.warn(f"experts get no adapter for {', '.join(sorted(left_out))}: {reason}", stacklevel=2)

    return inject


def _true(count: Callable[[Any], tuple[int, int]]) -> Callable[[Any], tuple[int, int]]:
    def count_weights(self: Any) -> tuple[int, int]:
        trainable, total = count(self)
        return trainable, total + uncounted_weights(self)

    return count_weights


def _with_embeddings(set_up: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
    """Wrap the start of a prompt: PEFT finds embeddings by the name of a parameter with a row for each token."""

    def set_up_prompt(self: Any, adapter_name: str) -> None:
        model = self.base_model
        table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        if not isinstance(table, QuantizedModule):
            set_up(self, adapter_name)
            return
        find = model.get_submodule
        # The name under which PEFT looks first.
        model.get_submodule = lambda name: table if name == "embeddings.word_embeddings" else find(name)
        try:
            set_up(self, adapter_name)
        finally:
            del model.get_submodule

    return set_up_prompt


class _RoundedWithWeight(nn.Module):
    """Mixin of PEFT's LoRA of a linear layer: one product, with the rounded sum of the weight and the adapters."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("adapter_names") is not None:
            raise ValueError("adapter_names mixes adapters in a batch; a rounded weight has one sum of adapters")
        if self.disable_adapters or self.merged:
            return self.base_layer(x)
        weight = self.base_layer.weight
        for name in self.active_adapters:
            if name in self.lora_A:  # each is added as PEFT merges it, to the bit
                weight = (weight + self.get_delta_weight(name)).to(weight.dtype)
        return self.base_layer.product(x, weight)


def rounded_with_weight(holder: nn.Module) -> type[nn.Module] | None:
    """Return the class of a LoRA layer in quantization-aware training; None if `holder` is no layer of PEFT.

    Raises ValueError if merging it would give another weight than the sum of which a product is made.
    """
    tuners, lora = sys.modules.get("peft.tuners.tuners_utils"), sys.modules.get("peft.tuners.lora.layer")
    if tuners is None or lora is None or not isinstance(holder, tuners.BaseTunerLayer):
        return None
    found = type(holder)
    if found is not lora.Linear:
        raise ValueError(
            f"a weight with PEFT's {found.__module__}.{found.__qualname__} cannot be rounded together with it: adapt "
            "linear layers with LoRA, or leave the layer in 16 bit by modules={name: None}"
        )
    if any(not isinstance(dropout, nn.Identity) for dropout in holder.lora_dropout.values()):
        raise ValueError(
            "lora_dropout acts on inputs of the adapter alone, which is rounded with its weight: set it to 0"
        )
    if holder.lora_variant or any(holder.lora_bias.values()):
        raise ValueError("DoRA, other variants of LoRA and lora_bias are no sum with the weight: use plain LoRA")
    return type(f"Qat{found.__name__}", (_RoundedWithWeight, found), {})


def register() -> None:
    """Wrap the tuners of PEFT to check their targets, and its models to count weights. Further calls do nothing.

    `hf_quant._boot` calls this after each of the modules is loaded; classes that do not exist yet are skipped.
    """
    methods = [
        ("peft.tuners.tuners_utils", "BaseTuner", "inject_adapter", _checked),
        ("peft.peft_model", "PeftModel", "get_nb_trainable_parameters", _true),
        ("peft.peft_model", "PeftModel", "_setup_prompt_encoder", _with_embeddings),
        ("peft.mixed_model", "PeftMixedModel", "get_nb_trainable_parameters", _true),
    ]
    for module, name, method, wrapper in methods:
        owner = getattr(sys.modules.get(module), name, None)
        if hasattr(owner, method):
            wrap_once(owner, method, wrapper)
    if rounded_with_weight not in WRAPPERS:
        WRAPPERS.append(rounded_with_weight)


register()
