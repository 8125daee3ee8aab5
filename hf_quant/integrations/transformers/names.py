"""Names of parameters in transformers and in checkpoints: renamed, merged and tied ones."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, rename_source_key

from hf_quant.modules import STORED_NAMES, QuantizedModule, packed_key


def renamer(model: nn.Module) -> Callable[[str], str]:
    """Return a function from parameter names in the checkpoint to names in the model, by the host's own renamings."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    renamings = [r for r in get_model_conversion_mapping(model) if isinstance(r, WeightRenaming)]
    state_dict = model.state_dict()

    def rename(key: str) -> str:
        renamed = rename_source_key(key, renamings, [], model.base_model_prefix, state_dict)[0]
        # As the host does: a name that the model has is not renamed to one that it lacks.
        return key if renamed not in state_dict and key in state_dict else renamed

    return rename


def check_names(model: nn.Module, keys: Iterable[str], names: list[str]) -> None:
    """Raise ValueError if the host would not find the codes of a module under the names that it gives to them."""
    rename, needed = renamer(model), set()
    modules = dict(model.named_modules())
    for name in names:
        parts = (packed_key(part, weight) for weight in modules[name].weight_names for part in STORED_NAMES)
        needed |= {f"{name}.{part}".lstrip(".") for part in parts if part in modules[name]._parameters}
    lost = needed - {rename(key) for key in keys}
    if lost:
        raise ValueError(
            f"this version of transformers does not find {min(lost)} under the name that it has in the checkpoint"
        )


def keep_layout(model: nn.Module, guard: str) -> None:
    """Remove the host's conversions that would merge, split or lose codes, or rename the guard, when it saves.

    The affected tensors are saved under the model's own names, which the host loads as well: q_proj, k_proj and v_proj
    instead of one Wqkv. Codes of different schemes cannot be merged.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    keys = {guard}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            keys |= {f"{name}.{key}" for key in module.state_dict()}
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # the model was not loaded: then the host would take these
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [c for c in conversions if not isinstance(c, PrefixChange)]

    # A user's `key_mapping` is not part of the checkpoint: it has to load without.
    known = {_patterns(c) for c in get_model_conversion_mapping(model)}

    def is_kept(conversion: Any) -> bool:
        if not isinstance(conversion, WeightConverter):
            return _patterns(conversion) in known
        reverse = conversion.reverse_transform()
        return all(reverse.rename_source_key(key)[1] is None for key in keys)

    kept = [c for c in conversions if is_kept(c)]
    # Renamings of a weight alone ("x" to "x.weight", Inkling 2) do not reach its codes on the way back, only on the
    # way in: then all tensors go by the model's own names.
    model._weight_conversions = kept if _are_found_again(model, kept, keys - {guard}) else []


def _are_found_again(model: nn.Module, conversions: list[Any], keys: Iterable[str]) -> bool:
    """True if the host finds these parameters of the model under the names by which it saves them."""
    renamings = [c.reverse_transform() for c in reversed(conversions) if isinstance(c, WeightRenaming)]
    rename = renamer(model)
    return all(rename(rename_source_key(key, renamings, [])[0]) == key for key in keys)


def _patterns(conversion: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(conversion.source_patterns), tuple(conversion.target_patterns)


def tied_modules(model: nn.Module) -> dict[str, str]:
    """Return {module: the module whose weight or codes it shares}, as the host declares it, or `tie_codes`."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {
        target.removesuffix(end): source.removesuffix(end)
        for target, source in tied.items()
        for end in (".weight", ".qdata")
        if target.endswith(end) and source.endswith(end)
    }


def tie_codes(model: nn.Module) -> None:
    """Replace the tied weights of quantized modules by their codes in the host's declarations."""
    modules = dict(model.named_modules())
    for target, source in tied_modules(model).items():
        if isinstance(codes := modules.get(source), QuantizedModule):
            _replace_tie(model, target, source, [part for part in STORED_NAMES if part in codes._parameters])


def untie_codes(model: nn.Module) -> None:
    """Remove the ties of modules whose codes are their own, beside a 16-bit weight, from the host's declarations."""
    modules = dict(model.named_modules())
    for target, source in tied_modules(model).items():
        if isinstance(modules.get(target), QuantizedModule) and not isinstance(modules.get(source), QuantizedModule):
            _replace_tie(model, target, source, [])


def _replace_tie(model: nn.Module, target: str, source: str, parts: list[str]) -> None:
    """Replace "target.weight": "source.weight" by one entry for each of the packed tensors `parts`."""

    def replace(keys: dict[str, str], prefix: str) -> bool:
        if keys.pop(f"{target.removeprefix(prefix)}.weight", None) is None:
            return False
        keys |= {f"{target.removeprefix(prefix)}.{part}": f"{source.removeprefix(prefix)}.{part}" for part in parts}
        return True

    replace(model.all_tied_weights_keys, "")
    # `tie_weights()` expands `_tied_weights_keys` of every submodel again; a class attribute, hence the copy.
    for name, owner in model.named_modules():
        declared = getattr(owner, "_tied_weights_keys", None)
        inner = f"{name}." if name else ""
        if isinstance(declared, dict) and target.startswith(inner) and source.startswith(inner):
            declared = dict(declared)
            if replace(declared, inner):
                owner._tied_weights_keys = declared


def tie_weights(model: nn.Module) -> None:
    """Undo `tie_codes` where the module that shares its codes has none any more: dequantized, or exchanged."""
    for owner in model.modules():
        for declared in (getattr(owner, "all_tied_weights_keys", None), getattr(owner, "_tied_weights_keys", None)):
            tied = [key for key in declared or () if key.endswith(".qdata")]
            names = owner.named_parameters(remove_duplicate=False) if tied else ()
            there = {name.replace(".base_layer.", ".") for name, _ in names}  # with an adapter around it
            for key in (key for key in tied if declared[key] not in there):
                target, source = key.removesuffix(".qdata"), declared[key].removesuffix(".qdata")
                for part in STORED_NAMES:
                    declared.pop(f"{target}.{part}", None)
                declared[f"{target}.weight"] = f"{source}.weight"
