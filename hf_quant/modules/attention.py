"""`QuantMultiheadAttention`: torch's attention with packed input projections, which each call dequantizes."""

from torch import nn

from hf_quant.modules._base import QuantizedModule, weight_property
from hf_quant.modules._registry import register_module


_JOINED = ("in_proj_weight",)
_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class QuantMultiheadAttention(QuantizedModule, nn.MultiheadAttention):
    """nn.MultiheadAttention, weight-only: `qdata_in_proj_weight`, or those of q, k and v; differentiable in inputs.

    Its forward is torch's, whose products are of dequantized weights. `out_proj` is a linear layer of its own.
    """

    kind = "attention"
    in_proj_weight = weight_property("in_proj_weight")
    q_proj_weight = weight_property("q_proj_weight")
    k_proj_weight = weight_property("k_proj_weight")
    v_proj_weight = weight_property("v_proj_weight")

    @classmethod
    def weight_names_of(cls, module: nn.Module) -> tuple[str, ...]:
        return _JOINED if module._parameters.get("in_proj_weight") is not None else _SEPARATE


register_module(nn.MultiheadAttention, QuantMultiheadAttention)
