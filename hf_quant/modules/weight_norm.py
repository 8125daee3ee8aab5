"""`QuantParametrizationList`: the direction of a weight under `torch.nn.utils.parametrizations.weight_norm`.

Such a weight is magnitude * v / |v|. The layer keeps its class; v, the parameter `original1` of the module
`<layer>.parametrizations.weight`, is stored as codes, and the magnitude `original0` stays as it is. Each call
dequantizes v and norms it. Layers of the older `torch.nn.utils.weight_norm` hold v themselves: see `_flattened`.
"""

from torch import nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList

from hf_quant.modules._base import weight_property
from hf_quant.modules._flattened import FlattenedWeight
from hf_quant.modules._registry import register_module


class QuantParametrizationList(FlattenedWeight, ParametrizationList):
    """The parametrization of a weight-normed layer, weight-only: v as a matrix [first dimension, all others]."""

    kind = "weight_norm"
    original1 = weight_property("original1")

    @classmethod
    def weight_names_of(cls, module: nn.Module) -> tuple[str, ...]:
        assert isinstance(module, ParametrizationList)
        return ("original1",) if len(module) == 1 and isinstance(module[0], _WeightNorm) else ()


register_module(ParametrizationList, QuantParametrizationList)
