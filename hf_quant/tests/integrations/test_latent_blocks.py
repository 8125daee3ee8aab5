"""Blocks of latent attention: the logits and tokens of the host, whose keys and values are not expanded."""

import gc
import weakref

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hf_quant import QuantizedCache, dequantize_, quantize_, unfuse_activations_
from hf_quant.integrations.transformers.blocks import base, block_reasons
from hf_quant.integrations.transformers.blocks.latent import LatentAttention, LatentBlock
from hf_quant.kernels.native import active
from hf_quant.kv_cache import LatentStates, register_attention
from hf_quant.testing import assert_close, rms_error


pytestmark = pytest.mark.skipif(active() is None, reason="the native kernels are not built")
_SMALL = {
    **{
        "vocab_size": 96,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    **{"intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"n_group": 1, "topk_group": 1},
    **{"q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 48},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_INT8_INPUTS = {"weights": "int4", "cpu_activations": "int8"}
FAMILIES = {
    # Angles as complex numbers, groups of experts by their best one.
    "deepseek_v2": {"n_group": 2, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {},
    "glm4_moe_lite": {"q_lora_rank": None},
    "minicpm3": {},
    "youtu": {},
    "axk1": {},
    "deepseek_v32": {},  # the tokens that an indexer chooses
}


def make(kind: str = "deepseek_v3", dtype: torch.dtype = torch.float32, dense: int = 1, **options) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **_SMALL | FAMILIES[kind] | {"first_k_dense_replace": dense})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) / 16
    model.generation_config.eos_token_id = None
    return quantize_(model, {"weights": "int4", "modules_to_not_convert": ["lm_head"], **options})


def forced(model: PreTrainedModel, cache=None, seed: int = 1) -> torch.Tensor:
    """Logits of a prompt with padding and of the tokens that follow it, one at a time and several."""
    ids, mask = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(seed)), torch.ones(2, 16)
    mask[0, :4], found = 0, []
    cache = DynamicCache(config=model.config) if cache is None else cache
    with torch.no_grad():
        for begin, end in ((0, 9), (9, 10), (10, 11), (11, 15), (15, 16)):
            of = model(ids[:, begin:end], attention_mask=mask[:, :end].long(), past_key_values=cache)
            found.append(of.logits[:, begin - end :].float())
    return torch.cat(found, 1)[:, 9:]


def generate(model: PreTrainedModel, rows: int = 1, **options) -> torch.Tensor:
    ids = torch.randint(3, 96, (rows, 9), generator=torch.Generator().manual_seed(rows))
    return model.generate(ids, max_new_tokens=8, do_sample=False, **options)


def blocks(model: PreTrainedModel) -> list[LatentAttention | LatentBlock]:
    """The blocks of latent attention, which may be parts of those of their layers."""
    found = [block for m in model.modules() if base.is_fused(m) for block in base.state_of(m).found.values()]
    return [block for block in found if isinstance(block, LatentAttention | LatentBlock)]


@pytest.fixture
def expanded(monkeypatch):
    """One entry for each time that an op expands the keys or values of latents."""
    made, dispatch = [], LatentStates.__torch_dispatch__
    noted = staticmethod(lambda *args, **kwargs: made.append(0) or dispatch(*args, **kwargs))
    monkeypatch.setattr(LatentStates, "__torch_dispatch__", noted)
    return made


@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_and_tokens_of_the_host(kind, expanded):
    model = make(kind)
    ours, beams = forced(model), generate(model, 2, num_beams=3)
    fixed = generate(model, cache_implementation="static")
    reasons = [reason for name, reason in block_reasons(model).items() if name.endswith("self_attn")]
    assert len(blocks(model)) == 2 and reasons == [None, None] and not expanded
    unfuse_activations_(model)
    assert_close(ours, forced(model), rms=1e-4)
    assert torch.equal(generate(model, 2, num_beams=3), beams)
    assert torch.equal(generate(model, cache_implementation="static"), fixed)


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "nf4"},
        {"weights": "int2"},
        {"weights": "fp8"},
        {"weights": "nf4", "kv_cache": "int8", "modules": {"*kv_b_proj": _INT8_INPUTS}},
        {"weights": "int4", "input_transform": {"block_size": 32}},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_formats_and_dtypes(options, dtype, expanded):
    model = make("minicpm3", dtype, **options)  # no router, which chooses otherwise for the smallest change
    ours = forced(model)
    assert len(blocks(model)) == 2 and not expanded
    unfuse_activations_(model)
    host = forced(model)
    if "modules" not in options:
        return assert_close(ours, host, rms=0.02 if dtype == torch.bfloat16 else 1e-4)
    exact = forced(dequantize_(model))  # what the host does to latents in int8 is not done here
    assert rms_error(ours, exact) <= rms_error(host, exact)


@pytest.mark.parametrize(
    "cache",
    [
        {"format": "int8"},
        {"format": "int4"},
        {"format": "fp8_e4m3"},
        {"format": "int8", "rotate_keys": False},
        {"format": "int8", "sink_tokens": 2, "recent_tokens": 3},
    ],
    ids=str,
)
def test_quantized_caches(cache, expanded):
    """Tokens of one sequence, whose heads two threads share for the bits of one, and of two, with padding."""
    model, before, ours = make("minicpm3"), torch.get_num_threads(), []

    def all_logits() -> list[torch.Tensor]:
        first, second = QuantizedCache(model.config, cache), QuantizedCache(model.config, cache)
        alone = torch.randint(3, 96, (1, 12), generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            model(alone[:, :9], past_key_values=first)
            return [model(alone[:, 9:], past_key_values=first).logits, forced(model, second)]

    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            ours.append(all_logits())
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *ours))
    assert len(blocks(model)) == 2 and not expanded
    keeps_tokens = "sink_tokens" in cache  # in 16 bit, which a chain of layers does not
    assert keeps_tokens or block_reasons(model)["model"] is None
    unfuse_activations_(model)
    for found, host in zip(ours[0], all_logits()):
        assert_close(found, host, rms=2e-4)


