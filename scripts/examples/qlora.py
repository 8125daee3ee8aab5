"""QLoRA: an adapter over nf4 weights that starts where rounding has lost least; in one process or in several.

python scripts/examples/qlora.py meta-llama/Llama-3.1-8B --text my_texts.txt --out adapter
torchrun --nproc-per-node 2 scripts/examples/qlora.py meta-llama/Llama-3.1-8B --text my_texts.txt --out adapter
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from hf_quant import QuantizerConfig
from hf_quant.integrations.peft import loftq_init_
from hf_quant.integrations.training import trainer_optimizer


parser = argparse.ArgumentParser()
parser.add_argument("model", nargs="?", default="meta-llama/Llama-3.1-8B")
parser.add_argument("--text", type=Path, required=True)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--length", type=int, default=512)
parser.add_argument("--out", default="adapter")
args = parser.parse_args()

settings = TrainingArguments(args.out, max_steps=args.steps, learning_rate=2e-4, per_device_train_batch_size=2)
load = {"dtype": torch.bfloat16, "device_map": settings.device}
base = AutoModelForCausalLM.from_pretrained(args.model, quantization_config=QuantizerConfig("nf4"), **load)
model = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear"))
loftq_init_(model, AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16))
ids = torch.tensor(AutoTokenizer.from_pretrained(args.model)(args.text.read_text())["input_ids"])
windows = ids[: len(ids) // args.length * args.length].view(-1, args.length)
data = [{"input_ids": window, "labels": window} for window in windows]
options = {"optimizer_cls_and_kwargs": trainer_optimizer("int8", settings), "train_dataset": data}
Trainer(model, settings, **options).train()
model.save_pretrained(args.out)
