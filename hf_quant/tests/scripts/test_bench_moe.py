"""The mixture of experts that is too large for 16 bit, at a size that is not."""

import torch
from transformers import Qwen2MoeConfig

import bench_moe


def test_its_layers_are_quantized_and_have_memory_of_their_own():
    config = Qwen2MoeConfig(
        vocab_size=100,
        hidden_size=64,
        num_hidden_layers=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        dtype=torch.bfloat16,
    )
    model = bench_moe.make_model("int4", config)
    first, second = model.model.layers
    parameters, copies = dict(first.named_parameters()), dict(second.named_parameters())
    experts = [name for name in parameters if ".experts.qdata" in name]
    assert len(experts) == 2 and parameters[experts[0]].dtype == torch.int32
    assert parameters["mlp.gate.weight"].dtype == torch.bfloat16  # the router
    for name, parameter in parameters.items():
        assert torch.equal(parameter, copies[name]) and parameter.data_ptr() != copies[name].data_ptr()
    assert (first.self_attn.layer_idx, second.self_attn.layer_idx) == (0, 1)
    tokens = model.generate(
        torch.tensor([[1, 2, 3]]), max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0
    )
    assert tokens.shape == (1, 6)
    assert bench_moe.nbytes(model) < 2 * sum(p.numel() for p in bench_moe.Qwen2MoeForCausalLM(config).parameters())
