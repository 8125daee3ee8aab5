"""Data to calibrate with, in any of the forms that a user has it in, as batches that run through a model."""

import hashlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset

from hf_quant.calibration.observe import is_encoder_decoder
from hf_quant.evaluate import cut_windows, read_ids


NUM_TOKENS = 32768
LENGTH = 512
OWN_LENGTH = 256  # of sequences that a model writes itself
_BATCH_TOKENS = 4096
Run = Callable[[nn.Module], Any]


class Data(NamedTuple):
    """Data that is ready to run.

    Attributes:
        runs: makes an iterator over functions that each run the model on one batch; True computes the logits of all
            tokens, which only an output layer that is observed needs.
        record: {"data": its name, ...}: what the config of the model keeps of it.
        num_runs: how many functions that are; None: it is not known.
    """

    runs: Callable[[bool], Iterator[Run]]
    record: dict[str, Any]
    num_runs: int | None = None


def prepare(data: Any, model: nn.Module, tokenizer: Any, num_tokens: int, length: int) -> Data:
    """Make batches of what `calibrate` is given.

    Raises ValueError if the data is empty, of an unknown kind, or needs a tokenizer that is not there.
    """
    if callable(data):
        return Data(partial(_once, data), {"data": getattr(data, "__name__", type(data).__name__)}, 1)
    if isinstance(data, (str, Path)):
        path = Path(data)
        if isinstance(data, str) and not os.path.isfile(data):
            raise ValueError(
                f"{data[:200]!r} is not a file; needs a text file, token ids as .npy, or a text "
                'itself in a list: ["a text"]'
            )
        tokenizer = None if path.suffix == ".npy" else _needed(tokenizer, f"the text in {path}")
        return _windows(read_ids(path, tokenizer), model, path.name, tokenizer, num_tokens, length)
    data = _tensor(data) if _is_array(data) else data
    if isinstance(data, (Tensor, Mapping)):
        data = [data] if len(data) else []
    if isinstance(data, Dataset) and not isinstance(data, Iterable):
        data = DataLoader(data, batch_size=None)  # which reads them one by one
    if not isinstance(data, Iterable):
        raise ValueError(
            f"calibration data is a {type(data).__name__}; needs a file, texts, token ids, batches, or a function"
        )
    if iter(data) is data or isinstance(data, tuple):
        data = list(data)  # an iterator ends, and layers may need another pass
    if isinstance(data, list):
        if not data:
            raise ValueError("calibration data is empty; needs a file, texts, token ids, batches, or a function")
        if all(isinstance(text, str) for text in data):
            return _texts(data, model, _needed(tokenizer, "texts"), num_tokens, length)
        if isinstance(data[0], int):
            data = [torch.tensor(data)]
        data = [_tensor(part) if _is_array(part) else part for part in data]
        if all(map(_is_ids, data)) and hasattr(model, "config"):
            return _sequences(data, model, num_tokens, length)
    num_runs = len(data) if isinstance(data, Sized) else None
    return Data(partial(_runs, data, num_tokens), {"data": "batches"}, num_runs)


def default_length(model: nn.Module, tokenizer: Any, length: int) -> int:
    """Return `length`, or fewer tokens if the model has fewer positions, or the tokenizer names a smaller limit."""
    limits = [getattr(_text_config(model), "max_position_embeddings", None)]
    limits.append(getattr(tokenizer, "model_max_length", None))
    return min([length, *(limit for limit in limits if isinstance(limit, int) and limit > 1)])  # XLNet's is -1


