"""GB of published diffusion models in 16, 8 and 4 bits (docs/diffusers.md), and the error of one call in each format.

    python scripts/diffusion_sizes.py                                      # the models of the table
    python scripts/diffusion_sizes.py --readme                             # write it into docs/diffusers.md
    python scripts/diffusion_sizes.py --error flux.1-dev --blocks 1        # SNR of a call, at the model's true width

Sizes are those of `hf_quant.plan` on the meta device, what stays in 16 bit included. --error makes the model with few
blocks and random weights (see diffusion/run.py), quantizes it in every format and compares one call with 16 bit.
"""

import argparse

import torch

import hf_quant
from common.pages import markdown, write_section
from diffusion.bench import SCHEMES
from diffusion.models import MODELS, T5_XXL
from diffusion.run import NORMAL, TRAINED_LIKE, empty_model, empty_t5, make_step, predict, random_model, shallow_copy
from diffusion.spec import Size, scaled
from hf_quant.planning import format_table
from hf_quant.testing import sqnr


SECTION = "diffusion size table"
NAMES = {
    "flux.1-dev": "Flux.1-dev",
    "flux.2-dev": "Flux.2-dev",
    "qwen-image": "Qwen-Image",
    "sd3.5-large": "Stable Diffusion 3.5 large",
    "sdxl": "SDXL (its convolutions stay in 16 bit)",
    "cogvideox-5b": "CogVideoX-5b",
    "wan2.1-t2v-14b": "Wan 2.1 14B",
    "hunyuanvideo": "HunyuanVideo",
}
WEIGHTS = {"trained-like": TRAINED_LIKE, "normal": NORMAL}
NOT_ROTATED = {"weights": "W8A8", "input_transform": "none"}
SIZE = Size(32, 32, 64)  # of latents, and tokens of a prompt: a CPU has to compute it


def size_rows() -> list[tuple[str, ...]]:
    """The table: a row for each model."""
    rows = [("model", "bf16", "int8, fp8", "int4")]
    models = {name: empty_model(MODELS[key]) for key, name in NAMES.items()}
    for name, model in {**models, "T5-XXL, the text encoder of many": empty_t5(T5_XXL)}.items():
        plans = [hf_quant.plan(model, weights, dtype=torch.bfloat16) for weights in ("int8", "int4")]
        rows.append((name, *(f"{size / 1e9:.1f}" for size in (plans[0].nbytes_before, *(p.nbytes for p in plans)))))
    return rows


@torch.inference_mode()
def error_rows(name: str, blocks: int, weights: str) -> list[tuple[str, ...]]:
    """SNR of one call in every format against 16 bit, in dB."""
    spec = scaled(MODELS[name], blocks)
    base = random_model(spec, weights=WEIGHTS[weights])
    step = make_step(spec, size=SIZE)

    def call(model: torch.nn.Module) -> torch.Tensor:
        return predict(model, spec, step, step.latents, torch.tensor([500.0])).float()

    reference, rows = call(base), [("format", "SNR dB")]
    for scheme, config in {**SCHEMES, "int8-dynamic, not rotated": NOT_ROTATED}.items():
        model = hf_quant.quantize_(shallow_copy(base), config)
        rows.append((scheme, f"{sqnr(call(model), reference):.1f}"))
    return rows


def main() -> None:
    """Print a table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--error", choices=MODELS, metavar="MODEL", help="errors of this model instead of sizes")
    parser.add_argument("--blocks", type=int, default=1, help="of each kind, with --error (default: 1)")
    parser.add_argument("--weights", choices=WEIGHTS, default="trained-like", help="with --error")
    parser.add_argument("--readme", action="store_true", help="write the table of sizes into docs/diffusers.md")
    args = parser.parse_args()
    if args.error is not None:
        print(format_table(error_rows(args.error, args.blocks, args.weights)))
        return
    rows = size_rows()
    print(format_table(rows))
    if args.readme:
        write_section(SECTION, markdown(rows))


if __name__ == "__main__":
    main()
