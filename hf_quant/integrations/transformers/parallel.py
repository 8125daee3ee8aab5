"""Tensor and expert parallelism of transformers: packed tensors are sharded like the 16-bit weight.

The host shards parameters by name, `{module or parameter: style}`, before anything is loaded: each becomes a DTensor
on the meta device, and every rank then reads its own slice. The host's styles know only the weight's shape. So this
file adds entries with its own styles to the plan: they ask the host's style for the placement of the weight [N, K],
and place `qdata`, `scale`, `zero_point` and `global_scale` accordingly.

- Sharded along N, or by expert: rows keep their scales; a scale of the whole matrix is replicated.
- Sharded along K: group scales follow their groups; a row's scale is replicated, and on load every rank reads and
  quantizes the whole weight and keeps its slice, so that the codes are equal to a single process's codes. (For fused
  experts with row scales, the 16-bit weight of one layer's experts is in memory for a moment.)
- A static scale of the input is replicated.
- Quantized embeddings and tied heads are not sharded.

In a row-parallel layer with quantized activations (W8A8 and similar), a rank quantizes its slice of each row with the
slice's own scale: the logits are close to a single process's logits, not equal up to the order of summation.
"""

import types
from typing import Any

import torch
from torch import nn

# All of these are loaded by transformers.core_model_loading, which the adapter needs anyway.
from transformers.distributed.sharding_utils import DtensorShardOperation
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    TensorParallelLayer,
    replace_layer_number_by_wildcard,
)
from transformers.distributed.utils import is_dtensor

from hf_quant.algorithms import PackedWeight
from hf_quant.checkpoint import guard_entry
from hf_quant.formats import FORMATS
from hf_quant.integrations.loading import quantize_into
from hf_quant.kernels.codes import PACK
from hf_quant.modules import INPUT_SCALE, PACKED_NAMES, STORED_NAMES, QuantizedModule, packed_key
from hf_quant.scheme import BLOCK_SIZE


_PREFIX = "hf_quant_"


def refuse_fsdp(model: nn.Module) -> None:
    """Raise ValueError if FSDP would shard the 16-bit weights that are to be quantized on load."""
    if (size := _fsdp_size(model)) > 1:
        raise ValueError(
            f"fsdp_size={size} with quantization on load: FSDP shards each weight before it can be "
            "quantized. Quantize and save the model in one process, then load that checkpoint with FSDP"
        )


def refuse_fsdp_of_integers(model: nn.Module) -> None:
    """Raise ValueError if FSDP would shard codes, and this torch shards floating-point parameters only."""
    if (size := _fsdp_size(model)) > 1 and torch.__version__ < "2.12":
        raise ValueError(
            f"fsdp_size={size} with torch {torch.__version__}: its fully_shard takes floating-point parameters only, "
            "and codes are integers. Install torch 2.13 or newer, or load with tensor parallelism (tp_plan='auto')"
        )


def _fsdp_size(model: nn.Module) -> int:
    """The number of processes over which FSDP will shard a model."""
    distributed = getattr(model.config, "distributed_config", None)
    return 1 if distributed is None else getattr(distributed, "dp_size", None) or distributed.fsdp_size


def refuse_parallel(model: nn.Module) -> None:
    """Raise ValueError if a model that is to be calibrated would be sharded."""
    distributed = getattr(model.config, "distributed_config", None)
    if distributed is not None and _is_sharded(distributed):
        raise ValueError(
            "a sharded model cannot be calibrated: quantize and save it in one process, then load that checkpoint in "
            "parallel"
        )


def _is_sharded(distributed: Any) -> bool:
    """True if tensor or expert parallelism spreads the weights over processes."""
    return max(distributed.tp_size, getattr(distributed, "ep_size", None) or 1) > 1


