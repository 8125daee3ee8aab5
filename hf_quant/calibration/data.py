"""What a user gives to calibrate with, as batches that run through a model."""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_quant.evaluate import cut_windows, read_ids


NUM_TOKENS = 32768
LENGTH = 512
_BATCH_TOKENS = 4096


class Data(NamedTuple):
    """Data that is ready to run.

    Attributes:
        runs: makes an iterator over functions that each run the model on one batch.
        record: {"data": its name, ...}: what the config of the model keeps of it.
        num_runs: how many functions that are; None: it is not known.
    """

    runs: Callable[[], Iterator[Callable[[nn.Module], Any]]]
    record: dict[str, Any]
    num_runs: int | None = None


def prepare(data: Any, model: nn.Module, tokenizer: Any, num_tokens: int, length: int) -> Data:
    """Make batches of what `calibrate` is given.

    Raises ValueError if the data is empty, of an unknown kind, or needs a tokenizer that is not there.
    """
    if callable(data):
        return Data(lambda: iter([data]), {"data": getattr(data, "__name__", "a function")}, 1)
    if isinstance(data, (str, Path)):
        path = Path(data)
        is_text = path.suffix != ".npy"
        ids = read_ids(path, _needed(tokenizer, f"the text in {path}") if is_text else None)
        return of_ids(ids, path.name, tokenizer if is_text else None, num_tokens, length)
    if isinstance(data, Tensor):
        data = [data]
    if isinstance(data, Mapping):
        data = [data]
    if not isinstance(data, Iterable):
        raise ValueError(
            f"calibration data is a {type(data).__name__}; needs a file, texts, token ids, batches, or a function"
        )
    if iter(data) is data or isinstance(data, tuple):
        data = list(data)  # an iterator ends, and a layer may need another pass
    if isinstance(data, list):
        if not data:
            raise ValueError("calibration data is empty; needs a file, texts, token ids, batches, or a function")
        if all(isinstance(text, str) for text in data):
            return _of_texts(data, model, tokenizer, num_tokens, length)
        if all(isinstance(i, int) for i in data):
            data = [torch.tensor(data)]
        if all(_is_ids(ids) for ids in data) and hasattr(model, "config"):
            ids = torch.cat([torch.as_tensor(ids).flatten().long() for ids in data])
            return of_ids(ids, "token ids", None, num_tokens, length)
    return Data(lambda: _batches(data), {"data": "batches"}, len(data) if hasattr(data, "__len__") else None)


def of_ids(ids: Tensor, name: str, tokenizer: Any, num_tokens: int, length: int) -> Data:
    """Windows of token ids [any], spread over the text; each begins as the tokenizer, if given, begins a text."""
    window = max(min(length, num_tokens, ids.numel()), 1)
    rows = cut_windows(ids, tokenizer, window=window, source=name).view(-1, window)
    rows = rows[torch.linspace(0, len(rows) - 1, min(len(rows), max(num_tokens // window, 1))).long()]
    return of_rows(rows, name)


def of_rows(rows: Tensor, name: str) -> Data:
    """Sequences of token ids [sequences, length]."""
    batches = rows.split(max(1, _BATCH_TOKENS // rows.shape[1]))
    digest = hashlib.sha256(rows.numpy().tobytes()).hexdigest()
    record = {"data": name, "sha256": digest, "num_tokens": rows.numel(), "length": rows.shape[1]}
    return Data(lambda: _batches([{"input_ids": batch} for batch in batches]), record, len(batches))


def _of_texts(texts: list[str], model: nn.Module, tokenizer: Any, num_tokens: int, length: int) -> Data:
    tokenizer = _needed(tokenizer, "texts")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"a {type(model).__name__} reads two sequences: give batches with decoder_input_ids, or a function that "
            "calls model.generate"
        )
    name = f"{len(texts)} texts"
    if getattr(model, "can_generate", lambda: False)():
        end = [] if getattr(tokenizer, "eos_token_id", None) is None else [tokenizer.eos_token_id]
        ids = [i for text in texts for i in tokenizer(text, add_special_tokens=False)["input_ids"] + end]
        return of_ids(torch.tensor(ids, dtype=torch.int64), name, tokenizer, num_tokens, length)
    chosen, total = [], 0
    for text in texts:
        if total >= num_tokens:
            break
        chosen.append(text)
        total += len(tokenizer(text, truncation=True, max_length=length)["input_ids"])
    # Texts of similar lengths need less padding; what is padding is not counted.
    chosen.sort(key=len)
    size = max(1, _BATCH_TOKENS // length)
    options = {"padding": True, "truncation": True, "max_length": length, "return_tensors": "pt"}
    batches = [tokenizer(chosen[i : i + size], **options) for i in range(0, len(chosen), size)]
    digest = hashlib.sha256("\0".join(chosen).encode()).hexdigest()
    record = {"data": name, "sha256": digest, "num_tokens": total, "length": length}
    return Data(lambda: _batches(batches), record, len(batches))


def _needed(tokenizer: Any, what: str) -> Any:
    if tokenizer is None:
        raise ValueError(f"{what} cannot be read without a tokenizer: give tokenizer=, or token ids")
    return tokenizer


def _is_ids(ids: Any) -> bool:
    if isinstance(ids, Tensor):
        return ids.dim() in (1, 2) and not ids.is_floating_point()
    return isinstance(ids, list) and all(isinstance(i, int) for i in ids)


def _batches(data: Iterable[Any]) -> Iterator[Callable[[nn.Module], Any]]:
    for batch in data:
        yield lambda model, batch=batch: _run(model, batch)


def _run(model: nn.Module, batch: Any) -> Any:
    """Call the model with a batch: a mapping of keywords, a sequence of arguments, or one tensor."""
    device = next(model.parameters()).device
    if isinstance(batch, Mapping):
        accepted = inspect.signature(model.forward).parameters
        given = {name: _moved(value, device) for name, value in batch.items()}
        # Without the logits of all tokens and a cache the pass takes less memory.
        saving = {"use_cache": False, "logits_to_keep": 1}
        given = {
            **{name: value for name, value in saving.items() if name in accepted and "labels" not in given},
            **given,
        }
        return model(**given)
    if isinstance(batch, (list, tuple)):
        return model(*(_moved(value, device) for value in batch))
    return model(_moved(batch, device))


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) and device.type != "meta" else value
