"""PEFT over quantized models: adapters train, save, reload, merge (quantizing again) and unload."""

import copy
import warnings
from functools import partial

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn

from hf_quant import QuantizerConfig, dequantize_, quantize_
from hf_quant.integrations.peft import loftq_init_
from hf_quant.modules import QuantizedModule
from integration_tests.support.tiny_models import build, inputs


SCHEMES = (
    "int8",
    "fp8",
    "fp6",
    "nf4",
    "mxfp4",
    "nvfp4",
    "int4",
    "int3",
    "int2",
    "W8A8",
    "W8A8_FP8",
    "W4A8",
)
IDS = inputs("llama")["input_ids"]


def quantized(config: QuantizerConfig | str, name: str = "llama", dtype: torch.dtype = torch.float32) -> nn.Module:
    return quantize_(build(name, dtype), config)


def with_adapter(model: nn.Module, **fields) -> PeftModel:
    """A PEFT model with the same random adapter (or `fields`) each time; its B is not zero."""
    torch.manual_seed(1)
    fields = {"target_modules": "all-linear", "r": 4, "init_lora_weights": False, **fields}
    return get_peft_model(model, LoraConfig(**fields))


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(IDS).logits.float()


def change(y: Tensor, reference: Tensor) -> float:
    return ((y.float() - reference.float()).norm() / reference.float().norm()).item()


def assert_rounded_once_more(y: Tensor, adapted: Tensor, scheme: str) -> None:
    """The logits after a merge are off by what the quantization itself costs: 0.5 to 1.0 times that was measured."""
    rounding = change(logits(quantized(scheme)), logits(build("llama", torch.float32)))
    assert 0.1 * rounding < change(y, adapted) < 1.2 * rounding


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def worst(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    assert gradients.keys() == reference.keys() and gradients
    return max(change(gradients[name], reference[name]) for name in reference)


def codes(model: nn.Module) -> dict[str, Tensor]:
    stored = {name: p for name, p in model.state_dict().items() if name.rpartition(".")[2] in ("qdata", "scale")}
    return {name.replace(".base_layer", "").removeprefix("base_model.model."): p.clone() for name, p in stored.items()}


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def train(model: nn.Module, steps: int = 3, lr: float = 0.02) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for _ in range(steps):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_falls(losses: list[float]) -> None:
    assert losses[-1] < losses[0] - 0.01, losses


@pytest.mark.parametrize("scheme", SCHEMES)
def test_lora_gradients_are_those_over_the_dequantized_base(scheme):
    base = quantized(scheme)
    expected = gradients(with_adapter(dequantize_(copy.deepcopy(base))))
    got = gradients(with_adapter(base))
    if "A8" not in scheme:
        assert worst(got, expected) < 2e-4
        # What this tolerance tells apart: the weights before they were rounded.
        assert worst(gradients(with_adapter(build("llama", torch.float32))), expected) > 2e-3
    else:  # the forward rounds activations, too: close, but not equal
        flat, reference = (torch.cat([g.flatten() for g in gs.values()]) for gs in (got, expected))
        assert torch.nn.functional.cosine_similarity(flat, reference, dim=0) > 0.9
        assert worst(got, expected) > 1e-4


@pytest.mark.parametrize("scheme", SCHEMES)
def test_lora_trains_saves_reloads_merges_and_unloads(scheme, tmp_path):
    base = quantized(scheme)
    before, base_logits = codes(base), logits(base)
    model = with_adapter(base)
    assert_falls(train(model))
    assert equal(codes(model), before)
    adapted = logits(model)

    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(quantized(scheme), tmp_path)), adapted)

    unmerged = copy.deepcopy(model)
    unmerged.merge_adapter()
    unmerged.unmerge_adapter()
    assert_rounded_once_more(logits(unmerged), adapted, scheme)

    merged = copy.deepcopy(model).merge_and_unload()
    assert isinstance(merged.model.layers[0].mlp.down_proj, QuantizedModule)
    assert_rounded_once_more(logits(merged), adapted, scheme)
    assert change(logits(merged), base_logits) > 0.8  # the adapter is in there
    assert equal(codes(copy.deepcopy(model).merge_and_unload(safe_merge=True)), codes(merged))

    assert torch.equal(logits(model.unload()), base_logits)


