"""Evaluation: perplexity, distance to the 16-bit model, speed of `generate`, memory.

Models are always measured together and in turns, batch by batch or generation by generation: a slow moment of the
machine then affects all of them.
"""

import math
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # comes with accelerate
import torch
import transformers
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers.generation.streamers import BaseStreamer

from hf_quant.kernels import native
from hf_quant.machine import cpu
from hf_quant.modules import STORED_NAMES, QuantizedModule, packed_key


MAX_LOGITS = 2**26  # of a batch; 256 MB in fp32


class Quality(NamedTuple):
    """Quality of a causal language model's predictions on a text."""

    perplexity: float  # exp of the mean negative log-likelihood of the next token
    num_tokens: int  # number of predictions
    kl: float | None = None  # mean Kullback-Leibler divergence per token from the reference model to this one, in nats
    agreement: float | None = None  # share of predictions whose most likely token the reference predicts, too


class Speed(NamedTuple):
    """Speed of `generate`."""

    prefill: float  # seconds from the call to the first token of each sequence (median)
    decode: float  # tokens per second of all sequences after the first token (from the median interval)


def read_ids(path: Path | str, tokenizer: Callable[[str], Any] | None = None) -> Tensor:
    """Read token ids [num_tokens] int64 from a .npy file of integers, or from a text file with the tokenizer.

    Raises ValueError if the file is neither.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file; needs a text file, or token ids as .npy")
    if path.suffix == ".npy":
        import numpy

        ids = numpy.load(path, allow_pickle=False)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"{path} holds {ids.dtype} {list(ids.shape)}; needs one dimension of integer token ids")
        return torch.from_numpy(ids.astype("int64"))
    if tokenizer is None:
        raise ValueError(f"the model has no tokenizer to read {path} with; give token ids as .npy")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file in UTF-8 ({error})") from None
    return torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64)


def read_windows(
    path: Path | str, tokenizer: Callable[..., Any] | None = None, *, window: int, max_tokens: int | None = None
) -> Tensor:
    """Read the token ids of a file for `quality(..., window=window)`: int64 [num_tokens], whole windows of them.

    Every window of a text file begins as the tokenizer begins a text. Many models expect that token, <bos>, there:
    without it the 16-bit model of Gemma 3 270M has twice the perplexity. Token ids (.npy) are cut as they are.

    Args:
        path: a text file, or token ids as .npy.
        tokenizer: of the model; not needed for .npy.
        window: tokens per window, its beginning included.
        max_tokens: how many tokens to return at most, beginnings included.

    Raises:
        ValueError: as `read_ids`, and if the text fills no window.
    """
    return cut_windows(
        read_ids(path, tokenizer),
        None if Path(path).suffix == ".npy" else tokenizer,
        window=window,
        max_tokens=max_tokens,
        source=str(path),
    )


def cut_windows(
    ids: Tensor,
    tokenizer: Callable[..., Any] | None,
    *,
    window: int,
    max_tokens: int | None = None,
    source: str = "the text",
) -> Tensor:
    """Cut token ids [num_tokens] into windows that each begin as the tokenizer, if given, begins a text.

    Returns int64 [windows * window], from the beginning. Raises ValueError if the text, `source` in the message, fills
    no window.
    """
    prefix = []
    if tokenizer is not None:
        begun, plain = (tokenizer("a", add_special_tokens=add)["input_ids"] for add in (True, False))
        starts = range(len(begun) - len(plain) + 1)  # the tokenizer may end a text, too
        prefix = begun[: next((i for i in starts if begun[i : i + len(plain)] == plain), 0)]
    if ids[: len(prefix)].tolist() == prefix:
        ids = ids[len(prefix) :]
    size = window - len(prefix)
    count = ids.numel() // max(size, 1)
    if max_tokens is not None:
        count = min(count, max_tokens // window)
    if count < 1 or size < 1:
        behind = f" behind the {len(prefix)} with which the tokenizer begins a text" if prefix else ""
        if size < 1:
            why = f"a window of {window} has no room{behind}: give a longer text, and a larger window"
        elif ids.numel() < size:
            why = f"a window of {window} takes {size}{behind}: give a longer text, or a smaller window (--window)"
        else:
            why = f"{max_tokens} are read, and a window takes {window}: read more (--max-tokens), or give a smaller "
            why += "window (--window)"
        raise ValueError(f"{source} has {ids.numel()} tokens; {why}")
    start = torch.tensor(prefix, dtype=torch.int64).expand(count, -1)
    return torch.cat([start, ids[: count * size].view(count, size)], 1).flatten()


def _stretches_positions(text: Any) -> bool:
    """True if a config has rotary embeddings of a kind that reaches beyond its number of positions."""
    rope = getattr(text, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # by type of layer
    return any(part.get("rope_type", "default") != "default" for part in parts)


@torch.no_grad()
def quality(
    models: dict[str, nn.Module], ids: Tensor, *, window: int, reference: str | None = None, progress: bool = False
) -> dict[str, Quality]:
    """Measure causal language models on a text, in windows that do not overlap.

    Args:
        models: {name: model}; each on any device.
        ids: token ids [num_tokens], int64.
        window: tokens per window; each gives window - 1 predictions. An incomplete last window is left out.
        reference: name of the model that `kl` and `agreement` compare with.
        progress: True shows a progress bar.

    Raises:
        ValueError: if a model is no causal language model, the ids do not fit it or fill no window, a window is longer
            than its positions, or its vocabulary is not that of the reference.
    """
    for name, model in models.items():
        check_causal(model, name)
        text = model.config.get_text_config()
        if ids.numel() and int(ids.max()) >= text.vocab_size:
            raise ValueError(
                f"token id {int(ids.max())} is not in the vocabulary of {name}, which has {text.vocab_size}"
            )
        longest = getattr(text, "max_position_embeddings", None)
        if longest and window > longest and not _stretches_positions(text):
            raise ValueError(
                f"a window of {window} tokens, but {name} has {longest} positions (max_position_embeddings), behind "
                f"which its predictions mean nothing: give a window of at most {longest}"
            )
        expected = text if reference is None else models[reference].config.get_text_config()
        if text.vocab_size != expected.vocab_size:
            raise ValueError(
                f"{name} has a vocabulary of {text.vocab_size}, and {reference} one of {expected.vocab_size}: the "
                "distance is taken to a model of the same tokens"
            )
    if window < 2 or ids.numel() < window:
        raise ValueError(f"{ids.numel()} tokens in windows of {window}; needs windows of at least 2, and one of them")
    windows = ids[: ids.numel() // window * window].view(-1, window)
    vocab = max(model.config.get_text_config().vocab_size for model in models.values())
    batches = windows.split(max(1, min(16, MAX_LOGITS // (window * vocab))))
    order = sorted(models, key=lambda name: name != reference)  # the reference first
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in models}
    for batch in tqdm(batches, desc="Evaluating", disable=not progress, leave=False):
        expected = None
        for name in order:
            model = models[name]
            logits = model(input_ids=batch.to(model.device), use_cache=False).logits[:, :-1].flatten(0, 1)
            if name == reference:
                expected = logits
            sums[name] += _token_sums(logits, batch[:, 1:].flatten(), expected)
    count = windows.shape[0] * (window - 1)
    found = {}
    for name, total in sums.items():
        nll, kl, agreement = (total / count).tolist()
        relative = (None, None) if reference is None else (max(kl, 0.0), agreement)
        found[name] = Quality(math.exp(min(nll, 700.0)), count, *relative)
    return found


def check_causal(model: nn.Module, name: str = "the model") -> None:
    """Raise ValueError unless the model predicts the next token of a text."""
    config = getattr(model, "config", None)
    if not getattr(model, "can_generate", lambda: False)() or getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is a {type(model).__name__}; needs a causal language model")


def _token_sums(logits: Tensor, targets: Tensor, expected: Tensor | None) -> Tensor:
    """Sum (negative log-likelihood, KL from `expected`, agreement with it) over tokens; fp64 [3] on the CPU."""
    sums = []
    # Temporaries of 8 MB stay in the cache and, on Linux, in the heap; larger ones are mapped and cleared each time.
    rows = max(1, 2**21 // logits.shape[-1])
    for start in range(0, logits.shape[0], rows):
        block = slice(start, start + rows)
        log_q = logits[block].float().log_softmax(-1)
        target = targets[block].to(log_q.device).unsqueeze(-1)
        found = [-log_q.gather(-1, target).sum(), log_q.new_zeros(()), log_q.new_zeros(())]
        if expected is not None:
            log_p = expected[block].to(log_q.device).float().log_softmax(-1)
            found[1] = (log_p.exp() * (log_p - log_q)).sum()
            found[2] = (log_p.argmax(-1) == log_q.argmax(-1)).sum().float()
        sums.append(torch.stack(found))
    return torch.stack(sums).cpu().double().sum(0)


def bits_per_weight(model: nn.Module) -> float | None:
    """Average bits of a quantized weight, scales and zero points included; None if nothing is quantized."""
    num_bytes, num_weights = {}, {}
    for module in model.modules():
        if not isinstance(module, QuantizedModule):
            continue
        for name in module.weight_names:
            parts = [module._parameters.get(packed_key(part, name)) for part in STORED_NAMES]
            num_weights[id(parts[0])] = math.prod(module.matrix_shape(name))  # tied modules share their codes
            num_bytes[id(parts[0])] = sum(part.nbytes for part in parts if part is not None)
    return 8 * sum(num_bytes.values()) / sum(num_weights.values()) if num_weights else None


def generation_speed(
    models: dict[str, nn.Module],
    *,
    prompt_tokens: int = 128,
    new_tokens: int = 32,
    rounds: int = 3,
    warm_up: int = 1,
    batch_size: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    progress: bool = False,
) -> dict[str, Speed]:
    """Time greedy `generate` on `batch_size` random prompts, the models in turns.

    `warm_up` generations of 2 tokens come first: CPU paths repack each weight when prefill and decode first use it.
    `clock` returns seconds: `time.perf_counter`, or `time.thread_time` (with one torch thread), which does not count
    the time in which another process had the core. Raises ValueError on fewer than 2 new tokens.
    """
    if new_tokens < 2 or rounds < 1 or prompt_tokens < 1 or batch_size < 1:
        raise ValueError(f"{prompt_tokens=}, {new_tokens=}, {rounds=}, {batch_size=}; needs at least 1, 2, 1 and 1")
    generator = torch.Generator().manual_seed(0)
    times: dict[str, list[list[float]]] = {name: [] for name in models}
    for name, model in models.items():
        check_causal(model, name)
    for round in tqdm(range(-warm_up, rounds), desc="Generating", disable=not progress, leave=False):
        for name, model in models.items():
            vocab = model.config.get_text_config().vocab_size
            prompt = torch.randint(0, vocab, (batch_size, prompt_tokens), generator=generator).to(model.device)
            count = 2 if round < 0 else new_tokens
            stamps = _Stamps(clock)
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                streamer=stamps,
                do_sample=False,
                eos_token_id=vocab,  # no token ends it; `min_new_tokens` would search the vocabulary at each
                max_new_tokens=count,
                pad_token_id=0,
            )
            if round >= 0:
                times[name].append(stamps.times)
    return {
        name: Speed(
            statistics.median(t[1] - t[0] for t in found),
            batch_size / statistics.median(b - a for t in found for a, b in zip(t[1:], t[2:])),
        )
        for name, found in times.items()
    }


class _Stamps(BaseStreamer):
    """Record the time at which `generate` begins (it passes the prompt first) and the time of each token."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.times = clock, [clock()]
        self.prompt_seen = False

    def put(self, value: Tensor) -> None:
        if self.prompt_seen:
            self.times.append(self.clock())  # the token is on the CPU, so its computation has ended
        self.prompt_seen = True

    def end(self) -> None:
        """Nothing to flush."""


def machine() -> str:
    """Describe the machine of a measurement in one line: versions, CPU, kernels, threads, GPUs, load average."""
    model, _ = cpu()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    threads = torch.get_num_threads()
    load = f", load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""  # Windows has none
    return (
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}; "
        f"{', '.join([model, *gpus])}; CPU kernels: {native.active() or 'torch'}; "
        f"{threads} thread{'s' if threads > 1 else ''}{load}"
    )


class PeakMemory:
    """Context that measures by how much the memory of the process, or of a CUDA device, grows inside it."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        # The highest resident size (pages of mapped files included) or CUDA allocation, minus its first value.
        self.nbytes = 0
        self._process = psutil.Process()
        self._done = threading.Event()

    def __enter__(self) -> "PeakMemory":
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            self._before = self._process.memory_info().rss
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.device.type == "cuda":
            self.nbytes = torch.cuda.max_memory_allocated(self.device) - self._before
        else:
            self._done.set()
            self._thread.join()

    def _watch(self) -> None:
        while True:
            last = self._done.wait(0.005)
            self.nbytes = max(self.nbytes, self._process.memory_info().rss - self._before)
            if last:
                return
