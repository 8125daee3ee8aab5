"""The hand-packed layers of test_importing_libraries.py mean what the libraries themselves decode, where installed."""

import json

import pytest
import torch

from integration_tests.support import packed_libraries as packed


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_decodes_nf4_alike(nested):
    functional = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes").functional
    parts, meant = packed.bnb_nf4(nested=nested)(64, 192, torch.bfloat16, 0)
    stats = {name: part for name, part in parts.items() if name != "weight"}
    state = functional.QuantState.from_dict(dict(stats), torch.device("cpu"))
    if nested:
        assert torch.equal(functional.dequantize_4bit(parts["weight"], state), meant)
    else:
        assert torch.equal(functional.dequantize_4bit(parts["weight"], state), meant)
    written = functional.quantize_4bit(meant, quant_type="nf4", compress_statistics=nested, blocksize=64)[1]
    own = json.loads(bytes(written.as_dict(packed=True)["quant_state.bitsandbytes__nf4"].tolist()))
    mine = json.loads(bytes(stats["weight.quant_state.bitsandbytes__nf4"].tolist()))
    assert own.keys() == mine.keys()


def test_bitsandbytes_decodes_int8_alike():
    functional = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes").functional
    parts, meant = packed.bnb_int8(64, 192, torch.float16, 0)
    assert torch.equal(functional.int8_vectorwise_dequant(parts["weight"], parts["SCB"]).half(), meant)
