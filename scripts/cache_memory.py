"""Memory of a model's KV cache, by format and length: the table in docs/kv_cache.md.

    python scripts/cache_memory.py                                     # the models of the table
    python scripts/cache_memory.py --config DIRECTORY_OR_NAME --batch 8 --context 8192 32768
    python scripts/cache_memory.py --readme                            # write it into docs/kv_cache.md

Exact: the bytes of codes, scales and offsets. Not in it are layers with sliding windows or linear attention, which do
not grow, and the first and last tokens that int2 keeps in 16 bit.
"""

import argparse
from typing import Any

from transformers import AutoConfig, LlamaConfig, Qwen3MoeConfig

from common.pages import markdown, write_section
from hf_quant import KVCacheConfig
from hf_quant.kv_cache import bytes_per_token
from hf_quant.planning import format_table


SECTION = "cache memory table"
FORMATS = (None, "int8", "int4", "int2")
CONTEXTS = (8192, 32768, 131072)


def models() -> dict[str, Any]:
    """Configs of the table, as far as their cache goes."""
    heads = {"num_key_value_heads": 8, "head_dim": 128}
    return {
        "Llama 3.1 8B": LlamaConfig(num_hidden_layers=32, num_attention_heads=32, hidden_size=4096, **heads),
        "Llama 3.1 70B": LlamaConfig(num_hidden_layers=80, num_attention_heads=64, hidden_size=8192, **heads),
        "Qwen3 30B A3B": Qwen3MoeConfig(num_hidden_layers=48, num_key_value_heads=4, head_dim=128),
    }


def rows_of(configs: dict[str, Any], contexts: list[int], batch: int) -> list[tuple[str, ...]]:
    """The table: a row for each model and length."""
    rows = [("model", "tokens", "16 bit", *(f for f in FORMATS if f is not None))]
    for name, config in configs.items():
        for context in contexts:
            sizes = (
                bytes_per_token(config, None if f is None else KVCacheConfig(f)) * context * batch for f in FORMATS
            )
            rows.append((name, f"{context:,}", *(f"{size / 1e9:.2f} GB" for size in sizes)))
    return rows


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", help="directory or name of a model; only its config is read")
    parser.add_argument("--context", type=int, nargs="+", default=CONTEXTS, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--readme", action="store_true", help="write the table into docs/kv_cache.md")
    args = parser.parse_args()
    configs = models() if args.config is None else {args.config: AutoConfig.from_pretrained(args.config)}
    rows = rows_of(configs, args.context, args.batch)
    print(format_table(rows))
    if args.readme:
        write_section(SECTION, markdown(rows_of(models(), CONTEXTS, 1)))


if __name__ == "__main__":
    main()
