"""Blocks of transformers on CPUs: the results of the host, where the host's code runs instead, and the way back."""

import copy
import gc
import pickle
import signal
import weakref
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaModel, PreTrainedModel

from hf_quant import (
    QuantizedCache,
    QuantizerConfig,
    dequantize_,
    fuse_activations_,
    plan,
    quantize_,
    unfuse_activations_,
)
from hf_quant.integrations.transformers.blocks import base, block_reasons, decoder, fuse_blocks_
from hf_quant.integrations.transformers.blocks import layer as layer_blocks
from hf_quant.kernels import native
from hf_quant.kernels.native import blocks, places
from hf_quant.kv_cache import Places, next_tokens


SMALL = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# In fp32, and with inputs that are not rounded: rounding turns the last bits of a norm into differences one can see.
CONFIG = {"weights": "int4", "kv_cache": "int8", "modules_to_not_convert": ["lm_head"]}
MOE = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 3}
GROUPS = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
SCALED = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 3.0}  # queries, from position _FIRST on
_FIRST = "original_max_position_embeddings"
# {model type: (further fields, modules that have a block)}.
FAMILIES = {
    "llama": ({}, 12),
    "qwen3": ({}, 16),  # norms of heads
    "gemma3_text": ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}, 20),  # 1 + weight
    # Capped scores, of which some are near the cap, and "eager" attention.
    "gemma2": ({"attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 16, "sliding_window": 8}, 16),
    # Sinks, biases, angles for half of a head, and gates of pairs.
    "gpt_oss": ({"sliding_window": 64, "num_local_experts": 4, "num_experts_per_tok": 2}, 12),
    "phi3": ({}, 12),  # joined projections
    "olmo2": ({}, 16),  # norms of whole rows
    "cohere": ({}, 10),  # LayerNorm; neighbors are turned; attention and feed-forward read the same
    "phi": ({"num_key_value_heads": 4}, 7),  # the same, added up in another order
    "gpt_neox": ({}, 7),  # two norms of the same, projections joined by heads, half of the channels are turned
    "persimmon": ({}, 7),  # the same projections, one after the other
    "hunyuan_v1_moe": ({"num_experts": 8, "moe_topk": 2}, 18),  # heads are turned, then normalized; fp32 router
    "mixtral": ({"num_local_experts": 8}, 12),
    "qwen2_moe": (MOE | {"shared_expert_intermediate_size": 96}, 14),  # a shared expert with a gate
    "glm4_moe": (MOE | {"n_routed_experts": 8, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}, 13),
    # Of 8 experts those of one of 4 groups, and of 2 of these.
    "dots1": (
        MOE
        | {"n_routed_experts": 8, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
        | {"n_shared_experts": 1},
        17,
    ),
    "glm4": ({"num_key_value_heads": 2}, 16),  # and of these the half
    "granite": ({"embedding_multiplier": 3.7, "residual_multiplier": 0.22}, 12),
    "starcoder2": ({}, 7),  # no gate
    "gpt2": ({"scale_attn_by_inverse_layer_idx": True}, 7),  # `Conv1D`, learned positions
    "gpt_bigcode": ({}, 7),  # heads that share one key
    "opt": ({"ffn_dim": 192, "word_embed_proj_dim": 128}, 5),  # queries are scaled; no module of feed-forward
    "bitnet": ({}, 16),  # norms before the last layers of attention and feed-forward
    "ministral3": ({}, 12),  # queries are scaled from a position on
    "smollm3": ({"no_rope_layers": [1, 0]}, 12),  # a layer without rotary embedding
}
needs_native = pytest.mark.skipif(not native.active(), reason="the native kernels are not built")
pytestmark = needs_native


def make(kind: str = "llama", config=None, dtype=torch.float32, **fields) -> PreTrainedModel:
    torch.manual_seed(0)
    given = AutoConfig.for_model(kind, **{**SMALL, **fields})
    model = AutoModelForCausalLM.from_config(given, dtype=dtype).eval()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dim() == 1 and "rotary" not in name:
            tensor.data += torch.randn_like(tensor) / 4
    model.generation_config.eos_token_id = None
    return quantize_(model, CONFIG if config is None else config)


def prompt(rows: int = 1, length: int = 7) -> torch.Tensor:
    return torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(5))


def generate(model, ids, **options):
    return model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0, **options)


def decode(model, ids, cache) -> torch.Tensor:
    """Logits of the last of two tokens after the others, one by one."""
    with torch.no_grad():
        model(ids[:, :-2], past_key_values=cache)
        model(ids[:, -2:-1], past_key_values=cache)
        return model(ids[:, -1:], past_key_values=cache).logits