def of_rows(rows: Tensor, model: nn.Module, name: str) -> Data:
    """Token ids [sequences, length]. Raises ValueError if one is not in the vocabulary of the model."""
    if int(rows.min()) < 0:
        raise ValueError(
            f"the calibration data has token {int(rows.min())}, which is none: give ids as the tokenizer makes them, "
            "not labels, and padded sequences as dicts with an attention_mask"
        )
    vocabulary = getattr(_text_config(model), "vocab_size", None)
    if vocabulary is not None and int(rows.max()) >= vocabulary:
        raise ValueError(
            f"the calibration data has token {int(rows.max())}, the vocabulary of the model {vocabulary}: give the "
            "model's own tokenizer, or ids that it made"
        )
    batches = [{"input_ids": batch} for batch in rows.split(max(1, _BATCH_TOKENS // rows.shape[1]))]
    digest = hashlib.sha256(rows.contiguous().numpy().tobytes()).hexdigest()
    record = {"data": name[:200], "sha256": digest, "num_tokens": rows.numel(), "length": rows.shape[1]}
    return Data(partial(_runs, batches, None), record, len(batches))


def _windows(ids: Tensor, model: nn.Module, name: str, tokenizer: Any, num_tokens: int, length: int) -> Data:
    """Windows of a text [any], spread over it; each begins as the tokenizer, if given, begins a text."""
    window = min(length, num_tokens, ids.numel())
    if not window:
        raise ValueError(f"{name}: calibration data is empty; needs a text, or token ids")
    rows = cut_windows(ids, tokenizer, window=window, source=name).view(-1, window)
    chosen = torch.linspace(0, len(rows) - 1, min(len(rows), max(num_tokens // window, 1)), dtype=torch.float32).long()
    return of_rows(rows[chosen], model, name)


def _sequences(data: list[Any], model: nn.Module, num_tokens: int, length: int) -> Data:
    """Sequences of token ids as they are, each cut to the length; a tensor may hold several."""
    rows = [row[:length] for ids in data for row in torch.atleast_2d(torch.as_tensor(ids)).long().cpu()]
    size = len(rows[0])
    if not all(map(len, rows)):
        raise ValueError("calibration data has a sequence of no tokens: leave it out")
    if len(rows) == 1 and rows[0].numel() < torch.as_tensor(data[0]).numel():  # one long text
        return _windows(torch.as_tensor(data[0]).long().cpu(), model, "token ids", None, num_tokens, length)
    if all(len(row) == size for row in rows):
        return of_rows(torch.stack(rows)[: max(1, num_tokens // size)], model, "token ids")
    batches = [{"input_ids": row[None]} for row in rows]
    record = of_rows(torch.cat(rows)[None], model, "token ids").record
    return Data(partial(_runs, batches, num_tokens), record, len(batches))


def _texts(texts: list[str], model: nn.Module, tokenizer: Any, num_tokens: int, length: int) -> Data:
    """Texts: for a causal language model one behind the other, else each on its own, padded."""
    name = f"{len(texts)} texts"
    if is_encoder_decoder(model):
        raise ValueError(_two_sequences(model))
    if getattr(model, "can_generate", lambda: False)():
        eos = getattr(tokenizer, "eos_token_id", None)
        ids: list[int] = []
        for text in texts:
            ids += tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += [] if eos is None else [eos]
        return _windows(torch.tensor(ids, dtype=torch.int64), model, name, tokenizer, num_tokens, length)
    sizes = [len(tokenizer(text, truncation=True, max_length=length)["input_ids"]) for text in texts]
    totals = torch.tensor(sizes).cumsum(0)
    count = max(1, int((totals <= num_tokens).sum()))
    chosen = sorted(texts[:count], key=len)  # texts of similar lengths need little padding
    options = {"padding": True, "truncation": True, "max_length": length, "return_tensors": "pt"}
    size = max(1, _BATCH_TOKENS // length)
    batches = [tokenizer(chosen[i : i + size], **options) for i in range(0, count, size)]
    digest = hashlib.sha256("\0".join(chosen).encode()).hexdigest()
    record = {"data": name, "sha256": digest, "num_tokens": int(totals[count - 1]), "length": length}
    return Data(partial(_runs, batches, None), record, len(batches))


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _two_sequences(model: nn.Module) -> str:
    return (
        f"a {type(model).__name__} reads two sequences: give batches with decoder_input_ids, or a function that calls "
        "model.generate"
    )


def _needed(tokenizer: Any, what: str) -> Any:
    if tokenizer is None:
        raise ValueError(f"{what} cannot be read without a tokenizer: give tokenizer=, or token ids")
    return tokenizer


def _is_ids(ids: Any) -> bool:
    if isinstance(ids, Tensor):
        return ids.dim() in (1, 2) and not ids.is_floating_point()
    return isinstance(ids, list) and all(isinstance(i, int) for i in ids)


def _once(run: Run, all_logits: bool) -> Iterator[Run]:
    yield run


def _runs(data: Iterable[Any], num_tokens: int | None, all_logits: bool) -> Iterator[Run]:
    """Functions that run the model on one batch each, until so many tokens are read."""
    count = 0
    for given in data:
        if num_tokens is not None and count >= num_tokens:
            return
        batch = _as_batch(given) if isinstance(given, Mapping) else given
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        count += ids.numel() if isinstance(ids, Tensor) else 0
        yield partial(_run, batch, all_logits)


def _as_batch(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Make a batch of tensors of a tokenizer's lists, or of a row of a dataset without its texts; keep a batch.

    Ids beside lists of tensors are arguments of a model that packs sequences into one (Cosmos 3): they are kept, too.
    """
    ids = given.get("input_ids")
    if ids is None or (isinstance(ids, Tensor) and (ids.dim() != 1 or any(map(_is_tensors, given.values())))):
        return given
    found = {name: _tensor(value, name) for name, value in given.items() if not isinstance(value, str)}
    if found["input_ids"].dim() > 1:
        return found
    return {name: value[None] if isinstance(value, Tensor) else value for name, value in found.items()}


def _is_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(part, Tensor) for part in value)


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy"  # which need not be installed


def _tensor(value: Any, name: str = "token ids") -> Any:
    """Numbers, lists of them and arrays as tensors; anything else as it is."""
    if not (_is_array(value) or isinstance(value, (int, float, list))):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"calibration data has {name} that are no rows of numbers of one length ({error}): pad them, or give each "
            "row by itself"
        ) from error


def _run(batch: Any, all_logits: bool, model: nn.Module) -> Any:
    """Call the model with a batch: a mapping of keywords, a sequence of arguments, or one tensor."""
    device = next(model.parameters()).device
    if isinstance(batch, Mapping):
        given = {name: _moved(value, device) for name, value in batch.items()}
        accepted = inspect.signature(model.forward).parameters
        if "use_cache" in accepted:
            given.setdefault("use_cache", False)
        if "logits_to_keep" in accepted and not all_logits and "labels" not in given:
            given.setdefault("logits_to_keep", 1)
        try:
            return model(**given)
        except ValueError as error:  # some, such as BART, make the second sequence of the first
            if not is_encoder_decoder(model) or any(name == "labels" or name.startswith("decoder_") for name in given):
                raise
            raise ValueError(_two_sequences(model)) from error
    if isinstance(batch, (list, tuple)):
        return model(*(_moved(value, device) for value in batch))
    return model(_moved(batch, device))


def _moved(value: Any, device: torch.device) -> Any:
    """The value, or the lists and dicts that it is made of, with tensors on a device."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device)

    return tree_map_only(Tensor, moved, value)
