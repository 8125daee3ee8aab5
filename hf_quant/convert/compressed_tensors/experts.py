"""Split fused experts into the layers of the original checkpoint, one per expert: rows are split, codes stay."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from hf_quant.algorithms import PackedWeight
from hf_quant.convert.compressed_tensors.schemes import Inexpressible
from hf_quant.modules import QuantExperts


if TYPE_CHECKING:
    from transformers import PreTrainedModel


def layer_names(model: "PreTrainedModel", module: QuantExperts, stored: str, weight: str) -> list[list[str]]:
    """Return [expert][part]: names, in the original checkpoint, of the layers that form a fused weight [E, N, K].

    `stored` is the name of the module in our checkpoint. Parts (gate and up) follow each other along N. The names are
    those that transformers' own conversion reads. Raises Inexpressible if it is of another kind.
    """
    if module.is_transposed or getattr(module, "has_bias", False):
        raise Inexpressible("its experts are transposed or have biases in the original checkpoint, fused for all")
    full = f"{stored}.{weight}"
    for sources, target in merging_rules(model):
        if full.endswith(target):
            prefix, count = full.removesuffix(target), module.matrix_shape(weight)[0]
            return [[prefix + source.replace("*", str(e)) for source in sources] for e in range(count)]
    raise Inexpressible("transformers has no rule that says what its experts are called in the original checkpoint")


def merging_rules(model: "PreTrainedModel") -> Iterator[tuple[list[str], str]]:
    """Yield (names of single layers, "*" for the expert; name of the fused weight) of the host's conversions.

    Only of conversions that stack experts along dimension 0, and the parts of each expert along its rows.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    for conversion in get_model_conversion_mapping(model):
        if isinstance(conversion, WeightConverter) and len(conversion.target_patterns) == 1:
            kinds = [(type(operation), getattr(operation, "dim", None)) for operation in conversion.operations]
            sources = [pattern.removesuffix(".weight") for pattern in conversion.source_patterns]
            merges = kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
            if merges and all(source.count("*") == 1 for source in sources):
                yield sources, conversion.target_patterns[0]


def split_rows(packed: PackedWeight, expert: int, part: int, parts: int) -> PackedWeight:
    """Return the rows `part` of `parts` of one expert of a fused weight [E, N, ...]."""
    N = packed.qdata.shape[1]

    def rows(tensor: Tensor) -> Tensor:
        matrix = tensor[expert]
        count = matrix.shape[0] // parts
        return matrix if matrix.shape[0] == 1 != N else matrix[part * count : (part + 1) * count]

    zero_point = None if packed.zero_point is None else rows(packed.zero_point)
    scales = None if packed.global_scale is None else packed.global_scale[expert : expert + 1]
    return PackedWeight(rows(packed.qdata), rows(packed.scale), zero_point, scales)