def prepare_parallel(model: nn.Module) -> None:
    """Prepare a model with converted modules for sharding; nothing changes unless it is loaded in parallel.

    Its tensor- and expert-parallel plans get the entries that packed tensors need. Plans that fit no scheme raise
    ValueError when the host carries them out, before anything is loaded.
    """
    distributed = getattr(model.config, "distributed_config", None)
    if distributed is None:
        return
    whole = _shared_or_looked_up(model)
    _separate_tied(model)
    if not _is_sharded(distributed):
        return
    for attribute in ("tp_plan", "ep_plan"):
        own, given = getattr(model, f"_{attribute}", None) or {}, getattr(distributed, attribute, None)
        given = given if isinstance(given, dict) else {}
        if given and not hasattr(model, "_resolve_parallel_plans"):
            raise ValueError(
                f"{attribute} is a dict; this version of transformers would take it instead of the model's own, "
                "without the entries for packed tensors: pass tp_plan='auto', or install transformers 5.23 or newer"
            )
        # The host lays the given entries over the model's own.
        setattr(model, f"_{attribute}", _extended(model, {**own, **given}, given, whole))


def _extended(model: nn.Module, plan: dict[str, str], given: dict[str, str], whole: set[str]) -> dict[str, str]:
    """Return the plan with entries for the packed tensors of every weight that it names.

    `given` is what the user wrote of it, `whole` the modules that must not be sharded.
    """
    extended, weights = dict(plan), set()
    for name, module in model.named_modules():
        if not isinstance(module, QuantizedModule):
            continue
        owner = replace_layer_number_by_wildcard(name)
        if name in whole:
            if owner in given:
                raise ValueError(
                    f"tp_plan shards {name}, which is quantized and looked up or tied: every process needs all of it. "
                    "Leave it out of tp_plan, or keep it in 16 bit"
                )
            extended.pop(owner, None)
            continue
        for weight in module.weight_names:
            weights.add(f"{owner}.{weight}")
            style = plan.get(f"{owner}.{weight}") or plan.get(owner)
            if style is not None and not style.startswith(_PREFIX):
                for leaf in (weight, *(packed_key(part, weight) for part in STORED_NAMES)):
                    if leaf in module._parameters:
                        extended[f"{owner}.{leaf}"] = _style(style)
    # A weight that is stored as codes is no parameter any more; the host warns of entries that name nothing.
    parameters = {replace_layer_number_by_wildcard(n) for n, _ in model.named_parameters(remove_duplicate=False)}
    for key in weights - parameters - given.keys():
        extended.pop(key, None)
    return extended


def _shared_or_looked_up(model: nn.Module) -> set[str]:
    """Return the quantized modules of which every rank needs all codes: embeddings, and modules with shared codes."""
    owners: dict[int, list[str]] = {}
    names = set()
    for name, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            if module.kind == "embedding":
                names.add(name)
            owners.setdefault(id(module._parameters[packed_key("qdata", module.weight_names[0])]), []).append(name)
    return names.union(*(shared for shared in owners.values() if len(shared) > 1))


def _separate_tied(model: nn.Module) -> None:
    """Give tied modules parameters of their own for as long as they are empty; the host ties them after loading.

    As with 16-bit weights: one parameter cannot belong to two FSDP groups.
    """
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, QuantizedModule) and module.shares_codes:
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in seen:
                    module._parameters[name] = nn.Parameter(parameter.data.detach(), requires_grad=False)
                elif parameter is not None:
                    seen.add(id(parameter))


def _style(base: str) -> str:
    """Return the name of our counterpart of a host's style; register the counterpart with the host."""
    name = f"{_PREFIX}{base}"
    if name not in ALL_PARALLEL_STYLES:
        ALL_PARALLEL_STYLES.register(name, PackedParallel(base))
    return name