def states(model, *but):
    return [base.state_of(module) for module in model.modules() if base.is_fused(module) and module not in but]


@pytest.fixture(scope="module")
def llama():
    return make()


@pytest.mark.parametrize("kind", FAMILIES)
def test_tokens_of_the_host(kind):
    fields, count = FAMILIES[kind]
    model = make(kind, **fields)
    ids, mask = prompt(3), torch.ones(3, 7, dtype=torch.long)
    mask[0, :3] = mask[2, :1] = 0
    alone, batch = generate(model, ids[:1]), generate(model, ids, attention_mask=mask)
    assert block_reasons(model) == dict.fromkeys(block_reasons(model)) and len(states(model)) == count
    assert all(state.found for state in states(model))
    logits = decode(model, ids, QuantizedCache(model.config, "int8"))
    unfuse_activations_(model)
    assert torch.equal(generate(model, ids[:1]), alone) and torch.equal(
        generate(model, ids, attention_mask=mask), batch
    )
    expected = decode(model, ids, QuantizedCache(model.config, "int8"))
    assert ((logits - expected).float().norm() / expected.float().norm()) < 0.01


@pytest.mark.parametrize("kind", ["qwen3", "qwen2_moe"])
def test_parts_of_a_layer_run_its_blocks_without_a_trial(kind):
    model = make(kind, **FAMILIES[kind][0])
    decode(model, prompt(), QuantizedCache(model.config, "int8"))
    parts = [base.state_of(m) for n, m in model.named_modules() if base.is_fused(m) and n.count(".") > 2]
    assert len(parts) >= 8 and all(state.found and not state.trials for state in parts)
    mlp, x = model.model.layers[0].mlp, torch.randn(1, 3, 128)
    with torch.no_grad():
        found = mlp(x)
    state = base.state_of(mlp)
    assert not state.trials and torch.equal(found, state.found[torch.float32](x))


