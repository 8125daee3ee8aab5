r"""Train a small Llama on the Python standard library's sources and any folders of text, for tests and evaluation.

    python scripts/train_asset_model.py OUT [--text FOLDER ...] [--steps 2200] [--device cuda]
    python scripts/train_asset_model.py OUT --hidden-size 512 --layers 8 --heads 8 --kv-heads 4 \
        --intermediate-size 1536

The defaults are the architecture of the tests' asset (12.6M parameters); the second line has about 30M. Writes a
checkpoint in bf16 with its byte-level BPE tokenizer, and from files that were held out: eval.txt, their token ids
val_ids.npy (uint16), and in README.md what was trained on what, with the held-out perplexity.
"""

import argparse
import math
import platform
import sys
import sysconfig
import time
from pathlib import Path

import numpy
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_quant.evaluate import quality


END_OF_TEXT = "<|endoftext|>"
SUFFIXES = {".py", ".pyi", ".txt", ".md", ".rst", ".tex", ".html", ".c", ".h", ".cpp", ".rs", ".go", ".js", ".toml"}
HELD_OUT_EVERY = 40  # files, in the order of their paths
MAX_HELD_OUT = 900_000  # characters
WARM_UP_STEPS = 100
CLIP_NORM = 1.0


def text_files(folders: list[Path]) -> list[Path]:
    """List the text files below the folders and in the standard library (no installed packages), in a fixed order."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found = [path for path in library.rglob("*.py") if not {"site-packages", "dist-packages"} & set(path.parts)]
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"--text {folder} is not a folder")
        found += [path for path in folder.rglob("*") if path.is_file() and path.suffix.lower() in SUFFIXES]
    return sorted(set(found))


def read_texts(files: list[Path]) -> tuple[list[str], list[str]]:
    """(texts to train on, held-out texts); files that are not UTF-8 and copies of others are left out."""
    training, held_out, seen, held_out_size = [], [], set(), 0
    for i, path in enumerate(files):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if not text.strip() or text in seen:
            continue
        seen.add(text)
        if i % HELD_OUT_EVERY == 0 and held_out_size < MAX_HELD_OUT:
            held_out.append(text)
            held_out_size += len(text)
        else:
            training.append(text)
    return training, held_out


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE; texts begin with the end-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def tokenize(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> numpy.ndarray:
    """Return the uint16 token ids of all texts, one after the other."""
    encodings = tokenizer.backend_tokenizer.encode_batch(texts)
    return numpy.concatenate([numpy.array(encoding.ids, dtype=numpy.uint16) for encoding in encodings])


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then half a cosine down to a tenth."""
    warm_up = min(WARM_UP_STEPS, steps // 10 + 1)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / max(steps - warm_up, 1)
    return peak * (0.55 + 0.45 * math.cos(math.pi * progress))


def train(model: LlamaForCausalLM, ids: torch.Tensor, args: argparse.Namespace) -> None:
    """AdamW in fp32 on random windows of the ids; bf16 autocast on a GPU."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(args.seed)
    offsets = torch.arange(args.length)
    start = time.perf_counter()
    model.train()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.learning_rate)
        first = torch.randint(0, ids.numel() - args.length, (args.batch, 1), generator=generator)
        batch = ids[first + offsets].to(args.device, torch.int64)
        with torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.device != "cpu"):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % args.log_every == 0 or step == args.steps - 1:
            seconds = time.perf_counter() - start
            rate = (step + 1) * args.batch * args.length / seconds
            print(
                f"step {step + 1}/{args.steps}: loss {loss.item():.3f}, {rate:.0f} tokens/s, {seconds:.0f} s",
                flush=True,
            )
    model.eval()


def build_model(args: argparse.Namespace, vocab_size: int) -> LlamaForCausalLM:
    """A Llama of the wanted size with tied embeddings and random weights, fp32."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=4 * args.length,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(args.seed)
    return LlamaForCausalLM(config).float().to(args.device)


def describe(args: argparse.Namespace, model: LlamaForCausalLM, num_ids: int, perplexity: float) -> str:
    """README.md of the checkpoint."""
    size = sum(p.numel() for p in model.parameters()) / 1e6
    sources = [f"the Python {platform.python_version()} standard library's sources (PSF licence)"]
    sources += [f"text files of {folder.resolve().name}" for folder in args.text]
    return (
        f"A {size:.1f}M-parameter Llama ({args.layers} layers, hidden {args.hidden_size}, {args.heads} heads, "
        f"{args.kv_heads} KV heads, tied embedding, byte-level BPE of {model.config.vocab_size:,}), bf16, trained for "
        f"{args.steps * args.batch * args.length / 1e6:.1f} million tokens at length {args.length} on {num_ids:,} "
        f"tokens of {' and '.join(sources)}; held-out perplexity {perplexity:.2f} in windows of {args.length}. For "
        "tests and evaluation only. `val_ids.npy` (uint16) and `eval.txt` are held-out text.\n"
    )


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="directory to write; must not exist, or be empty")
    parser.add_argument("--text", type=Path, action="append", default=[], metavar="FOLDER", help="more text")
    parser.add_argument("--hidden-size", type=int, default=384)
    parser.add_argument("--intermediate-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--length", type=int, default=256, help="tokens per window")
    parser.add_argument("--batch", type=int, default=16, help="windows per step")
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--max-files", type=int, help="read no more files than that (for a quick trial)")
    args = parser.parse_args()
    if args.out.exists() and any(args.out.iterdir()):
        parser.error(f"{args.out} is not empty; give a new directory")
    if not 256 < args.vocab_size <= 65536:
        parser.error(f"--vocab-size {args.vocab_size}: needs 257 to 65536, ids are stored as uint16")
    return args


def main() -> int:
    """Read, train, judge, save."""
    args = parse_args()
    files = text_files(args.text)
    training, held_out = read_texts(files[:: max(1, len(files) // args.max_files)] if args.max_files else files)
    print(f"{len(training)} texts to train on, {len(held_out)} held out", flush=True)
    tokenizer = train_tokenizer(training, args.vocab_size)
    ids, val_ids = tokenize(tokenizer, training), tokenize(tokenizer, held_out)
    print(f"{ids.size:,} tokens to train on, {val_ids.size:,} held out, vocabulary {len(tokenizer)}", flush=True)
    model = build_model(args, len(tokenizer))
    train(model, torch.from_numpy(ids.astype(numpy.int32)), args)
    model = model.to(torch.bfloat16)
    judged = torch.from_numpy(val_ids[:100_000].astype(numpy.int64))
    perplexity = quality({"model": model}, judged, window=args.length)["model"].perplexity
    print(f"held-out perplexity {perplexity:.3f}")

    args.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "eval.txt").write_text("\n\n".join(held_out), encoding="utf-8")
    numpy.save(args.out / "val_ids.npy", val_ids)
    (args.out / "README.md").write_text(describe(args, model, ids.size, perplexity), encoding="utf-8")
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