class PackedParallel(TensorParallelLayer):
    """Place each part of a quantized weight as the style `base` places the weight."""

    def __init__(self, base: str) -> None:
        self.base = ALL_PARALLEL_STYLES[base]

    def validate_param(self, module: nn.Module, param: str, mesh: Any, parameter_name: str | None = None) -> None:
        """Raise ValueError if the mesh would split groups, blocks or words of the packed weight."""
        weight, part = _weight_and_part(module, param)
        if part is None:  # a module that is not quantized, under the same name in the plan
            self.base.validate_param(module, param, mesh, parameter_name=parameter_name)
            return
        owner = (parameter_name or param).removesuffix(f".{param}")
        placement, axis = self._weight_placement(module, weight, mesh, validate_as=f"{owner}.{weight}")
        if axis is not None:
            _check_fits(module, weight, owner, axis, mesh.size() * getattr(placement, "split_factor", 1))

    def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
        """Replace the parameter by a DTensor on the meta device, or leave it whole."""
        weight, part = _weight_and_part(module, param)
        if part is None:
            self.base.shard_param(module, param, mesh)
            return
        placement, axis = self._weight_placement(module, weight, mesh)
        if axis is None:
            return
        if part == "weight":
            if not _needs_whole_weight(module, axis):
                self.base.shard_param(module, param, mesh)
            return
        dim = _part_dim(module.scheme.weight.granularity, part, axis)
        if dim is not None:
            _distribute(module, param, mesh, placement, dim)

    def _weight_placement(
        self, module: QuantizedModule, weight: str, mesh: Any, validate_as: str | None = None
    ) -> tuple[Any, int | None]:
        """Return (placement, axis): the host's placement of the 16-bit weight, and the sharded axis of its matrix.

        (None, None) if it keeps the weight whole. The host's style is asked with a stand-in for the weight, on the
        module itself: for experts it also sets how many of them a rank has.
        """
        waiting = module._parameters.get(weight)
        meta = torch.empty(module.weight_shape(weight), dtype=module.compute_dtype, device="meta")
        module._parameters[weight] = nn.Parameter(meta, requires_grad=False)
        try:
            if validate_as is not None:
                self.base.validate_param(module, weight, mesh, parameter_name=validate_as)
            self.base.shard_param(module, weight, mesh)
            placed = module._parameters[weight]
        finally:
            del module._parameters[weight]
            if waiting is not None:
                module._parameters[weight] = waiting
        placements = [p for p in placed.placements if hasattr(p, "dim")] if is_dtensor(placed) else []
        return (placements[0], _matrix_axis(module, weight, placements[0])) if placements else (None, None)


def guard_gathered_state(model: nn.Module) -> None:
    """Add the guard to the next saved state of an FSDP model: the host gathers that state from the model itself."""
    if getattr(model.config, "distributed_config", None) is not None:
        model.gather_sharded_state_dict_for_save = types.MethodType(_gather_with_guard, model)


