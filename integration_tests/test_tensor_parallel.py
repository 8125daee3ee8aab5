"""Tensor and expert parallelism in two processes: codes, saved files and tokens are those of a single process."""

import functools
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_quant import QuantizerConfig, quantize_
from integration_tests.support.two_processes import Failures, change, run_in_two_processes, whole


_SIZES = dict(
    vocab_size=128,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=64,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
)
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**_SIZES, mlp_bias=True),
    "tied": lambda: transformers.LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "moe": lambda: transformers.Qwen3MoeConfig(
        **{**_SIZES, "hidden_size": 128}, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2
    ),
    "llama4": lambda: transformers.Llama4TextConfig(
        **{**_SIZES, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1},
        intermediate_size_mlp=256,
        num_local_experts=4,
    ),
    "longcat": lambda: transformers.LongcatFlashConfig(
        **{key: _SIZES[key] for key in ("vocab_size", "max_position_embeddings", "pad_token_id")},
        **{"hidden_size": 128, "num_attention_heads": 4, "num_layers": 1, "head_dim": 32, "ffn_hidden_size": 256},
        **{"expert_ffn_hidden_size": 128, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2},
        **{"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32},
    ),
}
# {case: (model, config)}; what every process must see whole to quantize it: rows and matrices with one scale that
# row-parallel layers share, and the fp32 scale of nvfp4 and of double quantization.
CASES: dict[str, tuple[str, dict]] = {
    "int8 row": ("llama", {"weights": "int8"}),
    "int4 g64 asymmetric": ("llama", {"weights": "int4", "group_size": 64, "symmetric": False}),
    "int3 g32": ("llama", {"weights": "int3", "group_size": 32}),
    "fp8 tensor": ("llama", {"weights": "fp8", "granularity": "tensor"}),
    "nvfp4": ("llama", {"weights": "nvfp4"}),
    "nf4 double": ("llama", {"weights": "nf4", "scale_dtype": "float8_e4m3fn"}),
    "mixed": (
        "llama",
        {"weights": "int8", "modules": {"re:.*layers\\.0\\..*": "int4", "re:.*layers\\.1\\.mlp.*": None}},
    ),
    "head": ("llama", {"weights": "int8", "modules": {"lm_head": "int4", "model.embed_tokens": "int8"}}),
    "tied": ("tied", {"weights": "int4", "modules": {"lm_head": "int8", "model.embed_tokens": "int8"}}),
    "int8 rotated": ("llama", {"weights": "int8", "input_transform": "hadamard"}),
    "W8A8": ("llama", {"weights": "W8A8"}),
    "experts int4 g64": ("moe", {"weights": "int4", "group_size": 64}),
    "experts nvfp4": ("moe", {"weights": "nvfp4"}),
    "llama4 int4 g64": ("llama4", {"weights": "int4", "group_size": 64}),
    "longcat int4 g64": ("longcat", {"weights": "int4", "group_size": 64}),
    "experts rotated": ("moe", {"weights": "int8", "input_transform": {"block_size": 64}}),
}
WIDE_BLOCKS = QuantizerConfig("W8A8", input_transform={"block_size": 256})
IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))
# Partial sums of two processes are added in another order: 2e-7 to 6e-7 of the logits, as for 16-bit weights.
ORDER_OF_SUMS = 3e-6


def slug(case: str) -> str:
    return case.replace(" ", "-")


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name]())
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in parameter_name else 0.0, 0.3 if parameter.dim() == 1 else 0.05)
    return model


@torch.no_grad()
def answers(model: nn.Module) -> tuple[Tensor, Tensor]:
    """(logits, greedily generated tokens)"""
    return model(IDS).logits, model.generate(IDS, max_new_tokens=6, do_sample=False)


def with_adapter(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model(IDS, labels=IDS).loss.backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.requires_grad}


def load(directory: Path, name: str, **fields) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory / slug(name), **fields)


def test_two_processes_agree_with_one(tmp_path):
    for name in MODELS:
        build(name).save_pretrained(tmp_path / name)
    for case, (name, fields) in CASES.items():
        model = load(tmp_path, name, quantization_config=QuantizerConfig(**fields))
        torch.save((*answers(model), model.state_dict()), tmp_path / f"{slug(case)}.pt")
        model.save_pretrained(tmp_path / slug(case))
    static = quantize_(build("llama").eval(), QuantizerConfig("W8A8", activation_scale="static"), calibration=IDS)
    torch.save((*answers(static), static.state_dict()), tmp_path / "static.pt")
    static.save_pretrained(tmp_path / "static")
    load(tmp_path, "llama", quantization_config=WIDE_BLOCKS).save_pretrained(tmp_path / "wide-blocks")
    failures = run_in_two_processes(in_each_process, tmp_path)
    assert not failures, "\n".join(failures)


def in_each_process(directory: Path, failures: Failures) -> None:
    for case, (name, fields) in CASES.items():
        with failures.of(f"{case}, quantized on load"):
            config = QuantizerConfig(**fields)
            model = load(directory, name, quantization_config=config, tp_plan="auto")
            check_model(case, directory, model)
            check_saved(case, directory, model)
        with failures.of(f"{case}, from a checkpoint"):
            check_model(case, directory, load(directory, case, tp_plan="auto"))
    with failures.of("static scales"):  # of which every process has all, so that no code differs
        check_model("static", directory, load(directory, "static", tp_plan="auto"))
    for check in (check_expert_parallelism, check_given_plan, check_refusals, check_weights, check_adapter):
        with failures.of(check.__name__):
            check(directory)