@pytest.mark.parametrize("cache", ["int8", "fp8", "int4", "int2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("activations", [None, "int8"])
def test_caches_and_inputs_of_every_kind(cache, dtype, activations):
    model = make(config={**CONFIG, "kv_cache": cache, "cpu_activations": activations}, dtype=dtype)
    ids = prompt(2, 30)
    found = decode(model, ids, QuantizedCache(model.config, cache))
    assert all(state.found for state in states(model)) and found.dtype == dtype
    expected = decode(unfuse_activations_(model), ids, QuantizedCache(model.config, cache))
    assert ((found - expected).float().norm() / expected.float().norm()) < (0.1 if activations else 0.03)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gemma2", "gpt_oss"])  # two with functions of their own
def test_static_caches_are_written_by_themselves(kind):
    model = make(kind, {**CONFIG, "kv_cache": None})
    options = {"cache_implementation": "static", "disable_compile": True}
    found = generate(model, prompt(2), **options)
    assert all(state.found for state in states(model, model.model)) and not base.state_of(model.model).found
    assert torch.equal(generate(unfuse_activations_(model), prompt(2), **options), found)


def test_beams_and_copies_of_the_cache(llama):
    fuse_activations_(llama)
    ids = prompt(2)
    beams = generate(llama, ids, num_beams=3)
    cache = QuantizedCache(llama.config, "int8")
    first = decode(llama, ids, cache)
    copied = copy.deepcopy(cache)
    with torch.no_grad():
        more = [llama(ids[:, :1], past_key_values=of).logits for of in (cache, copied)]
    assert torch.equal(*more) and cache.get_seq_length() == copied.get_seq_length() == 8
    cache.crop(-2)
    with torch.no_grad():
        assert torch.equal(llama(ids[:, -1:], past_key_values=cache).logits, first)
    assert torch.equal(generate(unfuse_activations_(llama), ids, num_beams=3), beams)
    fuse_activations_(llama)


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("ministral3", {"rope_parameters": SCALED | {_FIRST: 2}}, "other queries or keys"),  # at nearly all positions
        ("cohere", {"use_qk_norm": True}, "other queries or keys"),  # a norm for each head
        ("phimoe", {}, "chooses its experts otherwise"),  # one by one, each by its own softmax
        ("llama", {"hidden_act": "tanh"}, "activation function"),
    ],
)
def test_what_is_computed_otherwise_stays_with_the_host(kind, fields, reason):
    model = make(kind, **fields)
    found = generate(model, prompt(2))
    assert any(reason in (text or "") for text in block_reasons(model).values())
    assert torch.equal(generate(unfuse_activations_(model), prompt(2)), found)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_functions_of_models_that_compute_something_else(kind, monkeypatch):
    file = import_module(f"transformers.models.{kind}.modeling_{kind}")
    host = file.eager_attention_forward
    own = SimpleNamespace(get_interface=lambda name, default: default)  # of a registry that is not wrapped
    for name, other, reason in (
        ("eager_attention_forward", lambda m, q, *args, **options: host(m, -q, *args, **options), "something else"),
        ("ALL_ATTENTION_FUNCTIONS", own, "does not call one attention function"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(file, name, other)
            model = make(kind, **FAMILIES[kind][0])
            found = generate(model, prompt(2))
            assert any(reason in (text or "") for text in block_reasons(model).values())
            assert torch.equal(generate(unfuse_activations_(model), prompt(2)), found)


def test_weights_of_a_fused_attention():
    """A hook on the attention sees them, as without blocks."""
    model, seen = make("gpt_oss", **FAMILIES["gpt_oss"][0]), []
    expected = generate(model, prompt())
    handle = model.model.layers[0].self_attn.register_forward_hook(lambda *call: seen.append(call[2][1]))
    assert torch.equal(generate(model, prompt()), expected) and all(weights is not None for weights in seen)
    handle.remove()


def test_hooks_and_replaced_layers_are_noticed():
    model = make()
    expected, layer = generate(model, prompt()), model.model.layers[0]
    seen = []
    handle = layer.mlp.up_proj.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(generate(model, prompt()), expected) and len(seen) == 12
    handle.remove()
    layer.mlp.down_proj.weight = torch.zeros(128, 192)
    layer.self_attn.o_proj.weight = torch.zeros(128, 128)
    layer.post_attention_layernorm.weight = nn.Parameter(torch.ones(128) * 3)
    x = torch.randn(1, 1, 128)
    with torch.no_grad():
        assert not any(layer.mlp(x).any() for _ in range(64)) and layer.mlp.__dict__[base._STATE].found
        assert layer.post_attention_layernorm(x).float().square().mean().sqrt() == pytest.approx(3, rel=0.05)
    changed = generate(model, prompt())
    assert torch.equal(generate(unfuse_activations_(model), prompt()), changed)


class Noisy(nn.Module):
    """An activation that draws a random number, as the attention of Informer does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x) + torch.rand(())


def test_trials_wait_for_calls_of_their_own_kind():
    """A kind of calls that is new is tried at once, however many trials others have had."""
    made, state, module = [], base.State(), nn.Linear(2, 2)

    def make(works: bool = True) -> SimpleNamespace:
        made.append(works)
        if not works:
            raise base.Unproven("no")
        return SimpleNamespace(watch=SimpleNamespace(holds=lambda: True))

    for kind in range(20):
        assert state.block(module, kind, make) is state.block(module, kind, make) is not None
    assert len(made) == 20
    found = [state.block(module, "other", lambda: make(works=False)) for _ in range(1 + 2 + 1 + 4 + 1 + 8 + 1)]
    assert set(found) == {None} and made[20:] == [False] * 4  # with 2, 4 and 8 calls between them
    assert state.reason == "no" and state.block(module, 0, make) is not None and state.reason is None


def test_trials_draw_none_of_the_random_numbers_of_a_user():
    mlp, x = make().model.layers[0].mlp, torch.ones(1, 1, 128)
    mlp.act_fn = Noisy()
    torch.manual_seed(0)
    with torch.no_grad():
        found = mlp(x), torch.rand(())
    assert base.state_of(mlp).trials == 1 and block_reasons(mlp)[""]
    base.unfuse_(mlp)
    torch.manual_seed(0)
    with torch.no_grad():
        assert torch.equal(mlp(x), found[0]) and torch.rand(()) == found[1]


@pytest.mark.parametrize("reads", [True, False])  # memory by torch's C interface, or by the tensors' methods
def test_memory_of_parameters_is_watched(reads, monkeypatch):
    if not reads:
        monkeypatch.setattr(places, "_offset", None)
    assert (places._offset is not None) == reads
    mlp, x = make().model.layers[0].mlp, torch.randn(1, 1, 128)
    host = type(mlp)._hf_quant_block_of.forward
    with torch.no_grad():
        for change in (None, "data", "swapped"):
            codes = mlp.down_proj.qdata
            if change == "data":
                codes.data = codes.data.flip(0).contiguous()
            elif change == "swapped":
                torch.utils.swap_tensors(codes, nn.Parameter(torch.zeros_like(codes), requires_grad=False))
                gc.collect()
            for _ in range(3):
                torch.testing.assert_close(mlp(x), host(mlp, x))
            assert base.state_of(mlp).found and block_reasons(mlp)[""] is None


@pytest.mark.parametrize("part", ["input_layernorm.weight", "self_attn.q_proj.qdata", "mlp.down_proj.qdata"])
def test_parameters_that_another_thread_replaces_during_a_trial(part, monkeypatch):
    model, make_rest = make(), layer_blocks.Rest.__init__
    name, _, parameter = part.rpartition(".")
    module = model.model.layers[0].get_submodule(name)
    other = nn.Parameter(module._parameters[parameter].flip(0), requires_grad=False)

    def rest(self, *args):
        make_rest(self, *args)
        module._parameters[parameter] = other

    monkeypatch.setattr(layer_blocks.Rest, "__init__", rest)
    ids, host = prompt(), copy.deepcopy(model)
    host.model.layers[0].load_state_dict({part: other}, strict=False)
    with torch.no_grad():
        model(ids)
        monkeypatch.undo()
        assert block_reasons(model)["model.layers.0"] is not None
        assert torch.equal(generate(model, ids), generate(unfuse_activations_(host), ids))
        found, expected = model(ids).logits, host(ids).logits
        assert (found - expected).norm() < 1e-5 * expected.norm()


def test_adapters_come_and_go():
    model = make()
    expected, attention = generate(model, prompt()), model.model.layers[0].self_attn
    layer, calls = attention.q_proj, []

    class Wrapper(nn.Module):
        def forward(self, x):
            calls.append(x.shape)
            return layer(x)

    attention.q_proj = Wrapper()
    assert torch.equal(generate(model, prompt()), expected) and len(calls) == 12
    assert "replaced" in block_reasons(model)["model.layers.0.self_attn"]
    attention.q_proj = layer
    calls.clear()
    for _ in range(4):
        assert torch.equal(generate(model, prompt()), expected)
    assert not calls and block_reasons(model)["model"] is None


class Factor(nn.Module):
    """A layer of an adapter that changes nothing before it is trained."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer, self.factor = base_layer, nn.Parameter(torch.ones(128))

    def forward(self, x):
        return self.base_layer(x * self.factor)


@pytest.mark.parametrize(
    ("kind", "fields", "part", "name"),
    [
        ("qwen3_moe", MOE, "mlp", "gate.factor"),
        ("doge", {}, "", "input_residual"),  # of ones
        ("doge", {}, "self_attn", "dt_proj.weight"),  # multiplied by zeros
    ],
)
def test_parameters_that_change_nothing_before_they_are_trained(kind, fields, part, name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **fields)).eval()
    layer = quantize_(model, "int8").model.layers[0]
    module = layer.get_submodule(part)
    if kind == "qwen3_moe":
        module.gate = Factor(module.gate)
    with torch.no_grad():
        model(prompt())
        assert any("does not read" in (reason or "") for reason in block_reasons(model).values())
        if kind == "doge":
            layer.self_attn.A += 1
        module.get_parameter(name).normal_()
        found = model(prompt()).logits
        expected = unfuse_activations_(model)(prompt()).logits
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_queries_that_are_scaled_from_a_position_on(parts):
    model = make("ministral3", rope_parameters=SCALED | {_FIRST: 16})
    ids, mask = prompt(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    found = []
    for fuse in (fuse_activations_, unfuse_activations_):
        fuse(model)
        parts.clear()
        more = {"output_logits": True, "return_dict_in_generate": True}
        made = [generate(model, ids, attention_mask=mask, **more), generate(model, ids[:1, 3:], **more)]
        found.append([logits for each in made for logits in each.logits])
        # The longest sequence has 9 tokens, then 8 more at positions below 16; the other has 6, then 11.
        assert len(parts) == (0 if fuse is unfuse_activations_ else 7 + 11), fuse
    for own, theirs in zip(*found):
        assert ((own - theirs).norm() / theirs.norm()) < 0.01


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("kind", "fields", "counts"),
    [
        ("llama", {}, [4]),
        ("granite", {"embedding_multiplier": 3.7}, [4]),
        ("gemma3_text", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}, [3, 1]),
        ("gemma2", {"attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 16, "sliding_window": 8}, [4]),
    ],
)
@pytest.mark.parametrize("padding", [0, 3])
def test_layers_are_computed_in_one_call(parts, kind, fields, counts, inference, padding):
    model = make(kind, **{"num_hidden_layers": 4, **fields})
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[0, :padding] = 0
    with torch.inference_mode(inference):
        found = generate(model, prompt(3), attention_mask=mask)
        counts = [1] * 4 if padding and kind == "gemma2" else counts  # masks of a window are shorter than others
        assert parts == counts * 11  # all steps: the prompt has made the blocks of the layers
        unfuse_activations_(model)
        assert torch.equal(generate(model, prompt(3), attention_mask=mask), found)


@pytest.mark.parametrize("has_cache", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "smollm3", "phi3"])
def test_long_prompts_are_two_calls_a_layer(kind, has_cache, monkeypatch):
    model = make(kind, **FAMILIES[kind][0])
    for name in ("layer", "inputs"):
        monkeypatch.setattr(f"hf_quant.integrations.transformers.blocks.{name}.CHUNK", 16)
    calls, real = [], blocks._run
    monkeypatch.setattr(blocks, "_run", lambda *given: (calls.append(given[2]), real(*given)))
    ids, mask = prompt(2, 19), torch.ones(2, 19, dtype=torch.long)
    mask[0, :5] = 0
    with torch.no_grad():
        model(ids)
        calls.clear()
        cache = QuantizedCache(model.config, "int8") if has_cache else None
        found = model(ids, attention_mask=mask, past_key_values=cache, use_cache=has_cache).logits
        # 38 rows in parts of 16, before and behind the attention; the norm at the end has all.
        assert calls == [16, 16, 6] * 2 * 2 + [38]
        unfuse_activations_(model)
        cache = QuantizedCache(model.config, "int8") if has_cache else None
        expected = model(ids, attention_mask=mask, past_key_values=cache, use_cache=has_cache).logits
    seen = mask.bool()
    assert ((found - expected)[seen].norm() / expected[seen].norm()) < 0.01


@pytest.mark.parametrize(
    ("kind", "window"),
    [
        *((kind, 8) for kind in ("llama", "smollm3", "cohere", "gpt_neox", "granite", "qwen2_moe", "gpt2")),
        *(("gemma3_text", window) for window in (8, 20, 64)),
    ],
)
@pytest.mark.parametrize("cache", ["int8", "int2"])
def test_prompts_are_one_call(parts, kind, cache, window):
    """Tokens of an empty cache and of one in use, beyond windows; one sequence, several, and padded ones."""
    fields = {**FAMILIES[kind][0], "num_hidden_layers": 3, "sliding_window": window, "no_rope_layers": [1, 1, 0]}
    if kind == "gemma3_text":
        fields["layer_types"] = ["full_attention", *["sliding_attention"] * 2]
    config = {"format": cache, "sink_tokens": 0, "recent_tokens": 0}
    model, ids, mask = make(kind, CONFIG | {"kv_cache": config}, **fields), prompt(3, 30), torch.ones(3, 30).long()
    mask[0, :11] = mask[2, :1] = 0
    results = []
    with torch.no_grad():
        generate(model, ids[:1])  # makes the blocks of the layers
        for is_fused in (True, False):
            for rows, given in ((1, None), (3, None), (3, mask)):
                for _ in range(8 if is_fused else 1):  # a block for each kind of call, after some calls
                    parts.clear()
                    past = QuantizedCache(model.config, config)
                    ends = ((ids[:rows, :17], None if given is None else given[:, :17]), (ids[:rows, 17:], given))
                    outputs = [model(part, attention_mask=own, past_key_values=past).logits for part, own in ends]
                results.append(torch.cat(outputs, 1)[mask[:rows].bool() if given is None else given.bool()])
                assert (sum(parts) == 6) == is_fused and past.get_seq_length() == 30
            unfuse_activations_(model)
    for found, expected in zip(results[:3], results[3:]):
        assert (found - expected).norm() / expected.norm() < 1e-4


@pytest.mark.parametrize("S", [1, 9])
def test_masks_that_are_too_short_stay_with_the_host(parts, S):
    """The host takes tokens without a mask as padding."""
    model, ids, results = make(), prompt(2, 20), []
    mask = torch.ones(2, 20).long()
    mask[0, :3] = 0
    with torch.no_grad():
        for tokens in [20] * 8 + [15]:
            past = QuantizedCache(model.config, "int8")
            model(ids[:, :-S], attention_mask=mask[:, :-S], past_key_values=past)
            parts.clear()
            results.append(model(ids[:, -S:], attention_mask=mask[:, :tokens], past_key_values=past).logits)
            assert bool(parts) == (tokens == 20) or len(results) < 8
        unfuse_activations_(model)
        past = QuantizedCache(model.config, "int8")
        model(ids[:, :-S], attention_mask=mask[:, :-S], past_key_values=past)
        expected = model(ids[:, -S:], attention_mask=mask[:, :15], past_key_values=past).logits
    assert (results[-1] - expected).norm() / expected.norm() < 1e-4


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="has no timers")
def test_prompts_are_interrupted(parts):
    def interrupt(*given):
        raise KeyboardInterrupt

    model, ids = make(num_hidden_layers=8), prompt(1, 400)
    with torch.no_grad():
        expected = [model(ids, past_key_values=QuantizedCache(model.config, "int8")).logits for _ in range(3)][-1]
        cache, before = QuantizedCache(model.config, "int8"), signal.signal(signal.SIGALRM, interrupt)
        real, counts = decoder.Chain.__call__, len(parts)
        try:
            with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(
                    decoder.Chain,
                    "__call__",
                    lambda self, *given: (signal.setitimer(signal.ITIMER_REAL, 0.001), real(self, *given)),
                )
                model(ids, past_key_values=cache)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert len(parts) == counts + 1 and cache.get_seq_length() == 0
        assert torch.equal(model(ids, past_key_values=cache).logits, expected)


