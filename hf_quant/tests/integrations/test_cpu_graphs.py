"""`capture_generate` on a CPU: the tokens and logits of eager `generate` to the bit, and what ends a captured step."""

import copy
import gc
import threading
import weakref

import pytest
import torch
import transformers
from torch import Tensor, nn

from hf_quant import capture_generate, quantize_
from hf_quant.integrations.transformers.blocks.angles import POSITIONS, Angles, X
from hf_quant.integrations.transformers.graphs import cpu
from hf_quant.kernels.native import active


pytestmark = pytest.mark.skipif(active() is None, reason="the native kernels are not built")
_SMALL = dict(
    vocab_size=96,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    bos_token_id=0,
    eos_token_id=None,
    pad_token_id=2,
)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_SMALL),
    "gemma2": lambda: transformers.Gemma2Config(**_SMALL, head_dim=32, sliding_window=16),  # capped logits
    "granite": lambda: transformers.GraniteConfig(**_SMALL, logits_scaling=3.0),
    "cohere": lambda: transformers.CohereConfig(**_SMALL),  # LayerNorm, one more factor
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_SMALL),  # ids without a name
    "gpt2": lambda: transformers.GPT2Config(**_SMALL),  # learned positions
    # A model that goes around a child to its decoder.
    "opt": lambda: transformers.OPTConfig(**_SMALL, ffn_dim=192, word_embed_proj_dim=128),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**_SMALL, **_EXPERTS, head_dim=32),
}
QUANTIZED = {"weights": "int4", "cpu_activations": "int8", "kv_cache": "int8", "modules": {"lm_head": "int4"}}


def make(name: str = "llama", config=QUANTIZED, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return quantize_(model, config) if config is not None else model


def run(model: nn.Module, rows: int = 1, padding: int = 0, tokens: int = 20, ids=None, **kwargs) -> tuple[Tensor, ...]:
    """(tokens, logits of each step) of a generation."""
    if ids is None:
        ids = torch.randint(3, 96, (rows, 7), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    options = {"max_new_tokens": tokens, "do_sample": False, "attention_mask": mask, **kwargs}
    found = model.generate(ids, return_dict_in_generate=True, output_logits=True, **options)
    return found.sequences, *found.logits


def are_equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def assert_captured(model: nn.Module, **options) -> None:
    expected = run(model, **options)
    with capture_generate(model) as graphs:
        assert are_equal(run(model, **options), expected)
    assert not graphs.reasons and graphs.num_captures == 1 and graphs.num_replays > 10


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    model = make()
    run(model)  # makes its blocks
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_and_logits_of_eager_generate(name):
    model = make(name)
    cases = [dict(), dict(rows=3), dict(rows=3, padding=4), dict(tokens=80)]
    expected = [run(model, **case) for case in cases]
    with capture_generate(model) as graphs:
        for case, before in zip(cases, expected):
            assert are_equal(run(model, **case), before)
        assert not graphs.reasons and graphs.num_captures == 2  # with padding and without
        assert graphs.num_replays > 110
    assert are_equal(run(model), expected[0]) and "get_compiled_call" not in model.__dict__


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"weights": "int8", "kv_cache": "int4", "modules": {"lm_head": "int8"}}, torch.float16),
        ({"weights": "nf4", "kv_cache": "fp8_e4m3"}, torch.float32),
    ],
    ids=str,
)
def test_formats_and_dtypes(config, dtype):
    model = make(config=config, dtype=dtype)
    expected = run(model), run(model, do_sample=False, output_scores=True, repetition_penalty=1.2)
    with capture_generate(model) as graphs:
        assert are_equal(run(model), expected[0])
        assert are_equal(run(model, output_scores=True, repetition_penalty=1.2), expected[1])
        assert not graphs.reasons and graphs.num_replays > 30


def test_sampling(llama):
    torch.manual_seed(1)
    expected = run(llama, do_sample=True)
    with capture_generate(llama) as graphs:
        torch.manual_seed(1)
        assert are_equal(run(llama, do_sample=True), expected) and graphs.num_replays


def test_what_is_replaced_between_generations_is_noticed():
    model = make()
    with capture_generate(model) as graphs:
        run(model)
        assert graphs.num_captures == 1
        model.model.norm.weight = nn.Parameter(torch.rand(128, dtype=torch.bfloat16))
        other = copy.deepcopy(model)
        assert are_equal(run(model), run(other)) and graphs.num_captures == 2
        seen = []
        with model.lm_head.register_forward_hook(lambda *_: seen.append(1)):
            before = graphs.num_replays
            run(model)
            assert len(seen) == 20 and graphs.num_replays == before and len(graphs.reasons) == 1
        assert are_equal(run(model), run(other)) and graphs.num_replays > before
        handle = model.register_forward_hook(lambda *_: seen.append(2))
        run(model)
        handle.remove()
        assert seen.count(2) == 20


