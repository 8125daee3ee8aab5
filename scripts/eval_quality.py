"""Quality of a model in each format: perplexity, KL to the 16-bit model, SQNR of the weights, true bits per weight.

    python scripts/eval_quality.py MODEL TEXT [--format int4 --format int4:group_size=64:algorithm=hqq ...]
    python scripts/eval_quality.py MODEL TEXT --format int4:algorithm=gptq --calibrate OTHER_TEXT
    python scripts/eval_quality.py --embeddings ENCODER TEXT
    python scripts/eval_quality.py MODEL TEXT --kv-cache [int4 int4:recent_tokens=32 ...]

MODEL is a directory or name of a causal language model, TEXT a text file or token ids (.npy). Without --format: every
format with its defaults, and each again by plain rounding (absmax) with the same groups, to which it is compared: a
format that is worse than plain rounding is an error (exit status 1). With --embeddings the model is an encoder, and
the measure is the mean of 1 - cosine between its mean-pooled embeddings and those of the 16-bit model, over --texts
equal slices of TEXT, of which each is cut after --window tokens. With --kv-cache the weights stay, and the cache is
quantized: see common/cache_quality.py.

Prints one table; writes quality.json (with the SQNR of every layer) and quality.png (needs matplotlib) into --out.
"""

import argparse
import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import hf_quant
from common import cache_quality
from common.schemes import parse_spec
from hf_quant.algorithms import default_algorithm
from hf_quant.calibration import takes_data
from hf_quant.evaluate import bits_per_weight, machine, quality, read_windows
from hf_quant.formats import FORMATS
from hf_quant.modules import QuantizedModule
from hf_quant.planning import format_table
from hf_quant.testing import sqnr


TOLERANCE = 1.02  # times plain rounding's error: 8-bit formats differ from it by noise only


def plain_spec(model: nn.Module, spec: str) -> str | None:
    """The same scheme by absmax; None if it is that already, or one is chosen for each layer."""
    fields = parse_spec(spec)
    config = hf_quant.QuantizerConfig(**fields)
    if config.is_auto:
        return None
    entries = hf_quant.plan(model, config).quantized.values()
    chosen = {entry.algorithm or default_algorithm(entry.scheme.weight) for entry in entries}
    settings = [setting for setting in spec.split(":") if not setting.startswith("algorithm=")]
    return None if chosen <= {"absmax"} else ":".join([*settings, "algorithm=absmax"])


