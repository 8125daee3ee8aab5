"""Flows of the hosts' own tests, on quantized models: each gives what the dequantized or the unhooked model gives.

accelerate installs a part of its tests: those scripts run as they are, on a model with quantized layers. The tests of
transformers, PEFT and diffusers are in their repositories only; what they do with a quantized model is done here anew,
where no other file does it.
"""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from accelerate.utils import modeling
from safetensors.torch import load_file
from torch import Tensor, nn

import hf_quant
from hf_quant import QuantizerConfig, dequantize_, quantize_
from hf_quant.testing import assert_sqnr
from integration_tests.support.tiny_models import build, inputs, outputs
from integration_tests.support.two_processes import Failures, change, run_in_two_processes


peft = pytest.importorskip("peft", reason="peft is an optional host")
pytest.importorskip("diffusers", reason="diffusers is an optional host")

from peft.tuners.lora.loraga import preprocess_loraga  # noqa: E402
from peft.utils import hotswap  # noqa: E402

from integration_tests.support.tiny_diffusion import assert_same_bytes, make_model, run  # noqa: E402
from integration_tests.test_peft import codes, equal, logits, train, worst  # noqa: E402


IDS = inputs("llama")["input_ids"]
CPU = torch.device("cpu")
SCHEMES = ("int4", "W8A8")  # W8A8 stores scales of fp32
LORA = {"target_modules": ["q_proj", "down_proj"], "r": 4, "init_lora_weights": False}
TIED = QuantizerConfig("int4", modules={"lm_head": "int8"})
ON_DISK = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
ON_DISK |= {"model.norm": "cpu", "lm_head": "cpu"}


def quantized(config: QuantizerConfig | str, name: str = "llama", dtype: torch.dtype = torch.float32) -> nn.Module:
    return quantize_(build(name, dtype), config)


def pair(config: QuantizerConfig | str) -> tuple[nn.Module, nn.Module]:
    """A quantized model in fp32, and what it is dequantized."""
    model = quantized(config)
    return model, dequantize_(copy.deepcopy(model))


def adapted(model: nn.Module, method: str = "LoraConfig", **fields: Any) -> nn.Module:
    """A copy of a model with the same adapter each time."""
    torch.manual_seed(1)
    return peft.get_peft_model(copy.deepcopy(model), getattr(peft, method)(**fields)).eval()


def generate(model: nn.Module, ids: Tensor = IDS[:1], **options: Any) -> Tensor:
    return model.generate(input_ids=ids, max_new_tokens=8, min_new_tokens=8, do_sample=False, **options)


# accelerate


def test_scripts_of_accelerate(tmp_path):
    assert not run_in_two_processes(run_scripts, tmp_path)


def run_scripts(directory: Path, failures: Failures) -> None:
    """In two processes: gradients are synchronized when they should be only, and training is that of one process."""
    from accelerate.test_utils import RegressionModel
    from accelerate.test_utils.scripts import test_script, test_sync

    class Quantized(RegressionModel):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.frozen = quantize_(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), scheme)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(super().forward(x)[:, None].expand(-1, 64)).mean(1)

    test_sync.RegressionModel = test_script.RegressionModel = Quantized
    # Under autocast the script expects what fp32 gives: no matrix product does, quantized or not.
    test_script.is_bf16_available = test_script.is_fp16_available = lambda *args: False
    for scheme in SCHEMES:
        accelerator = accelerate.Accelerator(cpu=True)
        for check in (
            partial(test_sync.test_distributed_sync, accelerator),
            partial(test_sync.test_distributed_sync_multiple_fwd, accelerator),
            test_sync.test_gradient_accumulation,
            test_sync.test_gradient_accumulation_with_opt_and_scheduler,
            test_script.training_check,
        ):
            with failures.of(f"{scheme}, {check}"):
                check()


