"""Models whose weights have floating-point zero points: blocks, changes in place, gradients, adapters, reloads."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from hf_quant import dequantize_
from hf_quant.algorithms import quantize_matrix
from hf_quant.integrations.transformers.blocks import base
from hf_quant.kernels import clear_prepacked
from hf_quant.modules import QuantizedModule, packed_key
from hf_quant.planning import schemes_to_list
from hf_quant.scheme import LinearScheme, TensorQuant
from hf_quant.tests.integrations.test_fused_blocks import FAMILIES, decode, make, needs_native, prompt


pytestmark = needs_native
INT4 = TensorQuant("int4", "group", 32, False, "float32", zero_point_dtype="float32")
INT8 = TensorQuant("int8", "group", 32, False, "float16", zero_point_dtype="float16")


def quantized_layers(model: nn.Module) -> dict[str, QuantizedModule]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedModule)}


def with_float_zeros(kind: str, quant: TensorQuant, dtype: torch.dtype = torch.float32, **fields) -> nn.Module:
    """A model with weights that are not centered, as imports have them."""
    model = make(kind, {"weights": "int4", "modules_to_not_convert": ["lm_head"]}, dtype, **fields)
    layers = quantized_layers(model)
    for module in layers.values():
        weights = {name: module.dequantize_weight(name, torch.float32) + 0.01 for name in module.weight_names}
        module.scheme = LinearScheme(quant)
        for name, weight in weights.items():
            del module._parameters[packed_key("global_scale", name)]
            module.set_packed_(name, quantize_matrix(module.to_matrix(name, weight), quant))
        module.parameters_changed()
    model.config.quantization_config.plan = schemes_to_list({name: module.scheme for name, module in layers.items()})
    return model


def found_blocks(model: nn.Module) -> list:
    return [state for module in model.modules() if base.is_fused(module) and (state := base.state_of(module)).found]


@pytest.mark.parametrize("quant", [INT4, INT8], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "gpt_oss", "mixtral"])
def test_blocks_compute_what_the_weights_are(kind, quant):
    model = with_float_zeros(kind, quant, **FAMILIES[kind][0])
    plain, ids = dequantize_(copy.deepcopy(model)), prompt(length=9)
    with torch.no_grad():
        expected = plain(ids).logits
        for length in (9, 3):  # more and fewer rows than meet offsets together
            torch.testing.assert_close(model(ids[:, :length]).logits, expected[:, :length], atol=1e-4, rtol=1e-4)
    found = decode(model, ids, DynamicCache(config=model.config))
    torch.testing.assert_close(found, expected[:, -1:], atol=1e-4, rtol=1e-4)
    assert found_blocks(model) and all(state.reason is None for state in found_blocks(model))


def test_weights_that_are_written_in_place():
    model, ids = with_float_zeros("llama", INT4), prompt()
    with torch.no_grad():
        for _ in range(3):
            before = model(ids).logits
        assert found_blocks(model)
        for name in ("scale", "zero_point"):
            for layer in quantized_layers(model).values():
                getattr(layer, name).view(torch.float32)[::3] *= -2
            expected = dequantize_(copy.deepcopy(model))(ids).logits
            torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)
            assert (expected - before).norm() > 0.1 * before.norm()
            before = expected


def test_inference_tensors_that_are_written_in_place():
    """Nothing counts their changes: `clear_prepacked` tells."""
    ids = prompt()
    with torch.inference_mode():
        model = with_float_zeros("llama", INT4)
        for _ in range(3):
            model(ids)
        assert found_blocks(model)
        for layer in quantized_layers(model).values():
            layer.scale.view(torch.float32)[::3] *= -2
        clear_prepacked()
        expected = dequantize_(copy.deepcopy(model))(ids).logits
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_gradients_and_merged_adapters():
    model = with_float_zeros("llama", INT4)
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(5, 128, requires_grad=True)
    layer(x).square().sum().backward()
    weight = layer.dequantize_weight(dtype=torch.float32)
    expected = 2 * (x @ weight.t()) @ weight
    torch.testing.assert_close(x.grad, expected.detach(), atol=1e-3, rtol=1e-3)
    change = torch.randn(192, 1) @ torch.randn(1, 128) * 0.005
    layer.requantize_weight_("weight", weight + change)
    found = layer.dequantize_weight(dtype=torch.float32) - weight
    assert layer.scheme.weight == INT4 and (found - change).norm() < 0.3 * change.norm()


def test_a_saved_model_is_the_same(tmp_path):
    model, ids = with_float_zeros("mixtral", INT8, torch.bfloat16, **FAMILIES["mixtral"][0]), prompt()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {str(layer.scheme) for layer in quantized_layers(again).values()} == {str(LinearScheme(INT8))}
    for name, layer in quantized_layers(model).items():
        for key, value in layer._parameters.items():
            assert value is None or torch.equal(value, again.get_submodule(name)._parameters[key])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)
    config = model.config.quantization_config
    AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)  # its own, which asks for nothing else
    layer = again.model.layers[0].self_attn.q_proj
    layer.zero_point.view(torch.float16)[0, 0] = torch.inf
    again.save_pretrained(tmp_path / "wrong")
    with pytest.raises(ValueError, match="q_proj.zero_point is corrupt: float16 zero points, as bits without sign"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "wrong", dtype=torch.bfloat16)