def layer_sqnr(model: nn.Module, reference: nn.Module) -> dict[str, float]:
    """{name of a quantized weight: its SQNR in dB}."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            original = reference.get_submodule(name)
            for weight in module.weight_names:
                exact = getattr(original, weight)
                found[f"{name}.{weight}"] = sqnr(module.dequantize_weight(weight, torch.float32), exact.float())
    return found


class LanguageModel:
    """Judges causal language models by perplexity and KL."""

    measure = "KL per token (nats)"

    def __init__(self, model: nn.Module, args: argparse.Namespace) -> None:
        tokenizer = None if args.text.suffix == ".npy" else AutoTokenizer.from_pretrained(args.model)
        self.window, self.reference = args.window or 256, model
        self.ids = read_windows(args.text, tokenizer, window=self.window, max_tokens=args.max_tokens)

    def judge(self, model: nn.Module) -> dict[str, float]:
        """{figure: value}; "error" is what formats are compared by."""
        models = {"reference": self.reference, "quantized": model}
        found = quality(models, self.ids, window=self.window, reference="reference")
        before, after = found["reference"].perplexity, found["quantized"].perplexity
        return {
            "error": found["quantized"].kl,
            "perplexity": after,
            "perplexity_16_bit": before,
            "perplexity_change": after / before - 1,
            "same_top_token": found["quantized"].agreement,
        }

    def describe(self) -> str:
        """One line on what was measured."""
        return f"{self.ids.numel()} tokens in windows of {self.window}"


class Encoder:
    """Judges encoders by their mean-pooled embeddings."""

    measure = "1 - cosine"

    def __init__(self, model: nn.Module, args: argparse.Namespace) -> None:
        text = args.text.read_text(encoding="utf-8")
        size = len(text) // args.texts
        self.window = args.window or 80
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        slices = [text[i * size : (i + 1) * size] for i in range(args.texts)]
        self.batches = [
            tokenizer(slices[i : i + 32], padding=True, truncation=True, max_length=self.window, return_tensors="pt")
            for i in range(0, args.texts, 32)
        ]
        self.count = args.texts
        self.expected = self.embed(model)

    @torch.no_grad()
    def embed(self, model: nn.Module) -> Tensor:
        """Mean of the last hidden states over the tokens of each text: fp64 [texts, hidden_size]."""
        pooled = []
        for batch in self.batches:
            batch = batch.to(model.device)
            hidden, mask = model(**batch).last_hidden_state.double(), batch["attention_mask"].unsqueeze(-1)
            pooled.append(((hidden * mask).sum(1) / mask.sum(1)).cpu())
        return torch.cat(pooled)

    def judge(self, model: nn.Module) -> dict[str, float]:
        """{figure: value}; "error" is what formats are compared by."""
        distance = 1 - torch.cosine_similarity(self.embed(model), self.expected)
        return {"error": distance.mean().item(), "worst_text": distance.max().item()}

    def describe(self) -> str:
        """One line on what was measured."""
        return f"{self.count} texts, the first {self.window} tokens of each"


def row_of(spec: str, result: dict[str, Any], plain: dict[str, Any] | None) -> tuple[str, ...]:
    """A row of the table."""
    layers = result["layers"]
    perplexity = (
        (f"{result['perplexity']:.3f}", f"{result['perplexity_change']:+.2%}", f"{result['same_top_token']:.1%}")
        if "perplexity" in result
        else ()
    )
    return (
        spec,
        f"{result['bits_per_weight']:.3f}",
        f"{sum(layers.values()) / len(layers):.1f}",
        f"{min(layers.values()):.1f}",
        *perplexity,
        f"{result['error']:.5f}",
        "" if plain is None else f"{result['error'] / max(plain['error'], 1e-12) - 1:+.0%}",
    )


def draw(results: dict[str, dict[str, Any]], measure: str, title: str, path: Path) -> bool:
    """Write a plot of error versus bits per weight; False if matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    figure, axes = plt.subplots(figsize=(9, 6), dpi=150, layout="constrained")
    for plain, marker, label in ((False, "o", "as configured"), (True, "x", "plain rounding")):
        points = {s: r for s, r in results.items() if r["is_plain"] == plain}
        if points:
            bits, errors = ([r[key] for r in points.values()] for key in ("bits_per_weight", "error"))
            axes.scatter(bits, errors, marker=marker, color="0.6" if plain else "C0", label=label, zorder=3)
        for spec, result in points.items() if not plain else ():
            at = (result["bits_per_weight"], result["error"])
            axes.annotate(spec, at, xytext=(6, 3), textcoords="offset points", fontsize=8)
    axes.set_yscale("log")
    axes.set_xlabel("true bits per weight, scales and zero points included")
    axes.set_ylabel(f"{measure} to the 16-bit model (lower is better)")
    axes.set_title(title, loc="left")
    axes.grid(axis="y", color="0.92", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)
    return True


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="directory or name of a model")
    parser.add_argument("text", type=Path, help="text file, or token ids as .npy")
    parser.add_argument("--embeddings", action="store_true", help="the model is an encoder")
    parser.add_argument("--format", action="append", metavar="FORMAT[:FIELD=VALUE]...", help="may be given often")
    parser.add_argument("--calibrate", type=Path, help="data for formats that need it; default: the model's own text")
    parser.add_argument("--calibration-tokens", type=int, default=8192, help="of the data, in the windows of TEXT")
    parser.add_argument("--no-plain", action="store_true", help="leave plain rounding out")
    parser.add_argument("--window", type=int, help="tokens per window (256) or per text (80)")
    parser.add_argument("--max-tokens", type=int, default=32768, help="of TEXT, for language models")
    parser.add_argument("--texts", type=int, default=256, help="for encoders")
    parser.add_argument("--dtype", default="auto", help="of the 16-bit model; default: the checkpoint's")
    parser.add_argument("--device", default="cpu")
    caches = parser.add_argument_group("KV cache")
    caches.add_argument("--kv-cache", nargs="*", metavar="FORMAT[:FIELD=VALUE]...", help="formats of the cache")
    caches.add_argument("--windows", type=int, default=40, help="how many windows are read")
    caches.add_argument("--prefill", type=int, default=96, help="tokens that are read at once")
    caches.add_argument("--step", type=int, default=16, help="tokens that are read at a time behind them")
    caches.add_argument("--padding", type=int, default=0, help="tokens of padding on the left of each window")
    caches.add_argument("--residual", type=int, default=1, help="tokens that transformers' backends keep in 16 bit")
    caches.add_argument("--stretch-keys", type=float, help="make two pairs of channels of each head so much larger")
    parser.add_argument("--out", type=Path, default=Path("quality"), help="directory of quality.json and quality.png")
    return parser.parse_args()


