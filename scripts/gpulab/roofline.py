"""Modelled times of calls on an H200, by bytes, operations and launches; used by gpu_targets.py. Nothing is measured.

Each launch takes the longer of its bytes and its operations, and a fixed time. The rates are what public measurements
of such GPUs and of Triton's kernels reach, below the data sheet's; see RATES.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpulab.build import record_call
from gpulab.cases import gpu_ops, launcher
from gpulab.timing import Calls, Ceilings
from hf_quant.kernels.gpu.launch import TARGETS


BANDWIDTH = 4.3e12 * 0.9  # bytes a second: a copy of an H200, of which kernels of few tokens reach some 90 %
LAUNCH = 3e-6  # seconds of a launch inside of a graph: 2.5 to 3.5 us
# Operations a second, by kind of product. 8-bit products by Triton reach 1.1 to 1.3e15, attention some 60 % of 16 bit.
RATES = {"16bit": 790e12, "8bit": 1250e12, "attention": 560e12, "8-bit attention": 720e12}
CEILINGS = Ceilings(copy=BANDWIDTH / 1e9, gemm=RATES["16bit"] / 1e12)
_EIGHT_BITS = ("_scaled_mm", "_grouped_scaled", "_hopper_scaled")


class ModelTimer:
    """`Timer` that models calls on tensors without content instead of running them."""

    device = torch.device("meta")

    def __call__(self, variants: dict[str, Calls], *, rounds: int = 9) -> dict[str, float]:
        return {name: seconds(calls[0]) for name, calls in variants.items()}


def seconds(call: Any) -> float:
    """Model a `partial` of an op of hf_quant, or of a product or an attention of torch."""
    result = call()
    op = getattr(call.func, "__name__", "").split(".")[0]
    tensors = [value for value in (*call.args, *call.keywords.values()) if isinstance(value, Tensor)]
    if op not in gpu_ops():
        kind = "attention" if call.func is F.scaled_dot_product_attention else "16bit"
        moved = _bytes([*tensors, result], tensors[0].shape[0] if result.dim() == 2 else 1)
        return LAUNCH + max(moved / BANDWIDTH, _operations(op, call, result) / RATES[kind])
    launches, products = record_call(partial(launcher(op), *call.args, **call.keywords), TARGETS["sm90"])
    total, done = 0.0, set()
    for launch in launches:
        name = launch.kernel.fn.__name__
        values = (getattr(value, "base", value) for value in launch.args)  # of a tensor descriptor, too
        moved = _bytes((value for value in values if isinstance(value, Tensor)), tensors[0].shape[0])
        counts = name.startswith(
            ("_weight_only_mm", "_hopper", "_kv_decode", "_kv_prefill", "_int8_attention_kernel", "_grouped")
        )
        # Two launches of attention share its work: heads of one kind, and those of the other.
        part = "attention" if name.endswith("_attention_kernel") else name
        counts = (counts or name.startswith("_scaled_mm")) and part not in done
        done.add(part)
        work = _operations(op, call, result) if counts else 0
        kind = "8-bit attention" if "attention" in name else "8bit" if name.startswith(_EIGHT_BITS) else "16bit"
        total += LAUNCH + max(moved / BANDWIDTH, work / RATES[kind])
    for M, N, K, itemsize in products:
        moved = itemsize * (M * K + K * N + M * N)
        total += LAUNCH + max(moved / BANDWIDTH, 2 * M * N * K / RATES["16bit"])
    return total


def _bytes(tensors: Iterable[Tensor], rows: int) -> float:
    """Bytes of tensors, each once; of the weights [E, N, K] of experts, those that `rows` rows need."""
    unique = {(id(t.untyped_storage()), t.storage_offset(), t.shape): t for t in tensors}
    return sum(t.nbytes * (1 - (1 - 1 / t.shape[0]) ** rows if t.dim() == 3 else 1) for t in unique.values())


def _operations(op: str, call: Any, result: Any) -> float:
    """Multiplications and additions of a call."""
    first = call.args[0]
    if op == "kv_attention" or call.func is F.scaled_dot_product_attention or op == "int8_attention":
        causal = call.keywords.get("is_causal") and first.shape[2] > 1
        return 4 * first.numel() * call.args[1].shape[2] / (2 if causal else 1)
    return 2 * result.numel() * first.shape[-1]
