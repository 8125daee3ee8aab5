"""A language model in 2 bits that learns from its 16-bit self, from the codes of GPTQ on.

python scripts/examples/recover_with_teacher.py HuggingFaceTB/SmolLM2-135M --text my_texts.txt --out smollm2-int2
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from hf_quant import QuantizerConfig, convert_qat_, prepare_qat_
from hf_quant.integrations.training import DistillTrainer, trainer_optimizer


parser = argparse.ArgumentParser()
parser.add_argument("model", nargs="?", default="HuggingFaceTB/SmolLM2-135M")
parser.add_argument("--text", type=Path, required=True)
parser.add_argument("--weights", default="int2")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--length", type=int, default=512)
parser.add_argument("--out", default="recovered")
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.model)
model, teacher = (AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16) for _ in range(2))
ids = torch.tensor(tokenizer(args.text.read_text())["input_ids"])
windows = ids[: len(ids) // args.length * args.length].view(-1, args.length)
prepare_qat_(model, QuantizerConfig(args.weights, algorithm="gptq"), calibration=windows[:32])
settings = TrainingArguments(
    args.out, max_steps=args.steps, learning_rate=2e-4, lr_scheduler_type="cosine", per_device_train_batch_size=4
)
data = [{"input_ids": window, "labels": window} for window in windows]
options = {"optimizer_cls_and_kwargs": trainer_optimizer("int8", settings), "train_dataset": data}
trainer = DistillTrainer(model, settings, teacher=teacher, **options)
trainer.train()
convert_qat_(model).save_pretrained(args.out)
tokenizer.save_pretrained(args.out)
