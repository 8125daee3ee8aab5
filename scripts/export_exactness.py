"""Weights that differ between a quantized model and its export for serving engines, in every scheme that has one.

    python scripts/export_exactness.py MODEL

MODEL is a directory or name of a causal language model. Exports are decoded by the tests' own decoder
(integration_tests/support/foreign_checkpoints.py), which is written from the format's description and shares no code
with the exporter. Exit status 1 if any weight differs.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM

from hf_quant import QuantizerConfig, export_compressed_tensors
from hf_quant.planning import format_table


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from integration_tests.support.foreign_checkpoints import (  # noqa: E402
    config_of,
    decode_compressed_checkpoint,
    mismatches,
    weights_of,
)


PRESETS = ("W4A16", "W4A16_ASYM", "W8A16", "W8A8", "W8A8_FP8", "W8A16_FP8", "FP8_BLOCK", "NVFP4A16", "MXFP4A16")
SCHEMES = {
    **{name: {"weights": name, "input_transform": "none"} for name in PRESETS},
    "W4A16, per row": {"weights": "int4", "granularity": "row"},
    "mixed": {"weights": "int4", "modules": {"*.mlp.*": "W8A8_FP8"}},
}


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="directory or name of a causal language model")
    args = parser.parse_args()
    rows, total = [("scheme", "format", "weights", "differ")], 0
    with tempfile.TemporaryDirectory() as work:
        for name, fields in SCHEMES.items():
            model = AutoModelForCausalLM.from_pretrained(args.model, quantization_config=QuantizerConfig(**fields))
            out = Path(work) / name
            export_compressed_tensors(model, out)
            wrong, count = mismatches(weights_of(model), decode_compressed_checkpoint(out, model.dtype))
            total += wrong
            rows.append((name, config_of(out)["quantization_config"]["format"], f"{count:,}", f"{wrong:,}"))
    print(format_table(rows))
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