@pytest.mark.parametrize("scheme", ["int8", "int4", "nvfp4"])
def test_a_merge_is_one_quantization_of_the_sum(scheme):
    base = quantized(scheme)
    merged = with_adapter(copy.deepcopy(base)).merge_and_unload()
    expected = with_adapter(dequantize_(base)).merge_and_unload()
    assert equal(codes(merged), codes(quantize_(expected, scheme)))


@pytest.mark.parametrize("wrap", [get_peft_model, partial(get_peft_model, mixed=True)])
def test_parameters_are_counted_as_weights(wrap, capsys):
    counts = []
    for config in (None, "int4", QuantizerConfig("int3", modules={"lm_head": "int8"})):
        base = build("llama") if config is None else quantize_(build("llama"), config)
        model = wrap(base, LoraConfig(target_modules=["q_proj"], r=4))
        model.print_trainable_parameters()
        counts.append((capsys.readouterr().out, model.get_nb_trainable_parameters()))
    assert counts[0] == counts[1] == counts[2]


def test_a_merged_model_saves_and_reloads(tmp_path):
    merged = with_adapter(quantized("int4")).merge_and_unload()
    merged.save_pretrained(tmp_path)
    assert torch.equal(logits(type(merged).from_pretrained(tmp_path)), logits(merged))


def test_a_merge_into_the_dequantized_base_saves_and_reloads_as_a_plain_model(tmp_path):
    model = with_adapter(quantized("int2"))
    expected = logits(model)
    merged = dequantize_(model).merge_and_unload()
    assert change(logits(merged), expected) < 1e-4
    merged.save_pretrained(tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
    assert torch.equal(logits(type(merged).from_pretrained(tmp_path)), logits(merged))


@pytest.mark.parametrize("scheme", ["int4", "W8A8", "int2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lora_trains_in_16_bit(scheme, dtype):
    model = with_adapter(quantized(scheme, dtype=dtype))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert_falls(train(model))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 16, 3, padding=1)
        self.grouped = nn.Conv2d(16, 16, 3, groups=2)
        self.last = nn.Conv1d(16, 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.grouped(torch.relu(self.first(x)))).flatten(2))


@pytest.mark.parametrize(("target", "dora"), [("first", False), ("first", True), ("grouped", False), ("last", False)])
def test_convolutions(target, dora):
    torch.manual_seed(0)
    config = QuantizerConfig(None, modules={"first": "int8", "grouped": "int8", "last": "int8"})
    base, x = quantize_(Convolutions(), config), torch.randn(2, 8, 6, 6)
    fields = {"target_modules": [target], "use_dora": dora}
    expected, model = with_adapter(dequantize_(copy.deepcopy(base)), **fields), with_adapter(base, **fields)
    for adapted in (expected, model):
        adapted(x).square().mean().backward()
    got = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert worst(got, {name: p.grad for name, p in expected.named_parameters() if p.requires_grad}) < 1e-4
    y = model(x).detach()
    if target == "grouped":
        with pytest.raises(NotImplementedError, match="groups"):  # of PEFT, for 16-bit weights too
            model.merge_and_unload()
    else:
        merged = model.merge_and_unload()
        assert isinstance(getattr(merged, target), QuantizedModule)
        assert 0 < change(merged(x), y) < 0.02


EMBEDDING = QuantizerConfig("int8", modules={"model.embed_tokens": "int8"})


@pytest.mark.parametrize(
    ("base", "config", "fields", "path"),
    [
        ("llama", EMBEDDING, {"target_modules": ["embed_tokens", "q_proj"]}, "model.embed_tokens"),
        ("gpt2", "int8", {}, "transformer.h.0.mlp.c_proj"),
        ("gpt2", "int8", {"target_modules": ["c_proj"], "fan_in_fan_out": True}, "transformer.h.0.mlp.c_proj"),
    ],
)
def test_embeddings_and_conv1d_of_gpt2(base, config, fields, path):
    base = quantized(config, base)
    expected, model = with_adapter(dequantize_(copy.deepcopy(base)), **fields), with_adapter(base, **fields)
    assert worst(gradients(model), gradients(expected)) < 2e-4
    assert_falls(train(model))
    adapted = logits(model)
    merged = model.merge_and_unload()
    assert 0 < change(logits(merged), adapted) < 0.02
    assert type(merged.get_submodule(path)).__name__ in ("QuantEmbedding", "QuantConv1D")


def test_the_head_trains_in_full_beside_the_adapter(tmp_path):
    model = with_adapter(quantized("int4"), target_modules=["q_proj"], modules_to_save=["lm_head"])
    head = model.base_model.model.lm_head.modules_to_save["default"].weight
    start = head.detach().clone()
    assert_falls(train(model))
    assert not torch.equal(head, start)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(quantized("int4"), tmp_path)), logits(model))


