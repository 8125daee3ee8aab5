"""A GGUF file imported, beside llama.cpp on the same file: how near the logits are, and how fast both generate.

    python scripts/bench_gguf.py model.Q4_K_M.gguf                     # the figures of docs/serving.md
    python scripts/bench_gguf.py model.Q4_K_M.gguf --threads 1 --requantize int4

Needs the packages gguf and llama-cpp-python. The import is what `hf-quant import` writes. Logits are those of
--prompt-tokens tokens of --text: of the model in fp32, as llama.cpp rounds the inputs of its products to 8 bits, and
of the model in bf16; the distance is relative to the norm. For the speed both take turns in bf16, one generation each;
the medians count.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.checkout import commit
from common.llama_engine import LlamaCpp
from hf_quant import import_checkpoint
from hf_quant.evaluate import generation_speed, machine
from hf_quant.planning import format_table
from real_models import TEXT


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--requantize", help="as for `hf-quant import`")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args(arguments)


@torch.no_grad()
def distance(model: torch.nn.Module, ids: torch.Tensor, expected: torch.Tensor) -> float:
    """|logits - expected| / |expected| over all tokens."""
    found = model(ids[None]).logits[0].float()
    return float((found - expected).norm() / expected.norm())


def main(arguments: list[str] | None = None) -> None:
    """Import the file, compare, and print."""
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    print(f"{args.file.name}, {args.file.stat().st_size / 1e6:.0f} MB, {commit()}, {machine()}")
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "imported"
        for note in import_checkpoint(args.file, out, requantize=args.requantize):
            print(f"note: {note}")
        size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
        print(f"imported: {size / 1e6:.0f} MB")
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
        in_fp32 = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        ids = AutoTokenizer.from_pretrained(out)(args.text.read_text(), return_tensors="pt").input_ids[0]
    engine = LlamaCpp(model.config, args.file, batch_size=1, context=args.prompt_tokens + args.new_tokens)
    ids = ids[: args.prompt_tokens]
    expected = engine.logits(ids.tolist())
    for dtype, each in (("fp32", in_fp32), ("bf16", model)):
        print(f"distance of the logits to llama.cpp, model in {dtype}: {distance(each, ids, expected):.4f}")
    del in_fp32
    speeds = generation_speed(
        {"hf_quant": model, "llama.cpp": engine},
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        rounds=args.rounds,
        progress=sys.stderr.isatty(),
    )
    base = speeds["llama.cpp"]
    rows = [("", f"prompt of {args.prompt_tokens}, ms", "x llama.cpp", "tokens/s", "x llama.cpp")]
    for name, speed in speeds.items():
        prompt = (f"{speed.prefill * 1e3:.0f}", f"{base.prefill / speed.prefill:.2f}")
        rows.append((name, *prompt, f"{speed.decode:.1f}", f"{speed.decode / base.decode:.2f}"))
    print(format_table(rows))
    engine.close()


if __name__ == "__main__":
    main()