def check_model(case: str, directory: Path, model: nn.Module) -> None:
    logits, tokens, state = torch.load(directory / f"{slug(case)}.pt")
    found, generated = answers(model)
    if case == "W8A8":
        # Each process rounds its own slice of a row-parallel layer's input: another error of the same size.
        exact = torch.load(directory / "int8-rotated.pt")[0]  # the same codes without rounded inputs
        rounding = change(logits, exact)
        assert ORDER_OF_SUMS < change(found, logits) < 1.5 * rounding, f"{change(found, logits)} with {rounding}"
        assert change(found, exact) < 1.2 * rounding, f"{change(found, exact)} with {rounding}"
    else:
        assert change(found, logits) < ORDER_OF_SUMS, f"logits are off by {change(found, logits):.1e}"
        assert torch.equal(generated, tokens), "other tokens"
    check_shards(model)
    sharded = model.state_dict()
    assert sharded.keys() == state.keys()
    differ = [name for name, tensor in state.items() if not torch.equal(whole(sharded[name]), tensor)]
    assert not differ, f"not equal: {differ}"


def check_saved(case: str, directory: Path, model: nn.Module) -> None:
    target = directory / f"{slug(case)}-saved"
    model.save_pretrained(target)
    dist.barrier()
    for file in ("model.safetensors", "config.json"):
        assert (target / file).read_bytes() == (directory / slug(case) / file).read_bytes(), f"{file} differs"


def check_shards(model: nn.Module) -> None:
    """Each process holds half of the codes of every layer, except of embeddings and what is tied to them."""
    for name, parameter in model.named_parameters():
        is_whole = "_a_proj" in name  # the host's plan for LongCat does not split these
        if ".layers." in name and not is_whole and name.rpartition(".")[2].startswith("qdata"):
            assert parameter.to_local().numel() * 2 == parameter.numel(), name


def check_expert_parallelism(directory: Path) -> None:
    newer = "ep_size" in DistributedConfig.__dataclass_fields__
    fields = {"ep_size": 2} if newer else {"enable_expert_parallel": True}
    for case in ("experts int4 g64", "experts nvfp4", "experts rotated"):
        logits, tokens, state = torch.load(directory / f"{slug(case)}.pt")
        name, config = CASES[case]
        for source, more in ((name, {"quantization_config": QuantizerConfig(**config)}), (case, {})):
            model = load(directory, source, distributed_config=DistributedConfig(tp_size=2, **fields), **more)
            experts = model.model.layers[0].mlp.experts
            assert experts.qdata_down_proj.to_local().shape[0] == 2
            found, generated = answers(model)
            assert change(found, logits) < ORDER_OF_SUMS and torch.equal(generated, tokens), (case, source)
            assert all(torch.equal(whole(model.state_dict()[key]), tensor) for key, tensor in state.items())


def check_given_plan(directory: Path) -> None:
    plan = {
        f"model.layers.*.mlp.{n}": s
        for n, s in (("gate_proj", "colwise"), ("up_proj", "colwise"), ("down_proj", "rowwise"))
    }
    given = DistributedConfig(tp_size=2, tp_plan=plan)
    logits, _, _ = torch.load(directory / "int8-row.pt")
    if hasattr(transformers.PreTrainedModel, "_resolve_parallel_plans"):
        assert change(answers(load(directory, "int8 row", distributed_config=given))[0], logits) < ORDER_OF_SUMS
    else:
        raises("tp_plan is a dict", load, directory, "int8 row", distributed_config=given)
    assert given.tp_plan == plan
    embedding = DistributedConfig(tp_size=2, tp_plan={"model.embed_tokens": "embedding_rowwise"})
    raises("tp_plan", load, directory, "head", distributed_config=embedding)


def check_refusals(directory: Path) -> None:
    quantized = functools.partial(load, directory, "llama", tp_plan="auto")
    raises(
        "model.layers.0.self_attn.o_proj cannot be split into 2 pieces: int4 g256 needs its input features, 256, to "
        "be a multiple of 256 x 2",
        quantized,
        quantization_config=QuantizerConfig("int4", group_size=256),
    )
    raises(
        "output features, 128, to be a multiple of 128 x 2",
        quantized,
        quantization_config=QuantizerConfig("FP8_BLOCK"),
    )
    rotated = (
        "model.layers.0.self_attn.o_proj cannot be split into 2 pieces: its input is rotated by 256, which needs its "
        "input features, 256, to be a multiple of 256 x 2"
    )
    raises(rotated, quantized, quantization_config=WIDE_BLOCKS)
    raises(rotated, load, directory, "wide blocks", tp_plan="auto")
    model = load(directory, "int8 row", tp_plan="auto")
    raises("sharded", model.dequantize)
    raises("sharded", model.model.layers[0].mlp.up_proj.requantize_weight_, "weight", torch.zeros(512, 256))


def raises(message: str, call, *args, **fields) -> None:
    try:
        call(*args, **fields)
    except ValueError as error:
        assert message in str(error), str(error)
    else:
        raise AssertionError(f"no error: {message}")


def check_weights(directory: Path) -> None:
    """Code outside of the layers reads the whole weight, as every process does at the same time."""
    single, sharded = load(directory, "nvfp4"), load(directory, "nvfp4", tp_plan="auto")
    for name in ("self_attn.o_proj", "mlp.gate_proj"):
        expected = single.model.layers[0].get_submodule(name).weight
        assert torch.equal(sharded.model.layers[0].get_submodule(name).weight * 1, expected * 1)


def check_adapter(directory: Path) -> None:
    single, sharded = (with_adapter(load(directory, "int4 g64 asymmetric", **f)) for f in ({}, {"tp_plan": "auto"}))
    with torch.no_grad():
        assert change(sharded(IDS).logits, single(IDS).logits) < ORDER_OF_SUMS
    expected, found = gradients(single), gradients(sharded)
    assert expected.keys() == found.keys()
    assert max(change(found[name], expected[name]) for name in expected) < 1e-3