@pytest.mark.parametrize("scheme", ["int4", "fp8", "nvfp4"])
def test_prepare_for_kbit_training_leaves_codes_alone(scheme):
    model = quantized(scheme, dtype=torch.bfloat16)
    stored = {name: p.clone() for name, p in model.state_dict().items() if not p.is_floating_point()}
    model = prepare_model_for_kbit_training(model)
    state = model.state_dict()
    assert stored and all(torch.equal(state[name], p) for name, p in stored.items())
    assert {p.dtype for p in model.parameters() if p.is_floating_point()} == {torch.float32}
    model = with_adapter(model)
    model.gradient_checkpointing_enable()
    assert_falls(train(model.train()))
    assert all(torch.isfinite(p).all() for p in model.parameters() if p.requires_grad)


def test_adapters_of_the_model_itself(tmp_path):
    model = quantized("int4")
    base = logits(model)
    torch.manual_seed(1)
    model.add_adapter(LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False))
    assert_falls(train(model))
    adapted = logits(model)
    model.save_pretrained(tmp_path)
    assert not any(tmp_path.glob("model*.safetensors"))  # the adapter alone
    reloaded = quantized("int4")
    reloaded.load_adapter(tmp_path)
    assert torch.equal(logits(reloaded), adapted)
    reloaded.disable_adapters()
    assert torch.equal(logits(reloaded), base)


@pytest.mark.parametrize(
    "config",
    [
        peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10, init_r=4, task_type="CAUSAL_LM"),
        LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3, 4]),
    ],
    ids=lambda config: type(config).__name__,
)
def test_methods_that_begin_with_no_change(config):
    """Which therefore train before they are compared; other methods are in test_host_flows.py."""
    model = get_peft_model(quantized("int8"), copy.deepcopy(config))
    losses = train(model)
    assert losses[-1] < losses[0]
    adapted = logits(model)
    assert change(logits(model.merge_and_unload()), adapted) < 0.02


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("fields", ["int3", {"weights": "int2", "input_transform": "hadamard"}], ids=str)
def test_a_start_that_corrects_the_rounding(name, fields):
    reference = build(name, torch.float32)
    model = get_peft_model(quantized(fields, name), LoraConfig(r=8, lora_alpha=4, target_modules="all-linear"))
    ids = inputs(name)["input_ids"]
    with torch.no_grad():
        expected, before = (m(ids).logits for m in (reference, model))
    names = loftq_init_(model, reference)
    with torch.no_grad():
        after = model(ids).logits
    assert change(after, expected) < 0.95 * change(before, expected)
    assert len(names) == sum(isinstance(m, QuantizedModule) and m.kind == "linear" for m in model.modules())
    # Rank by rank it is the best correction of the weight.
    layer = model.get_submodule(f"base_model.model.{names[-1]}")
    base = layer.get_base_layer()
    weight = reference.get_submodule(names[-1]).weight
    error = base.to_matrix("weight", weight - base.dequantize_weight("weight", torch.float32)).detach()
    update = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    left = (error - update).norm() ** 2
    best = torch.linalg.svdvals(error)[8:].square().sum()
    assert best * (1 - 1e-4) <= left <= 1.02 * best


