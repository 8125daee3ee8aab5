"""hf_quant: quantize any Hugging Face model on load, run it fast, save it, load it back.

Importing it registers "hf_quant" with transformers and diffusers, as soon as each is imported. The public names are
resolved at first use, as are submodules (`hf_quant.optim`): this file also runs inside `import torch` (see `_boot`),
where it must cost nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from hf_quant._boot import boot, submodule
from hf_quant._version import __version__


if TYPE_CHECKING:
    from hf_quant.auto import Frontier, auto_plan, auto_plans, autoquant
    from hf_quant.calibration import Calibration, calibrate
    from hf_quant.cards import model_card
    from hf_quant.checkpoint import freeze_, load_quantized_, quantization_map, requantize_, save_quantized
    from hf_quant.config import QuantizerConfig
    from hf_quant.convert.compressed_tensors.export import export_compressed_tensors
    from hf_quant.convert.gguf.export import export_gguf
    from hf_quant.convert.importer import import_checkpoint
    from hf_quant.formats import FORMATS
    from hf_quant.integrations.activations import fuse_activations_, unfuse_activations_
    from hf_quant.integrations.transformers.graphs import capture_generate
    from hf_quant.kv_cache import KVCacheConfig, QuantizedCache
    from hf_quant.modules import QuantEmbedding, QuantExperts, QuantLinear, fuse_projections_, unfuse_projections_
    from hf_quant.planning import QuantPlan, plan
    from hf_quant.quantize import dequantize_, quantize_
    from hf_quant.scheme import PRESETS, LinearScheme, TensorQuant
    from hf_quant.training import TrainingPlan, convert_qat_, finish_training_, prepare_qat_, prepare_training_

_HOME = {
    "Calibration": "calibration",
    "FORMATS": "formats",
    "Frontier": "auto",
    "KVCacheConfig": "kv_cache",
    "LinearScheme": "scheme",
    "PRESETS": "scheme",
    "QuantEmbedding": "modules",
    "QuantExperts": "modules",
    "QuantLinear": "modules",
    "QuantPlan": "planning",
    "QuantizedCache": "kv_cache",
    "QuantizerConfig": "config",
    "TensorQuant": "scheme",
    "TrainingPlan": "training",
    "auto_plan": "auto",
    "auto_plans": "auto",
    "autoquant": "auto",
    "calibrate": "calibration",
    "capture_generate": "integrations.transformers.graphs",
    "convert_qat_": "training",
    "dequantize_": "quantize",
    "export_compressed_tensors": "convert.compressed_tensors.export",
    "export_gguf": "convert.gguf.export",
    "finish_training_": "training",
    "freeze_": "checkpoint",
    "fuse_activations_": "integrations.activations",
    "fuse_projections_": "modules",
    "import_checkpoint": "convert.importer",
    "load_quantized_": "checkpoint",
    "model_card": "cards",
    "plan": "planning",
    "prepare_qat_": "training",
    "prepare_training_": "training",
    "quantization_map": "checkpoint",
    "quantize_": "quantize",
    "requantize_": "checkpoint",
    "save_quantized": "checkpoint",
    "unfuse_activations_": "integrations.activations",
    "unfuse_projections_": "modules",
}

__all__ = [
    "Calibration",
    "FORMATS",
    "Frontier",
    "KVCacheConfig",
    "LinearScheme",
    "PRESETS",
    "QuantEmbedding",
    "QuantExperts",
    "QuantLinear",
    "QuantPlan",
    "QuantizedCache",
    "QuantizerConfig",
    "TensorQuant",
    "TrainingPlan",
    "__version__",
    "auto_plan",
    "auto_plans",
    "autoquant",
    "calibrate",
    "capture_generate",
    "convert_qat_",
    "dequantize_",
    "export_compressed_tensors",
    "export_gguf",
    "finish_training_",
    "freeze_",
    "fuse_activations_",
    "fuse_projections_",
    "import_checkpoint",
    "load_quantized_",
    "model_card",
    "plan",
    "prepare_qat_",
    "prepare_training_",
    "quantization_map",
    "quantize_",
    "requantize_",
    "save_quantized",
    "unfuse_activations_",
    "unfuse_projections_",
]


if not TYPE_CHECKING:  # a type checker that sees __getattr__ accepts every name

    def __getattr__(name: str):
        if name not in _HOME:
            return submodule(__name__, name)
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)


boot()
