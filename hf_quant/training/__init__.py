"""Training: quantization-aware training, in which layers compute as they will when they are quantized."""

from hf_quant.training.distill import distillation_loss
from hf_quant.training.module import Prepared, QatModule
from hf_quant.training.qat import WRAPPERS, convert_qat_, prepare_qat_


__all__ = ["Prepared", "QatModule", "WRAPPERS", "convert_qat_", "distillation_loss", "prepare_qat_"]
