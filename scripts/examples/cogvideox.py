"""A video of CogVideoX-5b: int8 transformer and 8-bit attention (half of its work at 17776 tokens), int8 T5.

python scripts/examples/cogvideox.py zai-org/CogVideoX-5b
Transformer 11.1 -> 5.6 GB, T5 9.5 -> 4.9 GB; offloading keeps one of them on the GPU, tiles bound what the VAE takes.
"""

import argparse

import torch
from diffusers import DiffusionPipeline, PipelineQuantizationConfig
from diffusers.utils import export_to_gif  # export_to_video needs opencv or imageio

from hf_quant import QuantizerConfig


parser = argparse.ArgumentParser()
parser.add_argument("model", nargs="?", default="zai-org/CogVideoX-5b")
parser.add_argument("--prompt", default="waves break over a lighthouse, drone shot")
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--frames", type=int, default=49)
parser.add_argument("--size", type=int, nargs=2, default=(480, 720), metavar=("HEIGHT", "WIDTH"))
parser.add_argument("--out", default="cogvideox.gif")
args = parser.parse_args()

parts = {"transformer": QuantizerConfig("W8A8", attention="int8"), "text_encoder": QuantizerConfig("int8")}
quantization = PipelineQuantizationConfig(quant_mapping=parts)
pipe = DiffusionPipeline.from_pretrained(args.model, dtype=torch.bfloat16, quantization_config=quantization)
if torch.cuda.is_available():
    pipe.enable_model_cpu_offload()
pipe.vae.enable_tiling()
frames = pipe(
    args.prompt, num_inference_steps=args.steps, num_frames=args.frames, height=args.size[0], width=args.size[1]
).frames[0]
export_to_gif(frames, args.out, fps=8)
