"""A LoRA on a quantized transformer: loaded, scaled and removed as on any other; its own weights stay in 16 bit.

python scripts/examples/with_lora.py black-forest-labs/FLUX.1-dev --lora ByteDance/Hyper-SD
"""

import argparse

import torch
from diffusers import DiffusionPipeline, PipelineQuantizationConfig

from hf_quant import QuantizerConfig


parser = argparse.ArgumentParser()
parser.add_argument("model", nargs="?", default="black-forest-labs/FLUX.1-dev")
parser.add_argument("--lora", default="ByteDance/Hyper-SD")
parser.add_argument("--weight-name", default="Hyper-FLUX.1-dev-8steps-lora.safetensors")
parser.add_argument("--scale", type=float, default=0.125)
parser.add_argument("--prompt", default="a lighthouse in a storm, oil on canvas")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--size", type=int, default=1024)
parser.add_argument("--out", default="flux-lora.png")
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"

quantization = PipelineQuantizationConfig(quant_mapping={"transformer": QuantizerConfig("W8A8")})
pipe = DiffusionPipeline.from_pretrained(args.model, dtype=torch.bfloat16, quantization_config=quantization)
pipe.to(device)
pipe.load_lora_weights(args.lora, weight_name=args.weight_name, adapter_name="fewer_steps")
pipe.set_adapters("fewer_steps", args.scale)
image = pipe(args.prompt, num_inference_steps=args.steps, height=args.size, width=args.size).images[0]
image.save(args.out)
pipe.unload_lora_weights()  # the quantized model as it was, bit for bit
