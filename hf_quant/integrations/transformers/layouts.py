"""Modules of transformers that hold matrices as parameters of their own, outside of its experts interface."""

import hf_quant.integrations.transformers.conv1d  # noqa: F401  (Conv1D, which stores a matrix transposed)
from hf_quant.modules import Layout, register_parameters


_MODELS = "transformers.models"
_GATED = {"gate_up_proj": False, "down_proj": False}
_FLAT = {"multiplies": False, "is_flat": True}  # [width, heads, width of a head], read by einsum
_LAYOUTS = {
    "convbert.modeling_convbert.GroupedLinearLayer": Layout({"weight": True}),
    "dbrx.modeling_dbrx.DbrxExpertGLU": Layout({"w1": False, "v1": False, "w2": True}, count="moe_num_experts"),
    "funnel.modeling_funnel.FunnelRelMultiheadAttention": Layout({"r_kernel": False}, **_FLAT),
    "gemma3.modeling_gemma3.Gemma3MultiModalProjector": Layout({"mm_input_projection_weight": True}),
    "inkling.modeling_inkling.InklingSharedExperts": Layout(
        {"gate_proj": False, "up_proj": False, "down_proj": False}
    ),
    "jetmoe.modeling_jetmoe.JetMoeParallelExperts": Layout({"weight": False}),
    "llama4.modeling_llama4.Llama4TextExperts": Layout({"gate_up_proj": True, "down_proj": True}),
    "longcat_flash.modeling_longcat_flash.LongcatFlashExperts": Layout(_GATED),
    "moshi.modeling_moshi.MoshiFlexibleLinear": Layout({"weight": False}, multiplies=False),
    "recurrent_gemma.modeling_recurrent_gemma.RecurrentGemmaRglru": Layout(
        {"input_gate_weight": True, "recurrent_gate_weight": True}, multiplies=False
    ),
    "step3p7.modeling_step3p7.Step3p7Experts": Layout(_GATED),
    "xlnet.modeling_xlnet.XLNetRelativeAttention": Layout(dict.fromkeys("qkvor", False), **_FLAT),
}


def register() -> None:
    """Make them quantizable. Further calls do nothing."""
    for name, layout in _LAYOUTS.items():
        register_parameters(f"{_MODELS}.{name}", layout)


register()
