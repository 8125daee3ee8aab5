"""Tokenizers in GGUF files: the fields `tokenizer.ggml.*`, as llama.cpp reads them.

llama.cpp knows how text is split before merges by name only (`tokenizer.ggml.pre`; src/llama-vocab.cpp has a regular
expression for each). A tokenizer with another split has no form in GGUF.
"""

import json
from pathlib import Path
from typing import Any

import transformers
from tokenizers import normalizers, pre_tokenizers

from hf_quant.checkpoint import one_line
from hf_quant.convert.gguf.files import Gguf


_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # gguf.TokenType
_GPT2, _DIGITS = "gpt-2", "digits"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# {(splits before merges, True if a word that is a token is taken whole): name in llama.cpp}
_SPLITS: dict[tuple[tuple[str, ...], bool], str] = {
    ((_GPT2,), False): "gpt-2",
    ((_DIGITS, _GPT2), False): "smollm",
    ((LLAMA3,), True): "llama-bpe",
    ((LLAMA3,), False): "dbrx",
    ((QWEN2,), False): "qwen2",
}
_SPACE = "\u2581"


def vocabulary(source: Path, size: int) -> dict[str, Any]:
    """Return {key: value} of the tokenizer in a directory, for a model with `size` tokens; {} if there is none.

    Raises ValueError if llama.cpp does not know its kind.
    """
    if not (source / "tokenizer.json").is_file() and not (source / "tokenizer_config.json").is_file():
        return {}
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source)
        stored = json.loads(tokenizer.backend_tokenizer.to_str())
    except Exception as error:  # noqa: BLE001  (each tokenizer has errors of its own)
        raise ValueError(f"its tokenizer cannot be read: {type(error).__name__}: {one_line(error)}") from None
    model = stored["model"]
    if model.get("type") != "BPE":
        raise ValueError(f"its tokenizer is of the kind {model.get('type')}; llama.cpp reads BPE of these models")
    tokens: list[str | None] = [None] * size
    for token, number in tokenizer.get_vocab().items():
        if number >= size:
            raise ValueError(f"its tokenizer has the token {number}, its model {size} tokens")
        tokens[number] = token
    added = {entry["id"]: _CONTROL if entry["special"] else _USER for entry in stored["added_tokens"]}
    pieces = bool(model.get("byte_fallback"))  # as sentencepiece writes text
    unknown = model["vocab"].get(model.get("unk_token"))
    fields: dict[str, Any] = {
        "model": "llama" if pieces else "gpt2",
        "pre": "default" if pieces else _split_of(stored),
        "tokens": [_spelled(token, i, added, pieces) for i, token in enumerate(tokens)],
        "token_type": [
            _UNUSED if token is None else _kind(token, i, added, unknown, pieces) for i, token in enumerate(tokens)
        ],
    }
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if pieces:
        fields["scores"] = _scores(fields["tokens"], merges)
        fields["add_space_prefix"] = _adds_space(stored)
    else:
        fields["merges"] = merges
    special = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    special |= {"unknown": tokenizer.unk_token_id, "padding": tokenizer.pad_token_id}
    fields |= {f"{name}_token_id": number for name, number in special.items() if number is not None}
    ids = tokenizer.encode("a")
    fields["add_bos_token"] = special["bos"] is not None and ids[:1] == [special["bos"]]
    fields["add_eos_token"] = special["eos"] is not None and ids[-1:] == [special["eos"]]
    found = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    template = tokenizer.chat_template
    return found if not isinstance(template, str) else found | {"tokenizer.chat_template": template}


def _spelled(token: str | None, number: int, added: dict[int, int], pieces: bool) -> str:
    """Return a token as the file has it: those that are found in the text before it is split have its spaces."""
    if token is None:
        return f"[PAD{number}]"
    return token.replace(_SPACE, " ") if pieces and added.get(number) == _USER else token


def _kind(token: str, number: int, added: dict[int, int], unknown: int | None, pieces: bool) -> int:
    if number == unknown:
        return _UNKNOWN
    if number in added:
        return added[number]
    is_byte = pieces and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return _BYTE if is_byte else _NORMAL