def test_sizes_from_which_device_maps_are_made():
    model = quantized("int4", dtype=torch.bfloat16)
    sizes, nbytes = modeling.compute_module_sizes(model), hf_quant.plan(build("llama"), "int4").nbytes
    layer = sizes["model.layers.0"]
    assert sizes[""] == nbytes and layer == sum(p.nbytes for p in model.model.layers[0].parameters())
    infer = partial(accelerate.infer_auto_device_map, model, no_split_module_classes=["LlamaDecoderLayer"])
    split = infer(max_memory={"cpu": sizes["model.embed_tokens"] + 2 * layer})
    assert [split[f"model.{name}"] for name in ("embed_tokens", "layers.0", "layers.1")] == ["cpu", "cpu", "disk"]
    assert infer(max_memory={"cpu": nbytes}) == {"": "cpu"}
    tied = modeling.find_tied_parameters(quantized(TIED, "llama_tied"))
    assert sorted(map(sorted, tied)) == [[f"lm_head.{p}", f"model.embed_tokens.{p}"] for p in ("qdata", "scale")]


@pytest.mark.parametrize(("name", "config"), [("llama", "W8A8"), ("llama_tied", TIED)])
def test_a_dispatched_model_runs_copies_and_saves(name, config, tmp_path):
    model = quantized(config, name, torch.bfloat16)
    expected, state = outputs(model, name), copy.deepcopy(model.state_dict())
    accelerate.dispatch_model(model, ON_DISK, offload_dir=tmp_path / "offload", main_device="cpu")
    assert model.model.layers[1].mlp.up_proj.qdata.is_meta
    for dispatched in (model, copy.deepcopy(model)):
        assert torch.equal(outputs(dispatched, name), expected)
    with pytest.raises(RuntimeError, match="can't move a model that has some modules offloaded"):
        model.to("cpu")
    gathered = modeling.get_state_dict_offloaded_model(model)
    assert gathered.keys() == state.keys() and all(torch.equal(gathered[key], state[key]) for key in state)
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path / "saved", max_shard_size="40KB")
    model.config.save_pretrained(tmp_path / "saved")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    assert torch.equal(outputs(type(model).from_pretrained(tmp_path / "saved"), name), expected)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_checkpoint_goes_into_a_quantized_model_only(scheme, tmp_path):
    model = quantized(scheme, dtype=torch.bfloat16)
    state = accelerate.Accelerator(cpu=True).get_state_dict(model)
    model.save_pretrained(tmp_path / "saved", state_dict=state)
    for load in (
        partial(modeling.load_checkpoint_in_model, strict=True),
        partial(accelerate.load_checkpoint_and_dispatch, device_map=ON_DISK, offload_folder=tmp_path / "offload"),
    ):
        empty = copy.deepcopy(model)
        for parameter in empty.parameters():
            parameter.data.zero_()
        load(empty, tmp_path / "saved")
        assert torch.equal(outputs(empty, "llama"), outputs(model, "llama"))
    assert empty.model.layers[1].mlp.up_proj.qdata.is_meta
    with accelerate.init_empty_weights():
        plain = transformers.LlamaForCausalLM(model.config)
    with pytest.raises(ValueError, match=r"shape torch.Size\(\[0\]\) in \"weight\" .* looks incorrect"):
        accelerate.load_checkpoint_and_dispatch(plain, tmp_path / "saved", {"": "cpu"})


@pytest.mark.parametrize("scheme", SCHEMES)
def test_hooks(scheme):
    class Double(accelerate.hooks.ModelHook):
        def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
            return 2 * output

    model = quantized(scheme, dtype=torch.bfloat16)
    layer, expected, x = model.model.layers[0].mlp.up_proj, outputs(model, "llama"), torch.randn(3, 64).bfloat16()
    y, qdata, weight = layer(x), layer.qdata.clone(), layer.dequantize_weight()
    for factor in (2, 4):
        accelerate.hooks.add_hook_to_module(layer, Double(), append=True)
        assert torch.equal(layer(x), factor * y)
    accelerate.hooks.remove_hook_from_module(layer)
    assert torch.equal(layer(x), y)

    accelerate.cpu_offload(model, CPU)
    assert layer.qdata.is_meta and layer.weight.is_meta
    with accelerate.utils.align_module_device(layer):
        assert torch.equal(layer.weight + 0, weight)
    assert layer.qdata.is_meta and torch.equal(outputs(model, "llama"), expected)
    accelerate.hooks.remove_hook_from_submodules(model)
    # What is not quantized is stored in 8 bits and computed in 16, the codes are as they were.
    accelerate.big_modeling.attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.float8_e4m3fn and torch.equal(layer.qdata, qdata)
    assert_sqnr(outputs(model, "llama"), expected, at_least=15, at_most=50)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_state_of_training_is_saved_and_loaded(scheme, tmp_path):
    accelerator = accelerate.Accelerator(cpu=True)
    model = adapted(quantized(scheme), **LORA).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses, before = [], {2: accelerator.save_state, 4: accelerator.load_state}
    for step in range(6):
        if step in before:
            before[step](tmp_path)
        loss = model(IDS, labels=IDS).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[4:] == losses[2:4] and losses[0] > losses[1] > losses[2] > losses[3]