def main() -> int:
    """Measure; 1 if a format is worse than plain rounding."""
    args = parse_args()
    auto = AutoModel if args.embeddings else AutoModelForCausalLM
    reference = auto.from_pretrained(args.model, dtype=args.dtype).to(args.device).eval()
    if args.kv_cache is not None:
        tokenizer = None if args.text.suffix == ".npy" else AutoTokenizer.from_pretrained(args.model)
        args.window = args.window or 256
        return cache_quality.evaluate(reference, read_windows(args.text, tokenizer, window=args.window), args)
    judge = (Encoder if args.embeddings else LanguageModel)(reference, args)
    specs = {spec: None if args.no_plain else plain_spec(reference, spec) for spec in args.format or FORMATS}
    results: dict[str, dict[str, Any]] = {}
    for spec in dict.fromkeys(spec for pair in specs.items() for spec in pair if spec is not None):
        config = hf_quant.QuantizerConfig(**parse_spec(spec))
        if takes_data(config, None) and args.calibrate is not None:
            tokens = {"num_tokens": args.calibration_tokens, "length": judge.window}
            config.calibration = {"data": args.calibrate, **tokens}
        model = hf_quant.quantize_(copy.deepcopy(reference), config)
        results[spec] = {
            **judge.judge(model),
            "bits_per_weight": bits_per_weight(model),
            "is_plain": spec in specs.values(),
            "layers": layer_sqnr(model, reference),
        }
        print(f"{spec}: {judge.measure} {results[spec]['error']:.5f}", file=sys.stderr, flush=True)

    perplexity = () if args.embeddings else ("perplexity", "change", "same top token")
    header = ("format", "bits/weight", "SQNR dB", "worst layer", *perplexity, judge.measure, "to plain")
    rows = [row_of(spec, result, results.get(specs.get(spec))) for spec, result in results.items()]
    title = f"{args.model}: {judge.describe()}"
    print(f"{title}\n{machine()}, hf_quant {hf_quant.__version__}\n{format_table([header, *rows])}")
    args.out.mkdir(parents=True, exist_ok=True)
    record = {"model": args.model, "measured": judge.describe(), "machine": machine(), "measure": judge.measure}
    (args.out / "quality.json").write_text(json.dumps({**record, "results": results}, indent=1) + "\n")
    drawn = draw(results, judge.measure, title, args.out / "quality.png")
    print(f"wrote {args.out}/quality.json" + (" and quality.png" if drawn else "; no plot: matplotlib is missing"))
    worse = [s for s, p in specs.items() if p is not None and results[s]["error"] > TOLERANCE * results[p]["error"]]
    if worse:
        print(f"worse than plain rounding: {', '.join(worse)}")
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