def _split_of(stored: dict[str, Any]) -> str:
    """Return llama.cpp's name of the splits before merges. Raises ValueError if it has none."""
    normalizer = (stored["normalizer"] or {}).get("type")
    if normalizer not in (None, "NFC"):  # llama.cpp takes text as it is
        raise ValueError(f"its tokenizer has a normalizer ({normalizer}), which llama.cpp does not compute")
    found = tuple(_splits(stored["pre_tokenizer"]))
    name = _SPLITS.get((found, bool(stored["model"].get("ignore_merges"))))
    if name is None:
        raise ValueError(
            f"its tokenizer splits text by {found}, which has no name among {', '.join(_SPLITS.values())} of "
            "llama.cpp; without tokenizer files the model is written without a vocabulary"
        )
    return name


def _splits(stored: dict[str, Any] | None) -> list[str]:
    """Return the splits of a pre-tokenizer: regular expressions, _GPT2, _DIGITS."""
    kind = None if stored is None else stored["type"]
    if stored is None:
        return ["none"]
    if kind == "Sequence":
        return [part for inner in stored["pretokenizers"] for part in _splits(inner)]
    if kind == "ByteLevel" and not stored["add_prefix_space"]:
        return [_GPT2] if stored.get("use_regex", True) else []
    if kind == "Digits" and stored["individual_digits"]:
        return [_DIGITS]
    if kind == "Split" and stored["behavior"] == "Isolated" and not stored["invert"] and "Regex" in stored["pattern"]:
        return [stored["pattern"]["Regex"]]
    return [json.dumps(stored)[:200]]


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Return a score for each token: the earlier it is merged, the higher; as sentencepiece has them."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _adds_space(stored: dict[str, Any]) -> bool:
    """Return True if a space is put before the text. Raises ValueError if anything else is done to it."""
    adds = False
    for part in (*_parts(stored["normalizer"], "normalizers"), *_parts(stored["pre_tokenizer"], "pretokenizers")):
        kind = part["type"]
        is_space = part.get("pattern") == {"String": " "}  # Split: there is none left where spaces are replaced
        if (kind == "Prepend" and part["prepend"] == _SPACE) or kind == "Metaspace":
            adds = adds or part.get("prepend_scheme") != "never"
        elif not (is_space and (kind == "Split" or (kind == "Replace" and part["content"] == _SPACE))):
            raise ValueError(f"its tokenizer does {json.dumps(part)[:200]} to text, which llama.cpp does not compute")
    return adds


def _parts(stored: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer."""
    if stored is None:
        return []
    return stored[name] if stored["type"] == "Sequence" else [stored]


def save_tokenizer(file: Gguf, target: Path) -> list[str]:
    """Write the tokenizer of a GGUF file into a directory, as transformers makes it; return what is missing."""
    kind, name = file.value("tokenizer.ggml.model"), file.value("tokenizer.ggml.pre", "default")
    if kind in (None, "none", "no_vocab"):
        return ["the file holds no tokenizer"]
    if kind == "gpt2" and name not in _known_splits():
        return [f"the tokenizer is left out: transformers has no split of the name {name!r}; take the base model's"]
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name)
    except Exception as error:  # noqa: BLE001  (the host has a different one for each field that cannot be)
        return [f"the tokenizer is left out: transformers cannot make it: {type(error).__name__}: {one_line(error)}"]
    backend = tokenizer.backend_tokenizer
    if name == "smollm":
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    if name == "llama-bpe":
        backend.model.ignore_merges = True
    if kind == "llama" and file.architecture not in ("gemma3", "phi3"):  # which transformers knows
        # As llama.cpp: a space before the text, and before what follows a special token.
        steps = [normalizers.Prepend(_SPACE)] if file.value("tokenizer.ggml.add_space_prefix", True) else []
        backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
        backend.pre_tokenizer = None
    tokenizer.save_pretrained(target)
    return []


def _known_splits() -> set[str]:
    """Return the names for which transformers, or this file, splits as llama.cpp does."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as known
    except ImportError:  # of releases that split all text alike
        known = ()
    return {"default", "gpt-2", "smollm", *known}
