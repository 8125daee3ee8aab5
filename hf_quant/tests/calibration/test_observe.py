"""Calibration sees the inputs of each layer once, rotated as its product rotates them, without padding."""

import copy
import re

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_quant import Calibration, QuantizerConfig, quantize_
from hf_quant.calibration.observe import Moments
from hf_quant.kernels import hadamard
from hf_quant.modules.rotation import signs
from hf_quant.scheme import InputTransform
from hf_quant.tests.modules.test_experts import HOSTS


PLAIN = {"algorithm": "gptq", "input_transform": "none"}
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
IDS = torch.randint(3, 64, (3, 40), generator=torch.Generator().manual_seed(0))


def llama(**fields) -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **HEADS, **fields})).eval()


def seen_by(model: nn.Module, name: str, *args, **kwargs) -> Tensor:
    """The inputs [any, K] of a layer in one call of the model."""
    found = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda module, args: found.append(args[0].detach()))
    model(*args, **kwargs)
    hook.remove()
    return torch.cat([x.flatten(0, -2) for x in found]).float()


def assert_recorded(statistics, x: Tensor) -> None:
    """Means, largest values and held-out inputs are those of x [any, K]."""
    held = statistics.held_out
    kept = x if held is None else x[~(x[:, None] == held[None]).all(-1).any(1)]
    assert statistics.num_tokens == len(kept) == len(x) - (0 if held is None else len(held))
    torch.testing.assert_close(statistics.amax, kept.abs().amax(0))
    if statistics.hessian is not None:
        torch.testing.assert_close(statistics.hessian, kept.t() @ kept / len(kept), rtol=1e-4, atol=1e-5)
    if statistics.second_moment is not None:
        torch.testing.assert_close(statistics.second_moment, kept.square().mean(0))


@pytest.mark.parametrize("kind", ["hessian", "second_moment", "amax"])
def test_statistics_are_of_what_the_layer_was_given(kind):
    model = llama()
    with Calibration(model, QuantizerConfig("int4", **PLAIN), kind=kind) as calibration, torch.no_grad():
        model(IDS[:2])
        model(IDS[2:])
    for name in ("q_proj", "o_proj"):
        name = f"model.layers.1.self_attn.{name}"
        assert_recorded(calibration.statistics(name)["weight"][0], seen_by(model, name, IDS))
    assert calibration.unseen == [] and "lm_head" not in calibration.observed


def test_inputs_are_rotated_as_the_product_rotates_them():
    model, name = llama(), "model.layers.0.mlp.down_proj"  # 96 columns: blocks of 32
    calibration = Calibration(model, QuantizerConfig("int4", algorithm="gptq"))
    assert calibration.transform(name) == InputTransform(32)
    with calibration, torch.inference_mode():
        model(IDS)
    x = seen_by(model, name, IDS)
    rotated = hadamard(x, signs(InputTransform(32), 96, x.device), block_size=32)
    assert_recorded(calibration.statistics(name)["weight"][0], rotated)


def test_layers_that_read_one_tensor_share_their_statistics():
    model = llama()
    with Calibration(model, QuantizerConfig("int4", **PLAIN)) as calibration, torch.no_grad():
        for _ in range(3):
            model(IDS)
    found = {
        n: calibration.statistics(f"model.layers.0.{n}")["weight"][0]
        for n in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
        )
    }
    q, k, v, o, gate, up = found.values()
    assert q is k is v and gate is up and len({id(q), id(o), id(gate)}) == 3
    assert q.num_tokens + len(q.held_out) == 3 * IDS.numel()


