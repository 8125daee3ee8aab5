"""Compare the images or videos of a 16-bit and a quantized pipeline: the same prompts and seeds, side by side.

    python scripts/eval_pipeline_quality.py black-forest-labs/FLUX.1-dev --scheme fp8-dynamic int4 \
        --prompt "a lighthouse in a storm" --prompts prompts.txt --seeds 0 1 --steps 28 --size 1024x1024 --out grid.png
    python scripts/eval_pipeline_quality.py zai-org/CogVideoX-5b --scheme int8-dynamic --attention int8 \
        --prompt "waves" --size 720x480 --set num_frames=49 --offload
    python scripts/eval_pipeline_quality.py SAVED --reference black-forest-labs/FLUX.1-dev --prompt "a lighthouse"

The pipeline is loaded in 16 bit, then once for each --scheme with its denoising model (or --components) quantized;
without --scheme it is loaded as it was saved, and --reference names the 16-bit one. One is in memory at a time.

Writes a grid (rows: prompts and seeds; columns: 16 bit, each scheme; of a video the first, middle and last frame),
and beside it what it prints as JSON: PSNR in dB against 16 bit, SSIM where scikit-image or torchmetrics is installed,
LPIPS with --lpips (torchmetrics; downloads its network at first use), gigabytes of weights, seconds. A seed gives the
same noise on every device. Images that differ need not be worse, and PSNR falls with the number of steps.
"""

import argparse
import gc
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from common.checkout import commit
from common.schemes import parse_spec
from diffusion.bench import SCHEMES, tensor_bytes
from gpulab.timing import gpu, installed
from hf_quant import QuantizerConfig
from hf_quant.evaluate import machine
from hf_quant.planning import format_table


REFERENCE = "16 bit"
DENOISERS = ("transformer", "transformer_2", "unet")
LABEL, MARGIN = 20, 4  # pixels of the grid

Frames = np.ndarray  # fp32 [frames, height, width, 3] from 0 to 1; an image is one frame


def psnr(value: Frames, reference: Frames) -> float:
    """Peak signal-to-noise ratio in dB; inf if equal."""
    error = float(np.mean((value.astype(np.float64) - reference) ** 2))
    return math.inf if error == 0 else -10 * math.log10(error)


def ssim_torchmetrics(value: Frames, reference: Frames) -> float:
    """Structural similarity by torchmetrics, the mean over frames."""
    from torchmetrics.functional.image import structural_similarity_index_measure

    return float(structural_similarity_index_measure(*_channels_first(value, reference), data_range=1.0))


def ssim(value: Frames, reference: Frames) -> float:
    """Structural similarity by scikit-image, the mean over frames."""
    from skimage.metrics import structural_similarity

    side = min(7, *reference.shape[1:3])
    options = {"channel_axis": 2, "data_range": 1.0, "win_size": side - 1 + side % 2}
    return statistics.mean(float(structural_similarity(a, b, **options)) for a, b in zip(value, reference))


def lpips(value: Frames, reference: Frames) -> float:
    """Learned perceptual distance by torchmetrics (AlexNet), the mean over frames."""
    from torchmetrics.functional.image import learned_perceptual_image_patch_similarity as distance

    return float(distance(*_channels_first(value, reference), net_type="alex", normalize=True))


def _channels_first(*several: Frames) -> list[torch.Tensor]:
    return [torch.from_numpy(frames).permute(0, 3, 1, 2).float() for frames in several]


def measures(args: argparse.Namespace) -> dict[str, Callable[[Frames, Frames], float]]:
    """By what is compared: what is installed and asked for."""
    found: dict[str, Callable[[Frames, Frames], float]] = {"PSNR dB": psnr}
    if installed("skimage"):
        found["SSIM"] = ssim
    elif installed("torchmetrics"):
        found["SSIM"] = ssim_torchmetrics
    else:
        print("SSIM: left out, neither scikit-image nor torchmetrics is installed")
    if args.lpips:
        found["LPIPS"] = lpips
    return found


def load(path: str, fields: dict[str, Any] | None, args: argparse.Namespace) -> Any:
    """The pipeline, its components quantized on the way if there are fields of a configuration."""
    from diffusers import DiffusionPipeline, PipelineQuantizationConfig

    options: dict[str, Any] = {}
    if fields is not None:
        parts = args.components or [n for n in DENOISERS if n in DiffusionPipeline.load_config(path)]
        mapping = {name: QuantizerConfig(**_fields_of(name, fields, args.attention)) for name in parts}
        options["quantization_config"] = PipelineQuantizationConfig(quant_mapping=mapping)
    pipe = DiffusionPipeline.from_pretrained(path, dtype=getattr(torch, args.dtype), **options)
    pipe.set_progress_bar_config(disable=True)
    if args.offload:
        pipe.enable_model_cpu_offload()
    else:
        pipe.to(args.device)
    return pipe