def test_a_model_that_is_gone_leaves_nothing():
    model = make()
    capture_generate(model)
    run(model)
    gone = weakref.ref(model.model.layers[0].mlp.gate_proj.qdata.untyped_storage())
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_a_cache_in_16_bit():
    model = make(config="int4")
    run(model, rows=2, padding=3)
    assert_captured(model, rows=2, padding=3)


def test_a_captured_step_calls_no_module(llama, monkeypatch):
    calls, host = [], nn.Module.__call__
    with capture_generate(llama) as graphs:
        expected = run(llama)
        monkeypatch.setattr(nn.Module, "__call__", lambda self, *a, **k: (calls.append(self), host(self, *a, **k))[1])
        before = graphs.num_replays
        assert are_equal(run(llama), expected)
        assert graphs.num_replays - before == 19 and calls.count(llama) == 1 and calls.count(llama.lm_head) == 1


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        (None, {}, "LlamaModel has no block"),
        (QUANTIZED, {"num_beams": 2}, "beam search"),
        (QUANTIZED, {"cache_implementation": "static"}, "the cache has a fixed size"),
        (QUANTIZED, {"use_cache": False}, "use_cache is False"),
    ],
    ids=str,
)
def test_what_runs_as_before(config, options, reason):
    model = make(config=config)
    options = {"max_new_tokens": 8, "do_sample": False, **options}
    ids = torch.tensor([[5, 6, 7]])
    expected = model.generate(ids, **options)
    with capture_generate(model) as graphs:
        assert torch.equal(model.generate(ids, **options), expected)
    assert graphs.num_replays == 0 and list(graphs.reasons) == [reason]


def test_angles_of_another_dtype():
    """OLMo 2 turns heads by angles in fp32, whatever its own dtype is."""
    torch.manual_seed(0)
    config = transformers.Olmo2Config(**_SMALL)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval()
    quantize_(model, QUANTIZED)
    assert_captured(model)


