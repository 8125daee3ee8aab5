"""Weights of which two in each four consecutive ones of a row are zero (2:4 sparsity): pruning, and training so.

Tensor cores of GPUs from sm80 on skip these zeros; no other device gains by them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_quant.calibration import StatisticsFile, calibrate
from hf_quant.calibration.calibration import is_file
from hf_quant.config import QuantizerConfig
from hf_quant.modules.sparse24 import mask_24
from hf_quant.planning import plan
from hf_quant.quantize import check_weight
from hf_quant.training.swapped import check_trainable, counterpart


DECAY = 2e-4  # of pruned weights, in proportion to the gradient: https://arxiv.org/abs/2102.04010, 4.2


class Pruned(torch.autograd.Function):
    """weight [..., N, K] with the smaller two of each four as zeros; SR-STE, https://arxiv.org/abs/2102.04010.

    The gradient of the pruned weight passes unchanged, to pruned values too, whose decay is added to it: they stay
    near zero unless they are needed, and which are pruned settles.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        found = weight * mask_24(weight.abs())
        ctx.save_for_backward(weight, found)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        weight, found = ctx.saved_tensors
        return grad + DECAY * (weight - found)


@torch.inference_mode(False)
@torch.no_grad()
def prune_(
    model: nn.Module,
    method: str = "magnitude",
    *,
    calibration: Any = None,
    tokenizer: Any = None,
    modules: Mapping[str, bool | None] | None = None,
    progress: bool = False,
) -> list[str]:
    """Set two of each four consecutive weights in the rows of linear layers and experts to zero, in place.

    The layers are those that `quantize_` would quantize. Return the names of their weights. Train the model
    afterwards with the recipe "sparse24" of `prepare_training_`, as pruning alone costs much.

    Args:
        model: any nn.Module, not quantized.
        method: "magnitude": the smallest weights become zero. "wanda": those with the smallest product of magnitude
            and root of the mean square of their input (https://arxiv.org/abs/2306.11695).
        calibration: for "wanda": data, see `hf_quant.calibrate`, or statistics, or their file. None: text that a
            causal language model writes.
        tokenizer: for texts; None: the tokenizer of the model's checkpoint.
        modules: {name, glob or "re:" pattern: True to prune the layer, False or None to leave it as it is}.
        progress: True shows a progress bar.

    Raises:
        ValueError: an unknown method, a rule that is no bool, calibration data for "magnitude", statistics of another
            model, a model that is quantized, in training or sharded, a weight with NaN or inf, or nothing to prune.
            The model is then unchanged.
    """
    if method not in ("magnitude", "wanda"):
        raise ValueError(f"method is {method!r}; allowed: 'magnitude', 'wanda'")
    if calibration is not None and method == "magnitude":
        raise ValueError("calibration data is given, but method='magnitude' needs none: take method='wanda'")
    wrong = next((value for value in (modules or {}).values() if value not in (True, False, None)), None)
    if wrong is not None:
        raise ValueError(f"modules has {wrong!r}; allowed: True to prune the layers, False or None to leave them")
    check_trainable(model)
    chosen = {pattern: "int8" if is_pruned else None for pattern, is_pruned in (modules or {}).items()}
    config = QuantizerConfig("int8", modules=chosen)
    layers = {}
    for name, entry in plan(model, config).quantized.items():
        if entry.kind in ("linear", "experts") and entry.shared_with is None:
            module = model.get_submodule(name)
            quantized = counterpart(type(module))
            for weight in entry.shapes:
                full_name = f"{name}.{weight}" if name else weight
                parameter = module.get_parameter(weight)
                matrix = quantized.to_matrix(module, weight, parameter)  # pyrefly: ignore[bad-argument-type]
                check_weight(parameter, full_name)
                if matrix.shape[-1] % 4 == 0:
                    layers[full_name] = name, weight, matrix
    if not layers:
        raise ValueError(f"nothing to prune in this {type(model).__name__}: no linear layer has rows of whole fours")
    scales = _input_scales(model, config, layers, calibration, tokenizer, progress) if method == "wanda" else {}
    for full_name, (_, _, matrix) in layers.items():
        scores = matrix.float().abs()
        if full_name in scales:
            scores *= scales[full_name].to(scores.device)
        matrix *= mask_24(scores)
    return list(layers)


def _input_scales(
    model: nn.Module,
    config: QuantizerConfig,
    layers: Mapping[str, tuple[str, str, Tensor]],
    calibration: Any,
    tokenizer: Any,
    progress: bool,
) -> dict[str, Tensor]:
    """{name of a weight: the root of the mean square of its inputs, [K] or, of experts, [E, 1, K]}."""
    if is_file(calibration):
        file = StatisticsFile.of(calibration)
    else:
        file = calibrate(model, calibration, config=config, tokenizer=tokenizer, progress=progress)
    found = {}
    for full_name, (name, weight, matrix) in layers.items():
        squares = [one.second_moment for one in file.statistics.get(name, {}).get(weight, [])]
        roots = [one.sqrt() for one in squares if one is not None and len(one) == matrix.shape[-1]]
        if len(roots) != (len(matrix) if matrix.dim() == 3 else 1):
            raise ValueError(f"the statistics have no mean squares of the inputs of {full_name}: calibrate this model")
        found[full_name] = torch.stack(roots).unsqueeze(1) if matrix.dim() == 3 else roots[0]
    return found
