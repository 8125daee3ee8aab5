"""Methods of diffusers' models that are refused once a model is quantized, with the reason."""

from typing import Any


def _refuse_layerwise_casting(*args: Any, **kwargs: Any) -> None:
    """Raise ValueError; replaces `model.enable_layerwise_casting`."""
    raise ValueError(
        "this model is quantized: layerwise casting would leave its codes as they are and round what is kept in 16 "
        "bit, such as biases. Quantize to fewer bits instead, or dequantize() it first"
    )


def _refuse_qkv_fusion(*args: Any, **kwargs: Any) -> None:
    """Raise ValueError; replaces `model.fuse_qkv_projections`."""
    raise ValueError(
        "this model is quantized: fuse_qkv_projections would compute with 16-bit copies beside the codes. "
        "hf_quant.fuse_projections_(model), or QuantizerConfig(fuse_projections=True), makes one product of the codes"
    )


REFUSED = {"enable_layerwise_casting": _refuse_layerwise_casting, "fuse_qkv_projections": _refuse_qkv_fusion}
