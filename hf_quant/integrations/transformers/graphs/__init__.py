"""`capture_generate`: `model.generate` whose decoding step is captured into a CUDA graph once and replayed."""

from hf_quant.integrations.transformers.graphs.capture import DecodeGraphs, capture_generate
from hf_quant.integrations.transformers.graphs.decode import Backend, CudaGraphs


__all__ = ["Backend", "CudaGraphs", "DecodeGraphs", "capture_generate"]