def _gather_with_guard(self: nn.Module, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
    del self.gather_sharded_state_dict_for_save  # the instance attribute set above
    state = self.gather_sharded_state_dict_for_save(*args, **kwargs)
    entry = guard_entry(self)
    return {**state, entry[0]: entry[1]} if state and entry is not None else state


def _weight_and_part(module: nn.Module, param: str) -> tuple[str, str | None]:
    """Return (weight, part) of a parameter: part is "weight" for the placeholder, None if it is neither."""
    if isinstance(module, QuantizedModule):
        for weight in module.weight_names:
            if param == weight:
                return weight, "weight"
            for part in STORED_NAMES:
                if param == packed_key(part, weight):
                    return weight, part
    return param, None


def _matrix_axis(module: QuantizedModule, weight: str, placement: Any) -> int:
    """Return the dimension, counted from the end, of the matrix [..., N, K] along which the weight is sharded."""
    shape = module.weight_shape(weight)
    # matrix_shape_of permutes a shape (Conv1D, transposed experts): let it permute the dimensions.
    order = module.matrix_shape_of(module, tuple(range(len(shape))), weight)
    if len(order) != len(shape) or module.kind not in ("linear", "experts", "parameters"):
        raise ValueError(f"a quantized {module.host_class.__name__} cannot be sharded; exclude it, or replicate it")
    return order.index(placement.dim % len(shape)) - len(shape)


def _check_fits(module: QuantizedModule, weight: str, owner: str, axis: int, pieces: int) -> None:
    """Raise ValueError unless `pieces` equal pieces of the weight hold whole groups, blocks and words."""
    quant = module.scheme.weight
    N, K = module.matrix_shape(weight)[-2:]
    if axis == -1 and module.scheme.sparsity is not None:
        raise ValueError(
            f"{owner} cannot be split along its input features: {quant} is sparse, and a row lies as one piece. Leave "
            "sparsity out, or keep this module in 16 bit by `modules={...: None}`"
        )
    if axis == -1:
        # A group, a block or a word stays together. Group sizes are multiples of 32 or, in nvfp4, divide it.
        packing = PACK if FORMATS[quant.format].spec.is_packed else 1
        columns = BLOCK_SIZE if quant.granularity == "block" else quant.group_size or 1
        transform = module.scheme.input_transform
        if transform is not None and K % (transform.block_size * pieces):
            raise ValueError(
                f"{owner} cannot be split into {pieces} pieces: its input is {transform}, which needs its input "
                f"features, {K}, to be a multiple of {transform.block_size} x {pieces}. Take fewer processes, smaller "
                'blocks by `input_transform={"block_size": n}`, or none by `input_transform="none"`'
            )
        size, unit, what = K, max(packing, columns), f"input features, {K}"
    elif axis == -2:
        size, unit, what = N, BLOCK_SIZE if quant.granularity == "block" else 1, f"output features, {N}"
    else:
        return
    if unit > 1 and size % (unit * pieces):
        raise ValueError(
            f"{owner} cannot be split into {pieces} pieces: {quant} needs its {what}, to be a multiple of {unit} x "
            f"{pieces}. Take fewer processes, another group_size or format, or keep this module in 16 bit by "
            "`modules={...: None}`"
        )


def _part_dim(granularity: str, part: str, axis: int) -> int | None:
    """Return the dimension, counted from the end, along which a part is sharded; None: it is replicated."""
    if part == "qdata":
        return axis
    if part == INPUT_SCALE:  # of the whole input, and of all experts
        return None
    if part == "global_scale":  # [E] or [1]
        return -1 if axis == -3 else None
    if axis == -3:
        return axis
    if granularity == "tensor" or (axis == -1 and granularity == "row"):
        return None
    return axis


def _needs_whole_weight(module: QuantizedModule, axis: int) -> bool:
    """Return True if the codes of a slice depend on values outside of it, because they share a scale."""
    quant = module.scheme.weight
    whole_matrix = quant.granularity == "tensor" or quant.scale_dtype == "float8_e4m3fn"
    return axis != -3 and (whole_matrix or (axis == -1 and quant.granularity == "row"))


def _distribute(module: nn.Module, param: str, mesh: Any, placement: Any, dim: int) -> None:
    """Shard a parameter by a placement moved to the dimension `dim`, which is counted from the end."""
    from torch.distributed.tensor import distribute_tensor

    whole, split = module._parameters[param].data, getattr(placement, "split_factor", None)
    options = {} if split is None else {"split_factor": split}
    moved = type(placement)(whole.dim() + dim, **options)
    sharded = distribute_tensor(whole, mesh, [moved], src_data_rank=None)
    module._parameters[param] = nn.Parameter(sharded, requires_grad=False)


def quantize_shard(
    module: QuantizedModule, weight_name: str, weight: torch.Tensor, fqn: str, device: torch.device | str | None
) -> PackedWeight:
    """Return this rank's slice of the packed tensors; the host has read the rank's slice of the weight, or all of it.

    Modules that are not sharded are quantized as usual. The codes are where the weight was.
    """
    references = [module._parameters.get(packed_key(part, weight_name)) for part in PACKED_NAMES]
    if not any(is_dtensor(reference) for reference in references):
        return quantize_into(module, weight_name, weight, fqn, device)
    if not is_dtensor(module._parameters[weight_name]):
        packed = quantize_into(module, weight_name, weight, fqn, device)
        return PackedWeight(*(_slice(t, reference) for t, reference in zip(packed, references)))
    source = weight if device is None else weight.to(device)
    matrix = module.to_matrix(weight_name, source)
    return module.quantize_rows(matrix, fqn=fqn).to(weight.device)


def _slice(tensor: torch.Tensor | None, reference: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or not is_dtensor(reference):
        return tensor
    # float8 tensors are sliced as the integers of their bits: not every backend can index them.
    stored = tensor.view(reference.dtype)
    local = DtensorShardOperation(reference).shard_tensor(stored)
    return local.contiguous().view(tensor.dtype)