@pytest.mark.parametrize("attention", ["sdpa", "hf_quant"])
def test_a_long_prompt_behind_a_cache_and_a_cache_that_begins_again(attention):
    """Both have keys and values of all tokens, and what follows has none again."""
    model = make("deepseek_v3", dense=2)
    register_attention()
    model.set_attn_implementation(attention)
    cache, ids = QuantizedCache(model.config, {"format": "int8"}), torch.arange(3, 63).unsqueeze(0)

    def logits() -> torch.Tensor:
        cache.crop(-cache.get_seq_length())
        parts = ((0, 6), (6, 7), (7, 10), (10, 50), (50, 51), (51, 52))
        with torch.no_grad():
            return torch.cat([model(ids[:, begin:end], past_key_values=cache).logits for begin, end in parts], 1)

    first, second = logits(), logits()
    assert len(blocks(model)) == 2 and block_reasons(model)["model"] is None and torch.equal(first, second)
    unfuse_activations_(model)
    assert_close(first, logits(), rms=2e-4)


def test_what_stays_with_the_host():
    expected = forced(make())
    for change in (
        lambda m: m.set_attn_implementation("eager"),
        lambda m: m.model.layers[0].self_attn.kv_b_proj.register_forward_hook(lambda *args: None),
        lambda m: [
            setattr(layer.self_attn, "kv_b_proj", nn.Sequential(layer.self_attn.kv_b_proj)) for layer in m.model.layers
        ],
    ):
        other = make()
        change(other)
        assert_close(forced(other), expected, rms=1e-4)
        assert len(blocks(other)) < 2


@pytest.mark.parametrize("options", [{"weights": "W4A16_ASYM", "group_size": 32}, {}], ids=str)
def test_a_weight_that_is_written_in_place(options):
    """A block keeps values of its own of zero points."""
    model = make("minicpm3", **options)
    forced(model)
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.self_attn.kv_b_proj
            for factors in (weight._parameters.get("zero_point"), weight.scale):
                if factors is not None:
                    factors.copy_(factors.flip(0))
    ours = forced(model)
    assert len(blocks(model)) == 2
    unfuse_activations_(model)
    assert_close(ours, forced(model), rms=1e-4)


@pytest.mark.parametrize("change", [lambda k, v: (k.roll(16, -1), v), lambda k, v: (k, v * 1.1)])
def test_other_keys_are_not_taken_for_these(change, monkeypatch):
    """A host whose keys have their turned part first, or whose values have a factor."""
    host = type(make().model.layers[0].self_attn)._hf_quant_block_of
    expand = host.expand_kv
    monkeypatch.setattr(host, "expand_kv", lambda self, *args: change(*expand(self, *args)))
    model = make()
    forced(model)
    assert not blocks(model)
    assert any("makes other keys and values" in (reason or "") for reason in block_reasons(model).values())


def test_states_that_an_op_reads_are_expanded(expanded):
    model = make("deepseek_v32")
    forced(model)
    attention, x = model.model.layers[0].self_attn, torch.randn(1, 1, 5, 64)
    turned = torch.randn(1, 1, 5, 16)
    keys, values = blocks(model)[0].twin.expand_kv(x, turned)
    host = attention.expand_kv(x, turned)
    assert keys.shape == host[0].shape and values.shape == host[1].shape
    assert torch.equal(keys + 0, host[0]) and torch.equal(values[..., :3], host[1][..., :3])
    assert len(expanded) == 2 and "LatentStates((1, 4, 5, 64)" in repr(keys)


def test_a_model_that_is_deleted_is_gone_without_the_garbage_collector():
    model = make()
    generate(model)
    of_prompts = [base.state_of(layer.self_attn).prompts for layer in model.model.layers]
    assert all(isinstance(block, LatentBlock) for state in of_prompts for block in state.found.values())
    assert all(state.found for state in of_prompts)
    del of_prompts
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    gc.collect()
    gc.disable()
    try:
        del model
        assert not any(parameter() is not None for parameter in parameters)
    finally:
        gc.enable()
