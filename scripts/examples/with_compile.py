"""A quantized transformer with compiled blocks, and 8-bit attention: one compilation for each class of blocks.

python scripts/examples/with_compile.py black-forest-labs/FLUX.1-dev
"""

import argparse
import time

import torch
from diffusers import DiffusionPipeline, PipelineQuantizationConfig

from hf_quant import QuantizerConfig


parser = argparse.ArgumentParser()
parser.add_argument("model", nargs="?", default="black-forest-labs/FLUX.1-dev")
parser.add_argument("--prompt", default="a lighthouse in a storm, oil on canvas")
parser.add_argument("--steps", type=int, default=28)
parser.add_argument("--size", type=int, default=1024)
parser.add_argument("--backend", default="inductor", help="of torch.compile")
parser.add_argument("--out", default="flux-compiled.png")
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"

config = QuantizerConfig("W8A8_FP8", attention="int8")  # Hopper: without attention; before Ada: "W8A8", int8
quantization = PipelineQuantizationConfig(quant_mapping={"transformer": config})
pipe = DiffusionPipeline.from_pretrained(args.model, dtype=torch.bfloat16, quantization_config=quantization)
pipe.to(device)
pipe.transformer.compile_repeated_blocks(fullgraph=True, dynamic=True, backend=args.backend)
for turn in ("with compilation", "compiled"):
    start = time.perf_counter()
    image = pipe(args.prompt, num_inference_steps=args.steps, height=args.size, width=args.size).images[0]
    print(f"{turn}: {time.perf_counter() - start:.2f} s")
image.save(args.out)