@pytest.mark.parametrize("given", ["input_ids", "inputs_embeds"])
@pytest.mark.parametrize("has_positions", [False, True])
def test_decoders_called_by_hand(parts, llama, given, has_positions):
    fuse_activations_(llama)
    results = []
    for _ in range(2):
        cache, ids = QuantizedCache(llama.config, "int8"), prompt(2, 12)
        with torch.no_grad():
            llama(ids[:, :6], past_key_values=cache)
            for i in range(6, 12):
                token = ids[:, i : i + 1]
                inputs = {given: token if given == "input_ids" else llama.model.embed_tokens(token)}
                positions = {"position_ids": torch.tensor([[i]])} if has_positions else {}
                y = llama.model(**inputs, **positions, past_key_values=cache, use_cache=True)
        results.append(y.last_hidden_state)
        assert y.past_key_values is cache and cache.get_seq_length() == 12
        is_fused = not results[1:]
        assert parts if is_fused else not parts
        unfuse_activations_(llama)
        parts.clear()
    fuse_activations_(llama)
    assert ((results[0] - results[1]).norm() / results[1].norm()) < 0.01


@pytest.mark.parametrize("needed", [False, True])
def test_masks_of_a_model_around_the_decoder(parts, needed):
    """Gemma 3 with images makes {kind of layers: mask}."""
    model = make("gemma3_text", **FAMILIES["gemma3_text"][0])
    results = []
    for _ in range(2):
        cache, ids = QuantizedCache(model.config, "int8"), prompt(2, 7)
        seen = torch.arange(7) > 1
        with torch.no_grad():
            model(ids[:, :-2], past_key_values=cache)
            for i in (5, 6):
                masks = dict.fromkeys(
                    ["full_attention", "sliding_attention"], seen[None, None, None, : i + 1] if needed else None
                )
                token = {"inputs_embeds": model.model.embed_tokens(ids[:, i : i + 1]), "past_key_values": cache}
                y = model.model(**token, attention_mask=masks)
        results.append(y.last_hidden_state)
        assert bool(parts) == (not needed and not results[1:])
        unfuse_activations_(model)
        parts.clear()
    assert ((results[0] - results[1]).norm() / results[1].norm()) < 0.01