@pytest.mark.parametrize("what", ["text", "padded text", "an image"])
def test_positions_of_text_height_and_width(what):
    """Qwen's models of vision have rows of positions, of which the first is not for the angles."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    vision = {"hidden_size": 64, "out_hidden_size": 128, "depth": 1, "num_heads": 2, "intermediate_size": 96}
    text = {**_SMALL, "rope_parameters": rope}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=1, video_token_id=90)
    torch.manual_seed(0)
    model = quantize_(transformers.Qwen2_5_VLForConditionalGeneration(config).bfloat16().eval(), QUANTIZED)
    options = {"rows": 2, "padding": 2 * (what == "padded text"), "pad_token_id": 0}
    if what == "an image":
        options["ids"] = ids = torch.tensor([[5, 1, 1, 1, 1, 6, 7]] * 2)
        options |= {"mm_token_type_ids": (ids == 1).long(), "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}
        options["pixel_values"] = torch.randn(32, 1176).bfloat16()
    assert_captured(model, **options)


@pytest.mark.parametrize("what", ["text", "padded text", "an image"])
def test_decoders_of_multimodal_models(what):
    """Their decoder is given embeddings, by a model of vision and text; the image comes with the prompt."""
    vision = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, "projection_dim": 64}
    config = transformers.LlavaConfig(vision_config=vision, text_config=transformers.LlamaConfig(**_SMALL))
    config.image_token_index = 1
    torch.manual_seed(0)
    model = quantize_(transformers.LlavaForConditionalGeneration(config).bfloat16().eval(), QUANTIZED)
    options = {"rows": 2, "padding": 2 * (what == "padded text"), "pad_token_id": 0}
    if what == "an image":
        ids = torch.tensor([[5, 1, 1, 1, 1, 6, 7]] * 2)
        options |= {"ids": ids, "pixel_values": torch.randn(2, 3, 28, 28).bfloat16()}
    assert_captured(model, **options)


class _Given(transformers.LlamaForCausalLM):
    """A model whose steps are given one more tensor."""

    def prepare_inputs_for_generation(self, *args, **kwargs):
        return {**super().prepare_inputs_for_generation(*args, **kwargs), "of_others": torch.ones(1)}


class _Positions(transformers.LlamaForCausalLM):
    """A model that makes more of the arguments of its steps than they are."""

    def prepare_inputs_for_generation(self, input_ids, position_ids=None, **kwargs):
        assert position_ids.shape[-1] == input_ids.shape[-1]
        return super().prepare_inputs_for_generation(input_ids, position_ids=position_ids, **kwargs)


@pytest.mark.parametrize("kind", [transformers.LlamaForCausalLM, _Positions])
def test_masks_and_positions_are_made_ahead(kind, monkeypatch):
    model = quantize_(kind(CONFIGS["llama"]()).to(torch.bfloat16).eval(), QUANTIZED)
    expected = run(model, rows=2, padding=3, tokens=150)
    seen, real = [], cpu._Ahead.__init__
    monkeypatch.setattr(cpu._Ahead, "__init__", lambda *given: (seen.append(1), real(*given))[1])
    with capture_generate(model) as graphs:
        assert are_equal(run(model, rows=2, padding=3, tokens=150), expected)
        assert graphs.num_replays > 140 and len(seen) == (3 if kind is transformers.LlamaForCausalLM else 0)


def test_steps_with_unknown_inputs():
    model = quantize_(_Given(CONFIGS["llama"]()).eval(), QUANTIZED)
    expected = run(model)
    with capture_generate(model) as graphs:
        assert are_equal(run(model), expected)
    assert graphs.reasons == {"its steps are given of_others": 1} and graphs.num_captures == 0


def test_steps_that_differ_are_the_hosts(llama):
    """Two tokens at once, and a mask that comes up, in the middle of a generation."""
    with capture_generate(llama) as graphs, torch.no_grad():
        ids = torch.tensor([[5, 6, 7]])
        cache = llama.generate(ids, max_new_tokens=4, return_dict_in_generate=True).past_key_values
        decoder = graphs._decoders[cache]
        other = copy.deepcopy(cache)
        ids, positions = torch.tensor([[8]]), torch.tensor([[6]])
        inputs = dict(input_ids=ids, position_ids=positions, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1, 1]]))
        inputs.update(use_cache=True, return_dict=True)
        expected = llama(**inputs, past_key_values=other)
        assert torch.equal(decoder(**inputs, past_key_values=cache).logits, expected.logits)
        assert graphs.reasons == {"a step differs from the captured one": 1}
        inputs = dict(input_ids=torch.tensor([[8, 9]]), use_cache=True, return_dict=True)
        expected = llama(**inputs, past_key_values=other)
        assert torch.equal(decoder(**inputs, past_key_values=cache).logits, expected.logits)


class _Other(transformers.LlamaForCausalLM):
    """A model whose logits are fp32, and which keeps something of each call."""

    seen = 0

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.float()
        self.seen += 1
        return output


def test_a_model_that_does_more_stays_with_its_host():
    model = _Other(CONFIGS["llama"]()).to(torch.bfloat16).eval()
    quantize_(model, QUANTIZED)
    expected = run(model)
    with capture_generate(model) as graphs:
        assert are_equal(run(model), expected)
        assert list(graphs.reasons) == ["its logits are an unknown function of its head's result"]
    assert model.seen == 40


# Angles.


def rotary(**parameters) -> nn.Module:
    config = transformers.LlamaConfig(**_SMALL)
    config.rope_parameters = {"rope_theta": 10000.0, "rope_type": "default", **parameters}
    return transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("parameters", [{}, {"rope_type": "linear", "factor": 2.0}], ids=str)
def test_angles_of_many_positions_are_those_of_one(parameters):
    module, x = rotary(**parameters), torch.zeros(2, 1, 128, dtype=torch.bfloat16)
    angles, calls = Angles(module, [X], {"position_ids": POSITIONS}), []
    module.register_forward_hook(lambda *_: calls.append(1))
    for start in (0, 500):  # of the second sequence
        for step in range(70):
            positions = torch.tensor([[3 + start + step], [start + step]])
            assert all(map(torch.equal, angles(x, positions), module(x, positions)))
    assert len(calls) == 140 + 2 * 2 * 2


def test_angles_are_made_again_when_they_may_differ():
    module, x = rotary(), torch.zeros(1, 1, 128)
    angles = Angles(module, [X, POSITIONS], {})
    for position, change in ((5, None), (6, None), (7, "dtype"), (8, "buffer"), (9, "values"), (3, None), (40, None)):
        if change == "dtype":
            x = x.bfloat16()
        elif change == "buffer":
            module.inv_freq = module.inv_freq * 2
        elif change == "values":
            module.inv_freq.mul_(2)
        positions = torch.tensor([[position]])
        assert all(map(torch.equal, angles(x, positions), module(x, positions)))


def test_threads_share_angles():
    module, x = rotary(), torch.zeros(1, 1, 128)
    angles, wrong = Angles(module, [X, POSITIONS], {}), []

    def ask(start: int) -> None:
        for position in range(start, start + 200):
            positions = torch.tensor([[position]])
            if not all(map(torch.equal, angles(x, positions), module(x, positions))):
                wrong.append(position)

    threads = [threading.Thread(target=ask, args=(start,)) for start in (0, 300, 600)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_lengths_that_change_the_angles_are_not_looked_ahead_of():
    module = rotary(rope_type="dynamic", factor=2.0)
    angles = Angles(module, [X, POSITIONS], {})
    angles(torch.zeros(1, 1, 128), torch.tensor([[1000]]))
    assert not angles.looks_ahead and module.max_seq_len_cached == 1024, "as after position 1000 alone"