def _fields_of(component: str, fields: dict[str, Any], attention: str | None) -> dict[str, Any]:
    extra = {"attention": attention} if attention is not None and component in DENOISERS else {}
    return {**fields, **extra}


def generate(pipe: Any, prompts: list[str], args: argparse.Namespace) -> tuple[list[Frames], list[float]]:
    """(frames, seconds) of every prompt with every seed."""
    found, seconds = [], []
    options = dict(args.set)
    if args.size is not None:
        options |= {"width": args.size[0], "height": args.size[1]}
    for prompt in prompts:
        for seed in args.seeds:
            generator = torch.Generator("cpu").manual_seed(seed)
            start = time.perf_counter()
            output = pipe(
                prompt=prompt, num_inference_steps=args.steps, generator=generator, output_type="np", **options
            )
            seconds.append(time.perf_counter() - start)
            frames = output.images if hasattr(output, "images") else output.frames[0]
            found.append(np.asarray(frames, dtype=np.float32).clip(0, 1))
    return found, seconds


def gigabytes(pipe: Any) -> float:
    """Size of the weights of all components, in memory."""
    return sum(tensor_bytes(part) for part in pipe.components.values() if isinstance(part, nn.Module)) / 1e9


def disk_gigabytes(path: Path) -> float | None:
    """Size of the weights in a directory; None for a name on the Hub."""
    files = [file for file in path.rglob("*.safetensors")] if path.is_dir() else []
    return sum(file.stat().st_size for file in files) / 1e9 if files else None


def run(path: str, fields: dict[str, Any] | None, name: str, prompts: list[str], args: argparse.Namespace) -> dict:
    """Load, generate, measure one pipeline, and let go of it."""
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    pipe = load(path, fields, args)
    weights = gigabytes(pipe)
    frames, seconds = generate(pipe, prompts, args)
    found: dict[str, Any] = {"frames": frames, "seconds": statistics.median(seconds), "weights_gb": weights}
    found["peak_gb"] = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
    source = Path(path)
    if args.save is not None and fields is not None:
        source = args.save / name.replace(":", "-").replace(",", "")
        pipe.save_pretrained(source)
    found["disk_gb"] = disk_gigabytes(source) if fields is None or args.save is not None else None
    del pipe
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    print(f"{name}: {len(frames)} done", file=sys.stderr, flush=True)
    return found


def draw(columns: dict[str, list[list[Frames]]], captions: dict[str, list[str]], side: int) -> Any:
    """A PIL image: one column for each pipeline, one row for each image, its caption below it."""
    from PIL import Image, ImageDraw

    shown = {name: [_frames_shown(one) for one in images] for name, images in columns.items()}
    strips = {name: [_strip(frames, side) for frames in images] for name, images in shown.items()}
    widths = {name: max(strip.width for strip in images) + MARGIN for name, images in strips.items()}
    heights = [
        max(images[row].height for images in strips.values()) + LABEL for row in range(len(captions[REFERENCE]))
    ]
    grid = Image.new("RGB", (sum(widths.values()), LABEL + sum(heights)), "white")
    pen, left = ImageDraw.Draw(grid), 0
    for name, images in strips.items():
        pen.text((left + MARGIN, MARGIN), name, fill="black")
        top = LABEL
        for strip, caption, height in zip(images, captions[name], heights):
            grid.paste(strip, (left, top))
            pen.text((left + MARGIN, top + height - LABEL + MARGIN), caption, fill="black")
            top += height
        left += widths[name]
    return grid


