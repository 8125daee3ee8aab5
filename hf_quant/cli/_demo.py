"""`hf-quant demo`: every format on a small trained model, in one table and one plot."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_quant.cli._models import Source, check_not_quantized, find_source, load_model, load_tokenizer, progress_wanted
from hf_quant.config import QuantizerConfig
from hf_quant.evaluate import bits_per_weight, generation_speed, machine, quality, read_windows
from hf_quant.planning import format_table


FORMATS = ("int8", "fp8", "nf4", "int4", "int3", "int2")
SAVED = "int4"  # the checkpoint that stays, and is read again by a new process
WINDOW = 256  # tokens; the model in the checkout was trained at this length
PROMPT = 'def read_lines(path):\n    """Return'
ASSET = Path("integration_tests") / "assets" / "tiny-llama-13m"
# This code does not import hf_quant: an installed hf_quant is enough.
_NEW_PROCESS = """
import sys, torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
checkpoint, ids, logits, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
with torch.no_grad():
    save_file({"logits": model(input_ids=load_file(ids)["ids"]).logits.contiguous()}, logits)
"""


@dataclass
class Row:
    """One model of the table: size in bytes, times in seconds, KL to the first row in nats, `decode` in tokens/s."""

    name: str
    bits: float
    size: int
    load: float = 0.0
    perplexity: float = 0.0
    kl: float = 0.0
    decode: float = 0.0
    text: str = ""


