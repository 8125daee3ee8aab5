"""Flux.1-dev on a GPU of 12 GB: int4 transformer, int8 T5, one model at a time on the GPU.

python scripts/examples/load_in_12gb.py black-forest-labs/FLUX.1-dev

GB of weights      16 bit   here     bits a weight
transformer 11.9 B   23.80   6.46    4.25: 4, and an 8-bit scale for 32; embedders and projections in and out 16
T5-XXL       4.8 B    9.52   4.90    8, and a scale a row; token embedding 16
CLIP, VAE    0.2 B    0.41   0.41    16
together             33.74  11.77    in the memory of the host: on the GPU the largest one, 6.46, and activations
"""

import argparse

import torch
from diffusers import DiffusionPipeline, PipelineQuantizationConfig

from hf_quant import QuantizerConfig


parser = argparse.ArgumentParser()
parser.add_argument("model", nargs="?", default="black-forest-labs/FLUX.1-dev")
parser.add_argument("--prompt", default="a lighthouse in a storm, oil on canvas")
parser.add_argument("--steps", type=int, default=28)
parser.add_argument("--size", type=int, default=1024)
parser.add_argument("--out", default="flux.png")
args = parser.parse_args()

quantization = PipelineQuantizationConfig(
    quant_mapping={"transformer": QuantizerConfig("int4"), "text_encoder_2": QuantizerConfig("int8")}
)
pipe = DiffusionPipeline.from_pretrained(args.model, dtype=torch.bfloat16, quantization_config=quantization)
if torch.cuda.is_available():
    pipe.enable_model_cpu_offload()
image = pipe(args.prompt, num_inference_steps=args.steps, height=args.size, width=args.size).images[0]
image.save(args.out)