def test_a_start_needs_the_weights_that_were_quantized():
    reference, lora = build("llama", torch.float32), LoraConfig(r=4, target_modules="all-linear")
    with pytest.raises(ValueError, match="no quantized linear layer of this PeftModel has a LoRA named 'default'"):
        loftq_init_(get_peft_model(build("llama", torch.float32), lora), reference)
    model = get_peft_model(quantized("int4"), lora)
    before = copy.deepcopy(model.state_dict())
    for wrong in (quantized("int4"), build("gpt2", torch.float32)):
        with pytest.raises(ValueError, match="the reference has no 16-bit layer model.layers.0.self_attn.q_proj"):
            loftq_init_(model, wrong)
    with pytest.raises(ValueError, match="reference is a str; needs a torch.nn.Module"):
        loftq_init_(model, "llama")
    with pytest.raises(ValueError, match="q_proj.weight of the reference is on the meta device"):
        loftq_init_(model, copy.deepcopy(reference).to("meta"))
    broken = copy.deepcopy(reference)
    broken.model.layers[1].mlp.down_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="down_proj.weight of the reference contains NaN"):
        loftq_init_(model, broken)
    merged = get_peft_model(quantized("int4"), lora)
    merged.merge_adapter()
    with pytest.raises(ValueError, match=r"has the adapters \['default'\] in its weight"):
        loftq_init_(merged, reference)
    dora = get_peft_model(quantized("int4"), LoraConfig(r=4, target_modules="all-linear", use_dora=True))
    with pytest.raises(ValueError, match="has DoRA"):
        loftq_init_(dora, reference)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values()))


def tied() -> nn.Module:
    return quantized(QuantizerConfig("int8", modules={"lm_head": "int8", "model.embed_tokens": "int8"}), "llama_tied")


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_a_merge_into_tied_codes_is_refused(target):
    model = with_adapter(tied(), target_modules=[target])
    stored = codes(model)
    with pytest.raises(ValueError, match="tied"):
        model.merge_and_unload()
    assert equal(codes(model), stored)


def test_a_merge_beside_tied_codes_leaves_them_alone():
    merged = with_adapter(tied(), target_modules=["q_proj"]).merge_and_unload()
    assert merged.lm_head.qdata is merged.model.embed_tokens.qdata


def test_a_quantized_module_cannot_be_trained_in_full():
    model = quantized(QuantizerConfig("int4", modules={"lm_head": "int8"}))
    with pytest.raises(ValueError, match=r"modules_to_save has 'lm_head', but lm_head is stored as int8 row"):
        with_adapter(model, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = with_adapter(model, target_modules=["q_proj"])
    with pytest.raises(ValueError, match="modules_to_save"):
        model.add_adapter("second", LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))


def test_experts_as_target_parameters_are_refused():
    with pytest.raises(ValueError, match=r"target_parameters has 'experts.down_proj', but .*experts.*int8 row"):
        with_adapter(
            quantized("int8", "qwen3_moe"), target_modules=["q_proj"], target_parameters=["experts.down_proj"]
        )
    kept = QuantizerConfig("int8", modules={"*.experts": None})
    model = with_adapter(quantized(kept, "qwen3_moe"), target_modules=[], target_parameters=["experts.down_proj"])
    assert_falls(train(model))


def test_experts_among_all_linear_stay_frozen_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match=r"experts get no adapter for down_proj, gate_up_proj: .*stored as int8 row"):
        model = with_adapter(quantized("int8", "qwen3_moe"))
    assert_falls(train(model))
    assert not any("experts" in name for name, p in model.named_parameters() if p.requires_grad)
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "experts get no adapter")
        reloaded = PeftModel.from_pretrained(quantized("int8", "qwen3_moe"), tmp_path)
    assert torch.equal(logits(reloaded), logits(model))
    with_experts = with_adapter(build("qwen3_moe", torch.float32))
    with_experts.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="target_parameters"):
        PeftModel.from_pretrained(quantized("int8", "qwen3_moe"), tmp_path)


@pytest.mark.parametrize("method", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_prompts_of_quantized_embeddings(method):
    model = quantized(QuantizerConfig("int4", modules={"model.embed_tokens": "int8"}))
    reference, found = dequantize_(copy.deepcopy(model)), []
    for base in (reference, model):
        torch.manual_seed(1)
        found.append(get_peft_model(base, getattr(peft, method)(task_type="CAUSAL_LM", num_virtual_tokens=4)))
    assert change(logits(found[1]), logits(found[0])) < 1e-5
    found[1](IDS, labels=IDS).loss.backward()
    assert [p.grad is not None for p in found[1].parameters() if p.requires_grad] == [True]
    assert "get_submodule" not in vars(model)