def in_place(module, args, y):
    y.mul_(1.25)


def replaced(module, args, y):
    return y * 1.25


def by_argument(module, args, kwargs):
    return args, {**kwargs, "position_ids": kwargs["position_ids"].clone()}


@pytest.mark.parametrize("hook", [in_place, replaced, by_argument])
def test_hosts_that_change_what_lies_between_layers(parts, hook):
    model = make(num_hidden_layers=4)
    generate(model, prompt())
    layer = model.model.layers[1]
    if hook is by_argument:
        handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
    else:
        handle = layer.register_forward_hook(hook)
    parts.clear()
    found = generate(model, prompt())
    assert not parts and "hooks" in block_reasons(model)["model"]
    assert torch.equal(generate(unfuse_activations_(model), prompt()), found)
    handle.remove()


def test_layers_left_out_and_replaced_and_outputs_asked_for(parts):
    model = make(num_hidden_layers=4)
    expected = generate(model, prompt())
    cache = QuantizedCache(model.config, "int8")
    decode(model, prompt(), cache)
    parts.clear()
    with torch.no_grad():
        model.config.num_hidden_layers = 2
        model(prompt()[:, :1], past_key_values=cache)
        assert not parts and [layer.get_seq_length() for layer in cache.layers] == [8, 8, 7, 7]
        model.config.num_hidden_layers = 4
        assert torch.equal(generate(model, prompt()), expected)
    model.model.layers[2] = layer = copy.deepcopy(model.model.layers[1])
    layer.self_attn.layer_idx, layer.self_attn.config = 2, model.config
    model.model.layers[3].mlp.down_proj.weight = torch.randn(128, 192)
    found = generate(model, prompt())
    for _ in range(8):  # trials wait
        assert torch.equal(generate(model, prompt()), found)
    assert parts[-1] == 4 and not torch.equal(found, expected)
    assert torch.equal(generate(unfuse_activations_(model), prompt()), found)
    fuse_activations_(model)
    states_asked = model.generate(prompt(), max_new_tokens=6, output_hidden_states=True, return_dict_in_generate=True)
    assert all(len(step) == 5 for step in states_asked.hidden_states)