def _frames_shown(frames: Frames) -> Frames:
    """Choose the frames to show: the image itself, or the first, the middle and the last frame of a video."""
    return frames if len(frames) < 3 else frames[[0, len(frames) // 2, len(frames) - 1]]


def _strip(frames: Frames, side: int) -> Any:
    from PIL import Image

    images = [Image.fromarray((frame * 255).round().astype(np.uint8)) for frame in frames]
    scale = side / max(images[0].size)
    size = tuple(max(round(n * scale), 1) for n in images[0].size)
    strip = Image.new("RGB", (size[0] * len(images), size[1]))
    for i, image in enumerate(images):
        strip.paste(image.resize(size), (i * size[0], 0))
    return strip


def compared(found: dict[str, dict], by: dict[str, Callable[[Frames, Frames], float]]) -> None:
    """Add to each pipeline's findings {measure: one value for each image}."""
    for one in found.values():
        pairs = list(zip(one["frames"], found[REFERENCE]["frames"]))
        one["measures"] = {name: [measure(a, b) for a, b in pairs] for name, measure in by.items()}


def table(found: dict[str, dict], by: dict[str, Any]) -> str:
    """Make the printed table: means over the images, the worst one in brackets."""
    header = ("pipeline", *(f"{name} (worst)" for name in by), "weights GB", "on disk GB", "peak GB", "s")
    rows = [header]
    for name, one in found.items():
        cells = []
        for measure, values in one["measures"].items():
            worst = max(values) if measure == "LPIPS" else min(values)
            cells.append("same" if worst == math.inf else f"{statistics.mean(values):.3f} ({worst:.3f})")
        sizes = [one[key] for key in ("weights_gb", "disk_gb", "peak_gb")]
        cells += ["" if size is None else f"{size:.4g}" for size in sizes]
        rows.append((name, *cells, f"{one['seconds']:.3g}"))
    return format_table(rows)


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    return int(width), int(height)


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(text)
    return key, json.loads(value)


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", metavar="REPO_OR_DIR")
    parser.add_argument("--scheme", nargs="+", default=[], help=f"{', '.join(SCHEMES)}, or FORMAT[:FIELD=VALUE]...")
    parser.add_argument("--attention", choices=("int8",), help="8-bit attention in the denoising model")
    parser.add_argument("--components", nargs="+", help=f"what is quantized (default: {', '.join(DENOISERS)})")
    parser.add_argument("--reference", help="the 16-bit pipeline (default: REPO_OR_DIR)")
    parser.add_argument("--prompt", action="append", default=[])
    parser.add_argument("--prompts", type=Path, help="a text file, one prompt per line")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--size", type=_size, metavar="WIDTHxHEIGHT")
    parser.add_argument(
        "--set", type=_setting, action="append", default=[], metavar="ARGUMENT=JSON", help="of the call"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default=str(gpu() or "cpu"))
    parser.add_argument("--offload", action="store_true", help="move components to the GPU in turns")
    parser.add_argument("--lpips", action="store_true")
    parser.add_argument(
        "--save", type=Path, help="directory for the quantized pipelines; their size is measured there"
    )
    parser.add_argument("--side", type=int, default=384, help="of an image in the grid, in pixels")
    parser.add_argument("--out", type=Path, default=Path("grid.png"))
    args = parser.parse_args(arguments)
    if not args.scheme and args.reference is None:
        parser.error("give --scheme, or --reference if REPO_OR_DIR is quantized already")
    return args


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    """Generate, compare, write."""
    args = parse_args(arguments)
    prompts = args.prompt + ([] if args.prompts is None else args.prompts.read_text(encoding="utf-8").splitlines())
    prompts = [prompt for prompt in prompts if prompt.strip()]
    if not prompts:
        print("eval_pipeline_quality: no prompt; give --prompt or --prompts", file=sys.stderr)
        return 2
    print(
        f"python {shlex.join(sys.argv)}\n{machine()}; diffusers {version('diffusers')}; commit {commit()}", flush=True
    )
    by = measures(args)
    found = {REFERENCE: run(args.reference or args.pipeline, None, REFERENCE, prompts, args)}
    for scheme in args.scheme:
        fields = SCHEMES.get(scheme) or parse_spec(scheme)
        found[scheme] = run(args.pipeline, fields, scheme, prompts, args)
    if not args.scheme:
        found["as saved"] = run(args.pipeline, None, "as saved", prompts, args)
    compared(found, by)
    names = [f"{prompt[:40]}, seed {seed}" for prompt in prompts for seed in args.seeds]
    captions = {
        name: names if name == REFERENCE else [f"PSNR {value:.1f} dB" for value in one["measures"]["PSNR dB"]]
        for name, one in found.items()
    }
    draw({name: one["frames"] for name, one in found.items()}, captions, args.side).save(args.out)
    print(f"\n{len(names)} images or videos of {args.steps} steps; s: median of one\n{table(found, by)}")
    results = {name: {k: v for k, v in one.items() if k != "frames"} for name, one in found.items()}
    text = json.dumps({"command": sys.argv, "images": names, "pipelines": results}, indent=1)
    args.out.with_suffix(".json").write_text(text.replace("Infinity", '"same"') + "\n")
    print(f"wrote {args.out} and {args.out.with_suffix('.json')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
