"""Training: quantization-aware training, in which layers compute as they will when they are quantized, and training by
products in 8 bits."""

from hf_quant.training.distill import distillation_loss
from hf_quant.training.gather import gather_in_low_bits_
from hf_quant.training.low_bit import LowBitModule, TrainingPlan, finish_training_, prepare_training_
from hf_quant.training.module import Prepared, QatModule
from hf_quant.training.qat import WRAPPERS, convert_qat_, prepare_qat_
from hf_quant.training.sparse import prune_


__all__ = [
    "LowBitModule",
    "Prepared",
    "QatModule",
    "TrainingPlan",
    "WRAPPERS",
    "convert_qat_",
    "distillation_loss",
    "finish_training_",
    "gather_in_low_bits_",
    "prepare_qat_",
    "prepare_training_",
    "prune_",
]