def test_parts_of_a_model_on_their_own():
    mlp = unfuse_activations_(make()).model.layers[0].mlp
    assert fuse_blocks_(mlp) == 1 and base.is_fused(mlp)
    decoder_itself = fuse_activations_(unfuse_activations_(make()).model)
    assert type(decoder_itself) is LlamaModel and base.is_fused(decoder_itself.layers[0])


def test_modules_that_are_made_of_the_class_of_a_fused_one():
    model = make(num_hidden_layers=1)
    layers, expected = model.model.layers, generate(model, prompt())
    added = type(layers[0])(model.config, 0)  # as for a deeper model
    added.load_state_dict(dequantize_(copy.deepcopy(layers[0])).state_dict())
    layers[0] = added.eval()
    assert not base.is_fused(added) and torch.equal(generate(model, prompt()), expected)
    assert type(model.model)(model.config).eval()(prompt()).last_hidden_state.isfinite().all()
    fuse_activations_(quantize_(model, CONFIG))
    assert base.is_fused(added) and torch.equal(generate(model, prompt()), expected)
    assert type(unfuse_activations_(model).model) is LlamaModel


class Doubled(LlamaModel):
    def forward(self, *args, **kwargs):
        y = super().forward(*args, **kwargs)
        y.last_hidden_state *= 2
        return y


