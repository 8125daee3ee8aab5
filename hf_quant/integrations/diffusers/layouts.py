"""Modules of diffusers that hold matrices as parameters of their own."""

from hf_quant.modules import Layout, register_parameters


_LAYOUTS = {
    "transformer_nucleusmoe_image.SwiGLUExperts": Layout({"gate_up_proj": True, "down_proj": True}),
}


def register() -> None:
    """Make them quantizable. Further calls do nothing."""
    for name, layout in _LAYOUTS.items():
        register_parameters(f"diffusers.models.transformers.{name}", layout)


register()
