"""The digest by which model cards tell models apart: the same of a model and of its checkpoint, whatever is in it."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from hf_quant import QuantizerConfig, quantize_
from hf_quant.cards.sample import sample_of
from hf_quant.cards.source import read_source


def test_16_bit_weights_in_any_layout():
    weight = torch.arange(8.0).view(4, 2, 1, 1)
    tensors = {"a.weight": weight, "a.step": torch.tensor(3), "a.mask": torch.ones(3, dtype=torch.bool)}
    strided = {**tensors, "a.weight": weight.to(memory_format=torch.channels_last)}
    assert sample_of(strided) == sample_of(tensors) != sample_of({**tensors, "a.weight": weight + 1})


def test_experts_in_16_bit_are_one_by_one_in_a_checkpoint(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=96, num_local_experts=2, num_key_value_heads=2, **sizes))
    quantize_(model, QuantizerConfig(None, kv_cache="int8")).save_pretrained(tmp_path)
    assert read_source(model).fingerprint == read_source(tmp_path).fingerprint
