"""Sections in the card of an export: how engines serve it, and how to import it again."""

import json
from typing import NamedTuple

from hf_quant.cards.source import CardSource
from hf_quant.cards.text import Markdown, code, size
from hf_quant.cards.usage import PLACEHOLDER, auto_class, usage
from hf_quant.kv_cache import KVCacheConfig


# {engine: (release whose loading code was read, command)}.
_ENGINES = {
    "vLLM": ("vLLM 0.33", "vllm serve {}"),
    "SGLang": ("SGLang 0.5.23", "python -m sglang.launch_server --model-path {}"),
    "llama.cpp": ("llama.cpp", "llama-server -hf {}"),
    "Ollama": ("Ollama", "ollama run hf.co/{}"),
}
# The schemes and the engine of `make engines` (constraints-engines.txt).
_RUN = "exports of a small Llama in W4A16, W4A16_ASYM, W8A8 and W8A8_FP8 were run in vLLM 0.32.0, on a CPU"
# vLLM computes a scale for every token and head of its cache, too
# (https://github.com/vllm-project/vllm/blob/main/vllm/config/cache.py: CacheDType).
KV_CACHE_OPTIONS = {
    name: f"--kv-cache-dtype {name.removesuffix('_e4m3')}_per_token_head" for name in ("int8", "fp8_e4m3", "int4")
}

_CONTAINERS = {"compressed-tensors": "the format of compressed-tensors", "gguf": "GGUF"}  # {tag: words}

# Auto classes of models that engines serve; they have few other models.
_SERVED = {"AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSpeechSeq2Seq"}


class Export(NamedTuple):
    """The format and the readers of an exported checkpoint."""

    formats: tuple[str, ...]  # storage formats of compressed-tensors, or types of GGUF
    reader: str  # argument of `export_compressed_tensors`, or "gguf"
    engines: tuple[str, ...]  # keys of _ENGINES that serve it
    file: str = ""  # of GGUF: its name
    nbytes: int = 0  # of GGUF: of its tensors

    @property
    def container(self) -> str:
        """The format of the file, as a tag of the Hub."""
        return "gguf" if self.reader == "gguf" else "compressed-tensors"


def tags(source: CardSource, export: Export, tags: list[str]) -> list[str]:
    """Return the tags for the Hub, made from the tags of the checkpoint that was exported."""
    kept = [tag for tag in tags if tag != "hf_quant"]
    return [export.container, *kept, *map(str.lower, _serving(source, export))]


def _serving(source: CardSource, export: Export) -> tuple[str, ...]:
    """Return the engines whose commands a card names."""
    return export.engines if auto_class(source) in _SERVED else ()


def sections(source: CardSource, export: Export, repo_id: str | None, task: str | None) -> dict[str, Markdown | None]:
    """Return the values of `card.jinja` that only cards of exports have, or that differ in them."""
    name = repo_id or PLACEHOLDER
    commands = "\n".join(_ENGINES[engine][1].format(name) for engine in _serving(source, export))
    return {
        "serve": Markdown(commands) if commands else None,
        "served": _served(source, export),
        "install": Markdown(_install(name, export)),
        "usage": Markdown(usage(source, "OUT", None, task)),
        "container": Markdown(f"in {_CONTAINERS[export.container]} ({', '.join(map(code, export.formats))})"),
    }


def _install(name: str, export: Export) -> str:
    """Return the commands that import an export again."""
    if export.container != "gguf":
        return f"pip install hf-quant\nhf-quant import {name} OUT"
    return f"pip install 'hf-quant[gguf]'\nhf-quant import {name}/{export.file} OUT"


def _served(source: CardSource, export: Export) -> Markdown:
    if export.container == "gguf":
        return Markdown(f"The file has {size(export.nbytes)} of tensors. No engine was run on it when it was written.")
    text = "transformers reads it where compressed-tensors is installed, and decodes it to 16 bit."
    if export.reader == "engines":
        releases = " and ".join(_ENGINES[engine][0] for engine in export.engines)
        text = f"Written for the loaders of {releases}; no engine was run on it when it was written; {_RUN}."
        if not _serving(source, export):
            text += " Whether they have this architecture is in their documentation."
    config = source.parts[0].config
    if config.kv_cache is not None:
        format = KVCacheConfig.of(config.kv_cache).format
        if export.reader == "engines" and config.has_fp8_cache and config.kv_scales is not None:
            text += " It holds calibrated scales for a KV cache in fp8: `--kv-cache-dtype fp8` uses them."
            return Markdown(text)
        text += f" The {format} KV cache of the checkpoint that was exported is no part of this format"
        option = KV_CACHE_OPTIONS.get(format) if "vLLM" in export.engines else None
        text += "." if option is None else f"; vLLM keeps keys and values in {format} with {code(option)}."
    return Markdown(text)


def reproduce(command: tuple[str, str], export: Export) -> tuple[str, str]:
    """Return (language, text) of the snippet that makes this export, from the snippet that makes its source."""
    language, text = command
    if export.container == "gguf":
        if language == "sh":
            return language, f"{text}\nhf-quant export OUT EXPORTED --format gguf"
        lines = text.replace(
            "from hf_quant import QuantizerConfig", "from hf_quant import QuantizerConfig, export_gguf"
        )
        return language, f'{lines}\nexport_gguf("OUT", "EXPORTED")'
    reader = "" if export.reader == "engines" else f" --reader {export.reader}"
    if language == "sh":
        return language, f"{text}\nhf-quant export OUT EXPORTED{reader}"
    argument = "" if export.reader == "engines" else f", reader={json.dumps(export.reader)}"
    lines = text.replace(
        "from hf_quant import QuantizerConfig", "from hf_quant import QuantizerConfig, export_compressed_tensors"
    )
    return language, f'{lines}\nexport_compressed_tensors("OUT", "EXPORTED"{argument})'