def test_codes_that_share_a_product_are_saved_of_every_layer(tmp_path):
    """accelerate saves one of the tensors that it takes for tied."""
    model, accelerator = quantized(QuantizerConfig("W8A8", fuse_projections=True)), accelerate.Accelerator(cpu=True)
    expected, state = outputs(model, "llama"), copy.deepcopy(model.state_dict())
    accelerator.save_model(model, tmp_path / "saved")
    assert_same_bytes(load_file(tmp_path / "saved/model.safetensors"), state)
    accelerator.prepare(model)
    accelerator.save_state(tmp_path / "state")
    for parameter in model.parameters():
        parameter.data.zero_()
    accelerator.load_state(tmp_path / "state")
    assert_same_bytes(model.state_dict(), state)
    assert torch.equal(outputs(model, "llama"), expected)


# transformers


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_way_to_generate(scheme):
    """Drafts of another model, of the prompt and of the first layer; several requests at a time."""
    model = quantized(scheme)
    expected = [generate(model, row[None]) for row in IDS]
    for how in ({"assistant_model": quantized("int2")}, {"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}):
        assert torch.equal(generate(model, **how), expected[0]), how
    found = model.generate_batch(
        IDS.tolist(),
        generation_config=transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1),
        # Else it takes all memory for its cache.
        continuous_batching_config=transformers.ContinuousBatchingConfig(page_size=16, num_blocks=16),
        warmup=False,
    )
    assert [result.generated_tokens for result in found.values()] == [row[0, -8:].tolist() for row in expected]


class Adapted(nn.Module):
    """A layer and an adapter around it, as the tests of transformers and of diffusers train one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.adapter = nn.Sequential(nn.Linear(layer.in_features, 4), nn.Linear(4, layer.out_features))
        self.adapter.to(layer.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.adapter(x)


def gradients_of_adapters(model: nn.Module) -> dict[str, Tensor]:
    for parameter in model.parameters():
        parameter.requires_grad = False
        if parameter.ndim == 1:
            parameter.data = parameter.data.to(torch.float32)  # norms, for stability
    torch.manual_seed(1)
    for layer in model.model.layers:
        layer.mlp.up_proj, layer.mlp.down_proj = Adapted(layer.mlp.up_proj), Adapted(layer.mlp.down_proj)
    with torch.autocast("cpu", torch.bfloat16):
        model(IDS).logits.float().norm().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("scheme", ["int4", "nf4", "fp8", "nvfp4"])
def test_adapters_around_layers_and_norms_in_fp32(scheme):
    model = quantized(scheme, dtype=torch.bfloat16)
    reference = dequantize_(copy.deepcopy(model))
    found, expected = gradients_of_adapters(model), gradients_of_adapters(reference)
    # Autocast alone is off by 0.03, weights that were not rounded by 0.23 (fp8).
    assert worst(found, expected) < 0.1 < worst(gradients_of_adapters(build("llama")), expected)
    if scheme != "fp8":  # the scale of the whole weight has one dimension, too, and keeps its bits
        layer = model.model.layers[0].self_attn.q_proj
        assert layer.global_scale.dtype == torch.float32
        layer.global_scale.data += 2.0**20  # no power of two any more
        with pytest.raises(ValueError, match=r"scales of this QuantLinear were cast .* where parameter\.is_float"):
            model(IDS)


# PEFT


CONVOLUTIONS = QuantizerConfig(None, modules={"0": "int8", "2": "int8"})
TARGETS = {"target_modules": ["q_proj", "v_proj"]}
LINEAR, CONVOLUTION = ({"target_modules": names, "init_weights": False} for names in (["q_proj", "v_proj"], ["2"]))
METHODS = {
    "DoRA": ("LoraConfig", {**TARGETS, "use_dora": True, "init_lora_weights": False}),
    "OFT": ("OFTConfig", {**LINEAR, "oft_block_size": 16}),
    "IA3": ("IA3Config", {**TARGETS, "feedforward_modules": [], "init_ia3_weights": False}),
    "LoKr": ("LoKrConfig", {**LINEAR, "r": 4}),
    "VeRA": ("VeraConfig", {**LINEAR, "r": 4}),
    "RandLoRA": ("RandLoraConfig", {**LINEAR, "r": 4}),
    "MiSS": ("MissConfig", {**LINEAR, "r": 4}),
    "RoAd": ("RoadConfig", LINEAR),
    "HiRA": ("HiraConfig", {**LINEAR, "r": 4}),
    "Supertuning": ("SupertuningConfig", LINEAR),
    "OFT of convolutions": ("OFTConfig", {**CONVOLUTION, "oft_block_size": 16, "r": 0}),
    "HRA of convolutions": ("HRAConfig", {**CONVOLUTION, "r": 4}),
}


@pytest.mark.parametrize("label", METHODS)
def test_methods_of_peft_merge_as_over_the_dequantized_base(label, tmp_path):
    """Outputs and gradients are equal, and a merge, safe or not, is one quantization of the merged weight."""
    method, fields = METHODS[label]
    if not hasattr(peft, method):
        pytest.skip(f"peft {peft.__version__} has no {method}")
    torch.manual_seed(0)
    x, scheme = (torch.randn(2, 8, 6, 6), CONVOLUTIONS) if label.endswith("convolutions") else (IDS, "int4")
    convolutions = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3))
    base = quantize_(convolutions if x.dim() == 4 else build("llama", torch.float32), scheme)

    def output(model: nn.Module) -> Tensor:
        y = model(x)
        return getattr(y, "logits", y)

    def gradients_of(model: nn.Module) -> dict[str, Tensor]:
        output(model).square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    def codes_of_targets(model: nn.Module) -> dict[str, Tensor]:
        return {key: p for key, p in codes(model).items() if key.split(".")[-2] in fields["target_modules"]}

    model, reference = (adapted(m, method, **fields) for m in (base, dequantize_(copy.deepcopy(base))))
    assert worst(gradients_of(model), gradients_of(reference)) < (1e-2 if label == "RandLoRA" else 1e-4)
    with torch.no_grad():
        y, unadapted = output(model), output(base)
        assert change(y, output(reference)) < 1e-4 and change(y, unadapted) > 1e-2
        with model.disable_adapter():
            assert torch.equal(output(model), unadapted)
        model.save_pretrained(tmp_path)
        assert torch.equal(output(peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)), y)
        merged = codes_of_targets(quantize_(reference.merge_and_unload(), scheme))
        assert merged and not equal(merged, codes_of_targets(base))
        for safe in (False, True):
            assert equal(codes_of_targets(adapted(base, method, **fields).merge_and_unload(safe_merge=safe)), merged)
        model.merge_adapter()
        assert equal(codes_of_targets(model), merged)
        model.unmerge_adapter()
        assert change(output(model), y) < 0.5 * change(unadapted, y)


@pytest.mark.parametrize("method", ["PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"])
def test_prompts_are_learned(method):
    trained = [adapted(model, method, task_type="CAUSAL_LM", num_virtual_tokens=4) for model in pair("int4")]
    losses, expected = (train(model) for model in trained)
    assert losses == pytest.approx(expected, rel=1e-5) and losses[-1] < losses[0]
    tokens, expected = (generate(model, attention_mask=torch.ones_like(IDS[:1])) for model in trained)
    assert torch.equal(tokens, expected)


def test_adapters_are_combined_mixed_and_swapped(tmp_path):
    model, reference = models = [adapted(m, **LORA) for m in pair("int8")]
    names = ["default", "b"]
    for m in models:
        torch.manual_seed(2)
        m.add_adapter("b", peft.LoraConfig(**{**LORA, "r": 8}))
    model.save_pretrained(tmp_path)
    tokens, expected = [], []
    for name in names:
        model.set_adapter(name)
        tokens.append(generate(model, num_beams=2)[0])
        expected.append(logits(model))
    mixed = generate(model, IDS[:1].repeat(2, 1), adapter_names=names, num_beams=2)
    assert torch.equal(mixed, torch.stack(tokens)) and not torch.equal(*tokens)
    with torch.no_grad(), model.disable_adapter():
        plain = model(IDS).logits
    with torch.no_grad():
        beside = model(IDS, adapter_names=["b", "__base__"]).logits
    assert change(beside[0], expected[1][0]) < 1e-5 and torch.equal(beside[1], plain[1])
    model.base_model.set_adapter(names)
    both = logits(model)
    assert 0 < change(logits(copy.deepcopy(model).merge_and_unload(adapter_names=names)), both) < 0.04
    for how in ("cat", "svd", "ties_svd"):
        for m in models:
            m.add_weighted_adapter(names, [0.7, 0.3], how, combination_type=how, svd_rank=8, density=0.5)
            m.set_adapter(how)
        assert change(logits(model), logits(reference)) < 1e-4 < change(logits(model), expected[0])
    assert peft.get_model_status(model) == peft.get_model_status(reference)

    swapped = peft.PeftModel.from_pretrained(quantized("int8"), tmp_path, low_cpu_mem_usage=True)
    hotswap.prepare_model_for_compiled_hotswap(swapped, target_rank=8)
    graphs = []
    compiled = torch.compile(swapped, backend=lambda graph, _: graphs.append(graph) or graph)
    for directory, y in zip((tmp_path, tmp_path / "b"), expected):
        hotswap.hotswap_adapter(swapped, directory, adapter_name="default")
        assert change(logits(compiled), y) < 1e-5 and len(graphs) == 1


def test_initializations_that_change_or_differentiate_the_base(tmp_path):
    base = quantized("int8")
    pissa = adapted(base, target_modules=["q_proj"], init_lora_weights="pissa")
    assert change(logits(pissa), logits(base)) < 0.02  # what remains is quantized again
    pissa.peft_config["default"].init_lora_weights = True
    pissa.save_pretrained(tmp_path / "initial")
    pissa.peft_config["default"].init_lora_weights = "pissa"
    train(pissa)
    pissa.save_pretrained(tmp_path / "lora", path_initial_model_for_weight_conversion=tmp_path / "initial")
    assert change(logits(peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "lora")), logits(pissa)) < 0.02
    assert change(logits(pissa), logits(base)) > 0.1

    config = peft.LoraConfig(**{**LORA, "init_lora_weights": "lora_ga"}, lora_ga_config=peft.LoraGAConfig())
    with pytest.raises(ValueError, match="stored as int8 row and cannot be trained: .* dequantize_ the model first"):
        preprocess_loraga(base, config, lambda: base(IDS, labels=IDS).loss.backward())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_adapter_over_a_model_that_is_partly_on_disk(scheme, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # PEFT writes to a path without its root
    base = quantized(scheme)
    base.save_pretrained("base")
    model = adapted(base, **LORA)
    model.save_pretrained("adapter")
    offloaded = type(base).from_pretrained("base", device_map=ON_DISK, offload_folder="offload")
    room = {"cpu": 60_000}
    dispatched = peft.PeftModel.from_pretrained(offloaded, "adapter", offload_folder="adapted", max_memory=room)
    assert any(p.is_meta for name, p in dispatched.named_parameters() if "qdata" in name)
    assert torch.equal(logits(dispatched), logits(model))
    for m in (dispatched, model):
        m.merge_adapter()
    assert torch.equal(logits(dispatched), logits(model))


# diffusers


def test_compiled_while_offloaded():
    model = quantize_(make_model("flux", torch.bfloat16), "W8A8")
    expected = run(model, "flux")
    model.enable_group_offload(CPU, CPU, offload_type="block_level", num_blocks_per_group=1)
    model.compile(backend="eager")
    for _ in range(2):
        assert torch.equal(run(model, "flux"), expected)