def test_code_of_others_stays_with_the_host(parts):
    model = make(num_hidden_layers=2)
    unfuse_activations_(model).model.__class__ = Doubled
    found = generate(fuse_activations_(model), prompt())
    assert not parts and "masks of Doubled are not known" in block_reasons(model)["model"]
    assert torch.equal(generate(unfuse_activations_(model), prompt()), found)


def test_gradients_autocast_prompts_and_torch_kernels_go_by_the_host(llama, monkeypatch):
    mlp, norm = llama.model.layers[0].mlp, llama.model.norm
    calls = []
    monkeypatch.setattr("hf_quant.kernels.native.blocks._run", lambda *given: calls.append(given))
    x = torch.randn(1, 2, 128, requires_grad=True)
    mlp(norm(x)).sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mlp(x.detach())
        mlp(torch.randn(1, base.MAX_ROWS + 1, 128))
        with native.using(None):
            norm(x)
        assert not calls
        norm(x)
    assert calls


def test_compiled_models_hold_no_block(llama):
    x = torch.randn(1, 2, 128)
    with torch.no_grad():
        expected = llama.model.layers[0].mlp(x)
        found = torch.compile(llama.model.layers[0].mlp, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_copies_pickles_and_checkpoints(tmp_path):
    model = make()
    expected = generate(model, prompt())
    kinds = [type(module).__name__ for module in model.modules()]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(generate(other, prompt()), expected) and all(state.found for state in states(other))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert [type(module).__name__ for module in loaded.modules()] == kinds
    assert torch.equal(generate(loaded, prompt()), expected) and all(state.found for state in states(loaded))
    config = QuantizerConfig(**CONFIG, fuse_activations=False)
    assert not states(AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config))
    plain = dequantize_(model)
    assert not states(plain) and [type(m).__name__ for m in plain.modules()][:5] == kinds[:5]
    assert isinstance(plain.model.norm, type(AutoModelForCausalLM.from_config(plain.config).model.norm))
    death = weakref.ref(loaded.model.layers[0].mlp)
    del loaded
    assert death() is None


def test_config_plan_and_errors():
    config = {**CONFIG, "fuse_activations": False}
    assert not states(make(config=config))
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL))
    found = "LlamaModel (1), LlamaDecoderLayer (2), LlamaAttention (2), LlamaMLP (2), LlamaRMSNorm (5)"
    assert f"one call each on CPUs, fewer launches on GPUs, where a trial agrees: {found}" in str(plan(plain, CONFIG))
    assert "one call each" not in str(plan(plain, config))
    with pytest.raises(ValueError, match="nothing to fuse in this LlamaForCausalLM"):
        fuse_activations_(plain)


