"""Attention "sdpa" of quantized models on CPUs: a native kernel, where it computes that and is faster."""

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, DynamicCache, PreTrainedModel, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_quant import dequantize_, fuse_activations_, quantize_, unfuse_activations_
from hf_quant.kv_cache import NATIVE_SDPA, _interface
from hf_quant.testing import assert_close
from hf_quant.tests.integrations import test_plain_caches
from hf_quant.tests.integrations.test_fused_blocks import needs_native, prompt


pytestmark = needs_native
SMALL = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 192}
SMALL |= {"num_hidden_layers": 2, "num_attention_heads": 4}
IDS, PADDED = prompt(2, 24), torch.ones(2, 24).long()
PADDED[0, 15:] = 0
PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SPEECH = torch.randn(1, 8, 48, generator=torch.Generator().manual_seed(0))
SOUND = torch.randn(2, 400, generator=torch.Generator().manual_seed(0))
HEARER = {**SMALL, "conv_dim": (64,), "conv_kernel": (8,), "conv_stride": (8,), "num_feat_extract_layers": 1}
HEARER |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
IMAGES = {**SMALL, "image_size": 32, "patch_size": 8}
SPEAKER = {"vocab_size": 96, "d_model": 128, "num_mel_bins": 8, "max_source_positions": 24, "pad_token_id": 0}
SPEAKER |= {f"{part}_{field}": n for part in ("encoder", "decoder") for field, n in (("layers", 2), ("ffn_dim", 192))}
SPEAKER |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
# {model type: (fields, inputs, calls of the kernel in bf16, in fp32)}; the kernel is not faster in fp32 without order.
MODELS = {
    "bert": (SMALL, {"input_ids": IDS, "attention_mask": PADDED}, 2, 0),
    "vit": (IMAGES, {"pixel_values": PIXELS}, 2, 0),
    "siglip_vision_model": ({**IMAGES, "hidden_size": 144, "num_attention_heads": 2}, {"pixel_values": PIXELS}, 2, 0),
    "clip_text_model": (SMALL, {"input_ids": IDS}, 2, 2),
    "llama": ({**SMALL, "num_key_value_heads": 2}, {"input_ids": IDS}, 0, 0),  # its blocks call the kernel themselves
    "whisper": (SPEAKER, {"input_features": SPEECH, "decoder_input_ids": IDS[:1]}, 6, 2),
    "hubert": (HEARER, {"input_values": SOUND}, 2, 0),  # which hands on `return_dict`
    "t5": ({"vocab_size": 96, "d_model": 128, "num_layers": 2}, {"input_ids": IDS, "decoder_input_ids": IDS}, 0, 0),
}


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of the queries of all calls of the kernel by "sdpa"."""
    found, real = [], _interface.attention_of_values

    def attend(q: Tensor, *args, **how) -> Tensor | None:
        y = real(q, *args, **how)
        found.extend([] if y is None else [tuple(q.shape)])
        return y

    monkeypatch.setattr(_interface, "attention_of_values", attend)
    monkeypatch.setattr(_interface, "is_fast_in_prompts", lambda dtype: True)  # with AMX, too
    return found


def make(kind: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(kind, **MODELS[kind][0]), dtype=dtype).eval()
    return quantize_(model, "int8")


def run(model: nn.Module, kind: str) -> Tensor:
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    given = {name: x.to(dtype) if x.is_floating_point() else x for name, x in MODELS[kind][1].items()}
    y = model(**given).last_hidden_state
    return y[given["attention_mask"].bool()] if "attention_mask" in given else y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_results_are_those_of_torch(calls, kind, dtype):
    model, expected_calls = make(kind, dtype), MODELS[kind][2 if dtype == torch.bfloat16 else 3]
    with torch.no_grad():
        ours = run(model, kind)
        assert len(calls) == expected_calls
        theirs = run(unfuse_activations_(model), kind)
    assert len(calls) == expected_calls
    assert_close(ours, theirs, rms=2e-2 if dtype == torch.bfloat16 else 1e-4)


def test_a_prompt_is_one_call(calls, parts):
    """All layers are in it, from the second prompt on, and with the usual cache."""
    model = test_plain_caches.make("llama")
    with torch.no_grad():
        for _ in range(4):
            parts.clear()
            model(IDS, past_key_values=DynamicCache(config=model.config))
    assert parts == [2] and calls == []


def test_torch_computes_what_the_kernel_does_not(calls):
    model = make("bert")
    with torch.no_grad():
        run(model, "bert")
        assert len(calls) == 2
        calls.clear()
        with torch.autocast("cpu", torch.bfloat16):
            run(model, "bert")
        run(model.train(), "bert")  # dropout
    model.eval()(inputs_embeds=torch.randn(1, 5, 128, dtype=torch.bfloat16, requires_grad=True))
    assert calls == []
    model.requires_grad_(False)(IDS)
    assert len(calls) == 2


def test_a_switch_and_a_way_back(calls):
    model = unfuse_activations_(make("bert"))
    with torch.no_grad():
        run(model, "bert")
        assert calls == []
        run(fuse_activations_(model), "bert")
        assert len(calls) == 2
        run(dequantize_(model), "bert")
    assert len(calls) == 2 and not any(NATIVE_SDPA in module.__dict__ for module in model.modules())


def test_only_transformers_own_function_is_replaced(calls):
    own = _interface._reading_codes(lambda module, q, *args, **kwargs: (q.transpose(1, 2), None))
    host = _interface._reading_codes(sdpa_attention_forward)
    module, q = nn.Module(), torch.randn(1, 2, 5, 32)
    assert torch.equal(own(module, q, q, q, None)[0], q.transpose(1, 2))
    assert not torch.equal(host(module, q, q, q, None)[0], q.transpose(1, 2)) and calls == []
    module.__dict__[NATIVE_SDPA] = True
    assert torch.equal(own(module, q, q, q, None)[0], q.transpose(1, 2)) and calls == []
    host(module, q, q, q, None)
    assert len(calls) == 1
    host(None, q, q, q, None)
    assert len(calls) == 1


def test_prompts_of_caches_of_fixed_size(calls):
    """Their first prompt has no mask and more places than tokens: the first query sees the first token alone."""
    model = make("llama")
    with torch.no_grad():
        for mask in (None, torch.ones(2, 24).long().index_fill(1, torch.arange(4), 0)):
            expected = model(IDS, attention_mask=mask, past_key_values=DynamicCache(config=model.config))
            cache = StaticCache(config=model.config, max_cache_len=40)
            found = model(IDS, attention_mask=mask, past_key_values=cache)
            assert_close(found.last_hidden_state[:, 4:], expected.last_hidden_state[:, 4:], rms=2e-2)
