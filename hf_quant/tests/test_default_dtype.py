"""The default dtype of torch is the user's: results have the same bits whatever it is."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from hf_quant import QuantizerConfig, convert_qat_, prepare_qat_, prepare_training_, quantize_
from hf_quant.optim import AdamW4bit, AdamW8bit
from hf_quant.tests.calibration.test_observe import IDS, llama


SCHEMES = ("int8", "int4", "int3", "int2", "nf4", "fp8", "fp6_e3m2", "mxfp4", "nvfp4", "W4A8", "W8A8", "W4A16_ASYM")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def tensors(model: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        return [*model.state_dict().values(), model(IDS).logits]


def quantized(model: nn.Module, config: QuantizerConfig, **options) -> list[Tensor]:
    quantize_(model, config, **options)
    prompt = {"input_ids": IDS[:2], "attention_mask": torch.ones_like(IDS[:2])}
    return [*tensors(model), model.generate(**prompt, max_new_tokens=4, do_sample=False)]


def trained(model: nn.Module, optimizer: type, **options) -> list[Tensor]:
    optimizer = optimizer(model.parameters(), **options)
    for _ in range(2):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return tensors(model)


def finetuned(model: nn.Module) -> list[Tensor]:
    prepare_qat_(model, "W4A8")
    return [*trained(model, torch.optim.SGD, lr=0.1), *tensors(convert_qat_(model))]


def low_bit(model: nn.Module, recipe: str, optimizer: type) -> list[Tensor]:
    prepare_training_(model, recipe, min_size=0)
    return trained(model, optimizer)


FLOWS = {scheme: lambda model, scheme=scheme: quantized(model, QuantizerConfig(scheme)) for scheme in SCHEMES}
FLOWS |= {
    f"{cache} cache": lambda model, cache=cache: quantized(model, QuantizerConfig("W4A8", kv_cache=cache))
    for cache in ("int8", "fp8", "int4", "int2")
}
FLOWS |= {
    "gptq": lambda model: quantized(model, QuantizerConfig("nf4", algorithm="gptq"), calibration=IDS),
    "static": lambda model: quantized(model, QuantizerConfig("W8A8", activation_scale="static"), calibration=IDS),
    "embedding": lambda model: quantized(model, QuantizerConfig("int4", modules={"model.embed_tokens": "int8"})),
    "qat": finetuned,
    "int8 training": lambda model: low_bit(model, "int8", AdamW8bit),
    "fp8 training": lambda model: low_bit(model, "fp8_row", AdamW4bit),
    "int8 weights": lambda model: low_bit(model, "int8_weights", AdamW8bit),
}


@pytest.mark.parametrize("flow", FLOWS)
def test_results_do_not_depend_on_the_default_dtype(flow):
    model, found = llama().bfloat16(), []
    for dtype in (torch.float32, torch.bfloat16):
        with default_dtype(dtype):
            torch.manual_seed(0)
            found.append(FLOWS[flow](copy.deepcopy(model)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
