"""A quantized model of several parts, of which one is loaded by the class of the part."""

from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from hf_quant import QuantizerConfig, quantize_
from hf_quant.modules import QuantizedModule
from integration_tests.support.tiny_models import build, outputs


_SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
_TEXT = dict(vocab_size=96, bos_token_id=0, eos_token_id=1, pad_token_id=2, **_SIZES)
_IMAGES = dict(image_size=32, patch_size=8, **_SIZES)
_IDS = torch.randint(3, 96, (2, 8), generator=torch.Generator().manual_seed(0))
_PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def _save(model: nn.Module, config: QuantizerConfig, directory: Path) -> nn.Module:
    quantize_(model.eval(), config).save_pretrained(directory)
    return model


def _are_quantized(model: nn.Module) -> bool:
    return any(isinstance(module, QuantizedModule) for module in model.modules())


@pytest.mark.parametrize("family", ["CLIP", "Siglip"])
@pytest.mark.parametrize("kept", [None, "vision_model", "text_model"])
@torch.no_grad()
def test_encoders_load_by_their_own_classes(family, kept, tmp_path):
    """Before, they were drawn at random: their configs lie inside of that of the whole, which names the codes."""
    config = getattr(transformers, f"{family}Config")(text_config=_TEXT, vision_config=_IMAGES)
    plain = getattr(transformers, f"{family}Model")(config)
    model = _save(plain, QuantizerConfig("W4A8", modules={f"{kept}.*": None} if kept else None), tmp_path)
    for name, given in (("vision_model", _PIXELS), ("text_model", _IDS)):
        class_name = f"{family}{name.partition('_')[0].title()}Model"
        part, info = getattr(transformers, class_name).from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"]
        assert _are_quantized(part) == (name != kept)
        assert torch.equal(part.eval()(given)[0], getattr(model, name)(given)[0])
        part.save_pretrained(tmp_path / name)
        again = type(part).from_pretrained(tmp_path / name)
        assert torch.equal(again.eval()(given)[0], part(given)[0])


def _mllama() -> nn.Module:
    text = transformers.models.mllama.MllamaTextConfig(
        **_TEXT, num_key_value_heads=1, cross_attention_layers=[1], rope_parameters={"rope_type": "default"}
    )
    vision = transformers.models.mllama.configuration_mllama.MllamaVisionConfig(
        **_IMAGES, attention_heads=2, num_global_layers=1, vision_output_dim=128, intermediate_layers_indices=[0]
    )
    return transformers.MllamaForConditionalGeneration(
        transformers.MllamaConfig(vision_config=vision, text_config=text, image_token_index=3)
    )


def _llama4() -> nn.Module:
    text = transformers.Llama4TextConfig(
        **_TEXT, num_key_value_heads=1, intermediate_size_mlp=128, num_local_experts=4, moe_layers=[1]
    )
    vision = transformers.Llama4VisionConfig(
        **_IMAGES | {"intermediate_size": 256},
        vision_output_dim=64,
        projector_input_dim=64,
        projector_output_dim=64,
    )
    return transformers.Llama4ForConditionalGeneration(
        transformers.Llama4Config(vision_config=vision, text_config=text)
    )


@pytest.mark.parametrize("make", [_mllama, _llama4])
@torch.no_grad()
def test_decoders_load_by_their_own_classes(make, tmp_path):
    """Mllama's have a third name in the checkpoint; k_proj of Llama 4 here is in 16 bit, that of its encoder not."""
    model = _save(make(), QuantizerConfig("int4"), tmp_path)
    decoder, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(decoder).__name__.endswith("ForCausalLM") and _are_quantized(decoder)
    assert not info["missing_keys"]
    whole = getattr(model, "language_model", model)
    assert torch.equal(decoder.eval()(input_ids=_IDS).logits, whole(input_ids=_IDS).logits)


def test_a_class_that_finds_none_of_its_weights_is_refused(tmp_path):
    """The host would draw all of them at random."""
    model = _save(build("llava"), QuantizerConfig("int4"), tmp_path)
    with pytest.raises(ValueError, match="LlamaForCausalLM looks for weights such as model.embed_tokens.weight"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    again = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path)
    assert torch.equal(outputs(again, "llava"), outputs(model, "llava"))