def test_next_tokens_only_of_layers_that_take_them(llama):
    cache = QuantizedCache(llama.config, "int8")
    layer, sizes = cache.layers[0], (2, 32, torch.float32)
    assert next_tokens(layer, 2, 1, *sizes) is None  # a single first one
    found = next_tokens(layer, 2, 5, *sizes)
    assert found.place == (0, 5, -1) and layer.get_seq_length() == 0
    decode(llama, prompt(2), cache)
    assert next_tokens(layer, 2, 3, *sizes).place == (0, 10, 0)
    found = next_tokens(layer, 2, 1, *sizes)
    assert found.place == (0, 8, 0) and layer.get_seq_length() == 7
    found.done()
    assert layer.get_seq_length() == 8
    for B, *other in ((1, 2, 32, torch.float32), (2, 4, 32, torch.float32), (2, 2, 16, torch.float32)):
        assert next_tokens(layer, B, 1, *other) is None
    assert next_tokens(layer, 2, 1, 2, 32, torch.bfloat16) is None and next_tokens(object(), 2, 1, *sizes) is None
    fixed = QuantizedCache(llama.config, max_cache_len=32)
    assert next_tokens(fixed.layers[0], 2, 5, *sizes) is None
    decode(llama, prompt(2), fixed)
    assert next_tokens(fixed.layers[0], 2, 1, *sizes) is None


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_next_tokens_are_where_each_layer_has_its_own(kind):
    """Beyond the first block of 256 columns, beyond windows, and after changes of the cache."""
    model = make(kind, **({} if kind == "llama" else FAMILIES[kind][0]))
    cache = QuantizedCache(model.config, "int8")
    for layer in cache.layers:
        if hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
    decode(model, prompt(3, 250), cache)
    shape = cache.layers[0].k_codes.shape

    def find(rows, count):
        sizes = (shape[1], model.config.head_dim, torch.float32)
        return [next_tokens(layer, rows, count, *sizes) for layer in cache.layers]

    changes = {
        2: lambda: cache.crop(-2),
        4: lambda: cache.reorder_cache(torch.tensor([2, 0, 1])),
        6: lambda: cache.batch_select_indices(torch.tensor([0, 2])),
    }
    tokens, lost = Places(find(3, 1), [None] * len(cache.layers)), []
    for i in range(250):
        changes.get(i, lambda: None)()
        count = 1 + i % 2
        places, found = tokens.next(count), find(2 if i >= 6 else 3, count)
        if places is None:
            lost.append(i)
            tokens = Places(found, [None] * len(cache.layers))
            places = tokens.next(count)
        assert places == [number for token in found for number in token.place]
        tokens.done(count)
    assert lost[:2] == [4, 6] and len(lost) == 3  # the last one where the memory was full
    assert Places(found, [200] * len(cache.layers)).next(1) is None  # longer than the window
    cache.reset()
    assert tokens.next(1) is None


@pytest.mark.parametrize("parallel", [True, False])
def test_how_a_layer_with_small_weights_adds_up(parallel):
    """Beside the x of a trial they are nearly nothing, beside that of the model they are not."""
    sizes = {"num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
    sizes |= {"vocab_size": 96, "num_hidden_layers": 2}
    given = AutoConfig.for_model("gpt_neox", use_parallel_residual=parallel, **sizes)
    model = AutoModelForCausalLM.from_config(given, dtype=torch.bfloat16).eval()
    quantize_(model, {"weights": "int4", "group_size": 32})
    with torch.no_grad():
        found = model(prompt(2)).logits.float()
        assert not any(block_reasons(model)[f"gpt_neox.layers.{i}"] for i in range(2))
        expected = unfuse_activations_(model)(prompt(2)).logits.float()
    assert (found - expected).norm() / expected.norm() < 0.05


def test_a_shared_expert_that_adds_little_keeps_its_gate():
    """Beside the results of the other experts in a trial it vanishes in bf16."""
    sizes = {**SMALL, **FAMILIES["qwen2_moe"][0], "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2_moe", **sizes), dtype=torch.bfloat16).eval()
    model.model.layers[0].mlp.shared_expert.down_proj.weight.data *= 0.1
    quantize_(model, {"weights": "int8"})
    x = torch.randn(1, 5, 128, generator=torch.Generator().manual_seed(1)).bfloat16() / 100
    with torch.no_grad():
        found = model.model.layers[0].mlp(x).float()
        assert block_reasons(model)["model.layers.0.mlp"] is None
        expected = unfuse_activations_(model).model.layers[0].mlp(x).float()
    assert (found - expected).norm() / expected.norm() < 0.05


def test_settings_that_change_after_a_call():
    def change(model):
        for layer in model.model.layers:
            layer.self_attn.scaling *= 3
            layer.input_layernorm.variance_epsilon = 1.0
            layer.mlp.gate.top_k = 1

    model, host = make("mixtral", num_local_experts=8), unfuse_activations_(make("mixtral", num_local_experts=8))
    before = generate(model, prompt())
    change(model)
    change(host)
    with torch.no_grad():
        found, expected = (each(prompt()).logits for each in (model, host))
        assert (found - expected).norm() / expected.norm() < 1e-4
    after = generate(model, prompt())
    assert torch.equal(after, generate(host, prompt())) and not torch.equal(after, before)