def demo(args: argparse.Namespace) -> None:
    """Quantize, save, reload and measure; print the table; check a new process; draw the plot."""
    source, text = find_asset(args.model, args.text)
    tokenizer = load_tokenizer(source)
    ids = read_windows(text, tokenizer, window=WINDOW, max_tokens=args.tokens)
    if tokenizer is None:
        raise ValueError(f"{source.name} has no tokenizer; the demo shows text that the model writes")
    args.out.mkdir(parents=True, exist_ok=True)
    started = machine()
    print(f"{source.name} in {len(FORMATS)} formats; {started}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        saved = args.out / f"{Path(source.name).resolve().name}-{SAVED}"
        folders = {form: saved if form == SAVED else work / form for form in FORMATS}
        expected = _quantize_all(source, folders, ids[:WINDOW].unsqueeze(0))
        models, rows = _load_all(source, folders)
        _measure(models, rows, ids, tokenizer, rounds=args.rounds)
        print(f"\n{table(rows)}\n", flush=True)
        _check_new_process(saved, ids[:WINDOW].unsqueeze(0), expected, work)
    results = {
        "model": Path(source.name).resolve().name,
        "machine": started,
        "tokens": (ids.numel() // WINDOW) * (WINDOW - 1),
        "rows": [asdict(row) for row in rows],
    }
    (args.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    print(f"results: {args.out / 'results.json'}")
    _plot(rows, results["model"], args.out / "quality_versus_size.png")


def find_asset(model: Path | None, text: Path | None) -> tuple[Source, Path]:
    """Return (the demo's model, its text), given or in the checkout. Raises ValueError if there are none."""
    if model is None:
        model = next((p for p in (Path(__file__).parents[2] / ASSET, ASSET) if p.is_dir()), None)
        if model is None:
            raise ValueError(
                f"the demo's model is in a checkout of the repository ({ASSET}), and this installation has none; "
                "name a causal language model by --model DIR and a text by --text FILE"
            )
    if text is None:
        text = model / "val_ids.npy"
        if not text.is_file():
            raise ValueError(f"{text} does not exist; name a text by --text FILE")
    source = find_source(str(model))
    check_not_quantized(source)
    return source, text


def _quantize_all(source: Source, folders: dict[str, Path], ids: torch.Tensor) -> torch.Tensor:
    """Quantize while loading and save, in every format; return the logits of the kept one before it was saved."""
    expected = None
    for form, folder in folders.items():
        start = time.perf_counter()
        model = load_model(source, config=QuantizerConfig(form))
        model.save_pretrained(folder)
        print(f"  {form}: quantized and saved in {time.perf_counter() - start:.1f} s", flush=True)
        if form == SAVED:
            with torch.no_grad():
                expected = model(input_ids=ids).logits
    return expected


def _load_all(source: Source, folders: dict[str, Path]) -> tuple[dict[str, nn.Module], list[Row]]:
    """Load every model as a user would, 16 bit first, each twice: the faster time counts."""
    models, rows = {}, []
    for name, folder in {"bf16": Path(source.name), **folders}.items():
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            model = load_model(find_source(str(folder)))
            seconds.append(time.perf_counter() - start)
        if not rows:
            name = str(model.dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        bits = bits_per_weight(model) or 8.0 * model.dtype.itemsize
        models[name] = model
        rows.append(Row(name, bits, size, min(seconds)))
    return models, rows


def _measure(models: dict[str, nn.Module], rows: list[Row], ids: torch.Tensor, tokenizer, *, rounds: int) -> None:
    """Fill in perplexity, speed and text."""
    print("  measuring perplexity and speed, the models in turns ...", flush=True)
    found = quality(models, ids, window=WINDOW, reference=rows[0].name, progress=progress_wanted())
    speeds = generation_speed(models, prompt_tokens=64, new_tokens=32, rounds=rounds, progress=progress_wanted())
    prompt = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    for row in rows:
        row.perplexity, row.kl = found[row.name].perplexity, found[row.name].kl
        row.decode = speeds[row.name].decode
        written = models[row.name].generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        row.text = " ".join(tokenizer.decode(written[0, prompt.shape[1] :]).split())


def table(rows: list[Row]) -> str:
    """Return the table of the demo; the first row is the reference of the others."""
    base = rows[0]
    cells = [
        ("weights", "bits/weight", "MB on disk", "load s", "perplexity", "change", "KL", "decode tok/s")
        + (f"x {base.name}", f"greedy text after {' '.join(PROMPT.split())!r}")
    ]
    for row in rows:
        sizes = (f"{row.bits:.2f}", f"{row.size / 1e6:.2f}", f"{row.load:.2f}", f"{row.perplexity:.4f}")
        change = ("", "") if row is base else (f"{row.perplexity / base.perplexity - 1:+.2%}", f"{row.kl:.5f}")
        cells.append((row.name, *sizes, *change, f"{row.decode:.1f}", f"{row.decode / base.decode:.2f}", row.text))
    return format_table(cells)


def _check_new_process(checkpoint: Path, ids: torch.Tensor, expected: torch.Tensor, work: Path) -> None:
    """Run a process that knows only the checkpoint. Raises RuntimeError if its logits are different."""
    save_file({"ids": ids.contiguous()}, work / "ids.safetensors")
    arguments = (checkpoint, work / "ids.safetensors", work / "logits.safetensors", torch.get_num_threads())
    result = subprocess.run(
        [sys.executable, "-c", _NEW_PROCESS, *map(str, arguments)],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    if result.returncode:
        raise RuntimeError(f"{checkpoint} cannot be loaded by a new process: {result.stderr.strip()[-500:]}")
    logits = load_file(work / "logits.safetensors")["logits"]
    if not torch.equal(logits, expected):
        difference = (logits.float() - expected.float()).abs().max().item()
        raise RuntimeError(f"a new process computes other logits from {checkpoint}: they differ by {difference}")
    print(
        f"{checkpoint}: a new process that does not import hf_quant loads it; its {logits.numel():,} logits are equal "
        "to the bit to the logits of the model before it was saved"
    )


def _plot(rows: list[Row], model: str, path: Path) -> None:
    """Draw quality versus size as a PNG; print a line if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (pip install 'hf-quant[demo]')")
        return
    matplotlib.use("Agg")
    from hf_quant.cli._plot import draw

    draw(rows, f"{model}: quality versus size", path)
    print(f"plot: {path}")
