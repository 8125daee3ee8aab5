"""Quantized modules: subclasses of the host's classes with plain packed tensors and one op call in `forward`."""

from hf_quant.modules import averages as _averages  # noqa: F401 (codes are not averaged)
from hf_quant.modules import collectives as _collectives  # noqa: F401 (int16 goes between processes)
from hf_quant.modules._base import QuantizedModule, convert_module_, in_basis, restore_module_
from hf_quant.modules._classes import runs_its_class, set_class_
from hf_quant.modules._registry import check_model, quantized_class, register_module
from hf_quant.modules._stored import INPUT_SCALE, PACKED_NAMES, STORED_NAMES, packed_key, stored_dtype
from hf_quant.modules.attention import QuantMultiheadAttention
from hf_quant.modules.conv import QuantConv1d, QuantConv2d, QuantConv3d
from hf_quant.modules.conv_transpose import QuantConvTranspose1d, QuantConvTranspose2d, QuantConvTranspose3d
from hf_quant.modules.count import uncounted_weights
from hf_quant.modules.embedding import QuantEmbedding
from hf_quant.modules.experts import QuantExperts, expert_weight_names, register_experts, route
from hf_quant.modules.inputs.fuse import (
    fuse_projections_,
    fuse_where_possible,
    planned_projections,
    share_inputs_,
    unfuse_projections_,
)
from hf_quant.modules.linear import QuantLinear
from hf_quant.modules.packed_linear import PackedLinear
from hf_quant.modules.parameters import Layout, QuantParameters, register_parameters
from hf_quant.modules.recurrent import QuantGRU, QuantLSTM, QuantRNN
from hf_quant.modules.rotation import rotated
from hf_quant.modules.weight_norm import QuantParametrizationList


__all__ = [
    "INPUT_SCALE",
    "Layout",
    "PACKED_NAMES",
    "PackedLinear",
    "QuantConv1d",
    "QuantConv2d",
    "QuantConv3d",
    "QuantConvTranspose1d",
    "QuantConvTranspose2d",
    "QuantConvTranspose3d",
    "QuantEmbedding",
    "QuantExperts",
    "QuantGRU",
    "QuantLSTM",
    "QuantLinear",
    "QuantMultiheadAttention",
    "QuantParameters",
    "QuantParametrizationList",
    "QuantRNN",
    "QuantizedModule",
    "STORED_NAMES",
    "check_model",
    "convert_module_",
    "expert_weight_names",
    "fuse_projections_",
    "fuse_where_possible",
    "in_basis",
    "packed_key",
    "planned_projections",
    "quantized_class",
    "register_experts",
    "register_module",
    "register_parameters",
    "restore_module_",
    "rotated",
    "route",
    "runs_its_class",
    "set_class_",
    "share_inputs_",
    "stored_dtype",
    "uncounted_weights",
    "unfuse_projections_",
]