class Changing(nn.Module):
    """Two layers that read one tensor in the first call, and not in later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(64, 64), nn.Linear(64, 64), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.first(x) + self.second(x if self.calls == 1 else x + 1)


def test_layers_that_part_have_statistics_of_their_own():
    model, x = Changing(), torch.randn(3, 8, 64)
    with Calibration(model, QuantizerConfig("int4", **PLAIN), kind="amax") as calibration, torch.no_grad():
        for part in x:
            model(part)
    first, second = (calibration.statistics(name)["weight"][0] for name in ("first", "second"))
    assert first is not second and first.num_tokens == 24
    torch.testing.assert_close(first.amax, x.flatten(0, 1).abs().amax(0))
    assert bool((second.amax >= (x[1:] + 1).flatten(0, 1).abs().amax(0)).all())


def test_padding_is_left_out():
    torch.manual_seed(0)
    model = BertModel(BertConfig(**SIZES, num_attention_heads=2)).eval()
    mask = torch.ones_like(IDS)
    mask[0, 25:] = 0
    name = "encoder.layer.1.intermediate.dense"
    with Calibration(model, QuantizerConfig("int4", **PLAIN), kind="second_moment") as calibration, torch.no_grad():
        model(input_ids=IDS, attention_mask=mask)
    x = seen_by(model, name, input_ids=IDS, attention_mask=mask).view(*IDS.shape, -1)
    assert_recorded(calibration.statistics(name)["weight"][0], x[mask.bool()])


@pytest.mark.parametrize("host", ["t5", "bart"])
def test_padding_of_both_sequences_is_left_out(host):
    sizes = {"vocab_size": 64, "d_model": 64, "decoder_start_token_id": 0}
    own = {"d_kv": 32, "d_ff": 64, "num_heads": 2, "num_layers": 1}
    parts = {f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    if host == "t5":
        model = T5ForConditionalGeneration(T5Config(**sizes, **own)).eval()
    else:
        model = BartForConditionalGeneration(BartConfig(**sizes, **parts)).eval()
    mask, decoder_mask = torch.ones_like(IDS), torch.ones_like(IDS)
    mask[:, 30:], decoder_mask[:, 20:] = 0, 0
    both = {"input_ids": IDS, "decoder_input_ids": IDS, "attention_mask": mask}
    for more, expected in (({}, IDS), ({"decoder_attention_mask": decoder_mask}, decoder_mask)):
        with Calibration(model, QuantizerConfig("int4", **PLAIN), kind="amax") as calibration, torch.no_grad():
            model(**both, **more)
        for name in calibration.observed:
            found = calibration.statistics(name)["weight"][0].num_tokens
            of_encoder = "encoder." in name or re.search(r"(EncDec|encoder_attn).*\.[kv](_proj)?$", name)
            assert found == (mask.sum() if of_encoder else expected.count_nonzero()), name


def test_padding_among_the_tokens_of_one_row_is_left_out():
    mask = torch.ones_like(IDS)
    mask[:, 30:] = 0
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 96, "num_hidden_layers": 1}
    for cls, config in (
        HOSTS["mixtral"][1:],
        HOSTS["gpt_oss"][1:],
        (OPTForCausalLM, OPTConfig(**sizes, num_attention_heads=2)),
    ):
        model = cls(copy.deepcopy(config)).eval()
        with torch.no_grad():
            expected = model(input_ids=IDS, attention_mask=mask).logits
            with Calibration(model, QuantizerConfig("int4", **PLAIN), kind="amax") as calibration:
                logits = model(input_ids=IDS, attention_mask=mask).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        for name in calibration.observed:
            for moments in calibration._moments[name].values():
                seen = sum(each.num_tokens for each in moments)
                assert seen == mask.sum() * (1 if len(moments) == 1 else model.config.num_experts_per_tok), name


def test_a_mask_is_of_its_own_model_in_a_model_of_two():
    sizes, vision = {**SIZES, "num_attention_heads": 2}, {"image_size": 32, "patch_size": 16}
    model = CLIPModel(CLIPConfig(text_config=sizes, vision_config={**sizes, **vision})).eval()
    ids, mask = IDS[:, :5], (torch.arange(5) < 3).expand(3, 5)  # as many tokens as an image has patches
    with Calibration(model, QuantizerConfig("int4", **PLAIN), kind="amax") as calibration, torch.no_grad():
        model(input_ids=ids, attention_mask=mask, pixel_values=torch.randn(3, 3, 32, 32))
    for name in calibration.observed:
        if ".layers." in name:
            found = calibration.statistics(name)["weight"][0].num_tokens
            assert found == (9 if name.startswith("text") else 15), name


def test_a_mask_may_have_its_place_among_the_arguments():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=2, eos_token_id=1)).eval()
    mask = torch.ones_like(IDS)
    mask[:, 30:] = 0
    with Calibration(model, QuantizerConfig("int4", **PLAIN), kind="amax") as calibration, torch.no_grad():
        model(IDS, None, mask)
    assert calibration.statistics("transformer.h.0.mlp.c_fc")["weight"][0].num_tokens == mask.sum()


def test_conv1d_of_transformers():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=2, n_positions=64)).eval()
    config = QuantizerConfig("int4", algorithm="gptq")
    with Calibration(model, config) as calibration, torch.no_grad():
        model(IDS)
    base = model(IDS).logits
    plain = quantize_(copy.deepcopy(model), QuantizerConfig("int4", input_transform="hadamard"))(IDS).logits
    solved = quantize_(model, config, calibration=calibration)(IDS).logits
    assert (solved - base).square().sum() < 0.6 * (plain - base).square().sum()


@pytest.mark.parametrize("host", HOSTS)
def test_experts_see_their_own_tokens(host):
    torch.manual_seed(0)
    _, cls, config = HOSTS[host]
    model = cls(copy.deepcopy(config)).eval()
    with torch.no_grad():
        expected = model(IDS).logits
    name = "model.layers.1.mlp.experts"
    experts = model.get_submodule(name)
    own, hidden = experts.forward, []
    hook = experts.register_forward_pre_hook(lambda module, args: hidden.append(args[:2]))
    with Calibration(model, QuantizerConfig("int4", **PLAIN), kind="second_moment") as calibration, torch.no_grad():
        logits = model(IDS).logits
    hook.remove()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert experts.forward == own and "forward" not in experts.__dict__
    (x, index), moments = hidden[0], calibration._moments[name]
    for expert, found in enumerate(moments["gate_up_proj"]):
        tokens = x[(index == expert).any(-1)]
        assert found.num_tokens == len(tokens) == moments["down_proj"][expert].num_tokens
        torch.testing.assert_close(found.total, tokens.square().sum(0))


def test_an_expert_with_few_tokens_is_filled_up_with_those_of_the_others():
    torch.manual_seed(0)
    _, cls, config = HOSTS["mixtral"]
    model = cls(copy.deepcopy(config)).eval()
    with Calibration(model, QuantizerConfig("int4", **PLAIN)) as calibration, torch.no_grad():
        model(IDS[:, :6])  # of 4 experts each sees fewer tokens than it has inputs
    name = "model.layers.0.mlp.experts"
    counts = [m.num_tokens for m in calibration._moments[name]["gate_up_proj"]]
    raw = [m.total / m.num_tokens for m in calibration._moments[name]["gate_up_proj"]]
    found = calibration.statistics(name)["gate_up_proj"]
    common = sum(n * h for n, h in zip(counts, raw)) / sum(counts)
    for n, own, s in zip(counts, raw, found):
        share = min(n / 64, 1)
        torch.testing.assert_close(s.hessian, share * own + (1 - share) * common)
    calibration._moments[name]["gate_up_proj"][0] = Moments("hessian", None)  # one that was never chosen
    unseen = calibration.statistics(name)["gate_up_proj"][0]
    assert unseen.num_tokens == 1 and bool((unseen.hessian.diagonal() > 0).any())


def test_the_model_is_as_it_was_also_after_an_error():
    model = llama()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises(KeyError), Calibration(model, QuantizerConfig("int4", **PLAIN)):
        raise KeyError
    assert all(
        not m._forward_pre_hooks and dict(m.__dict__).keys() == before[n].keys() for n, m in model.named_modules()
    )


def test_nan_in_an_input_names_the_layer():
    model = llama()
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[0] = float("inf")
    with pytest.raises(ValueError, match=r"the input of model.layers.1.self_attn.q_proj contains NaN or inf"):
        with Calibration(model, QuantizerConfig("int4", **PLAIN)), torch.no_grad():
            model(IDS)
    with pytest.raises(ValueError, match="in batch 0"):
        quantize_(model, QuantizerConfig("int4", **PLAIN), calibration=IDS)
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear


def test_momentum_is_a_moving_average():
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(3, 8, 64)
    config = QuantizerConfig("int4", **PLAIN)
    with Calibration(model, config, kind="amax", momentum=0.9) as calibration, torch.no_grad():
        for part in x:
            model(part)
    expected = x[0].abs().amax(0)
    for part in x[1:]:
        expected = 0.9 * expected + 0.1 * part.abs().amax(0)
    torch.testing.assert_close(calibration.statistics("0")["weight"][0].amax, expected)


def test_wrong_arguments():
    model = llama()
    with pytest.raises(ValueError, match="no layer needs data"):
        Calibration(model, "int4")
    with pytest.raises(ValueError, match="allowed: amax, second_moment, hessian"):
        Calibration(model, QuantizerConfig("int4", **PLAIN), kind="hessians")
    with pytest.raises(ValueError, match="momentum is 1"):
        Calibration(model, QuantizerConfig("int4", **PLAIN), momentum=1)
    with (
        pytest.raises(ValueError, match="passes in 0.00 GB"),
        Calibration(model, QuantizerConfig("int4", **PLAIN), max_memory=1),
    ):
        pass
