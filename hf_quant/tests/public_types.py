"""Use of the public names as in a user's program: `make types` checks it, and nothing runs it.

Lines with `pyrefly: ignore` are wrong on purpose. As `unused-ignore` is an error, the check fails if one of them is
accepted, for instance because an annotation has become Any.
"""

from pathlib import Path

import torch
from torch import nn
from typing_extensions import assert_type

import hf_quant
from hf_quant import (
    FORMATS,
    PRESETS,
    Calibration,
    Frontier,
    KVCacheConfig,
    LinearScheme,
    QuantEmbedding,
    QuantExperts,
    QuantizedCache,
    QuantizerConfig,
    QuantLinear,
    QuantPlan,
    TensorQuant,
    TrainingPlan,
    auto_plan,
    auto_plans,
    autoquant,
    calibrate,
    capture_generate,
    convert_qat_,
    dequantize_,
    export_compressed_tensors,
    export_gguf,
    finish_training_,
    freeze_,
    fuse_activations_,
    fuse_projections_,
    import_checkpoint,
    kernels,
    load_quantized_,
    model_card,
    plan,
    prepare_qat_,
    prepare_training_,
    quantization_map,
    quantize_,
    requantize_,
    save_quantized,
    unfuse_activations_,
    unfuse_projections_,
)
from hf_quant.training import gather_in_low_bits_, prune_


def use(model: nn.Module, folder: Path) -> None:
    config = QuantizerConfig("int4", modules={"lm_head": "int8", "re:.*gate": None}, kv_cache="int8")
    modules = {"lm_head": "int8"}
    QuantizerConfig(modules=modules, modules_to_not_convert=("head",))
    planned = plan(model, config, dtype=torch.bfloat16)
    planned = auto_plan(model, {"weights": "auto", "budget": {"bits": 4.0}}, calibration=["a text"])
    frontier = autoquant(model, {"weights": "auto", "objective": "latency"}, calibration=["a text"])
    assert_type(frontier, Frontier)
    assert_type(auto_plans(object(), config, calibration=lambda pipe: pipe("a cat")), dict[str, QuantPlan])
    assert_type(frontier.config, QuantizerConfig | None)
    quantize_(model, config, quant_plan=planned)
    assert_type(planned, QuantPlan)
    assert_type(planned.schemes, dict[str, LinearScheme])
    assert_type(quantize_(model, config, device="cuda", progress=True), nn.Module)
    assert_type(quantize_(nn.Linear(64, 64), "nf4"), nn.Linear)
    assert_type(prepare_qat_(model, config, learn_scales=False, calibration=["a text"]), QuantPlan)
    assert_type(convert_qat_(nn.Linear(64, 64)), nn.Linear)
    assert_type(prepare_training_(model, "fp8_row", grad_weight=False, modules={"head": None}), TrainingPlan)
    assert_type(finish_training_(nn.Linear(64, 64)), nn.Linear)
    assert_type(prune_(nn.Linear(64, 64)), list[str])
    assert_type(gather_in_low_bits_(nn.Linear(64, 64)), list[str])
    quantize_(model, {"weights": "int4", "group_size": 64})
    gptq = QuantizerConfig("nf4", algorithm="gptq", calibration="wiki.txt")
    quantize_(model, gptq, calibration=["a text", "another"], tokenizer=str.split)
    calibrate(model, model.forward, kind="amax").save(folder / "amax.safetensors")
    with Calibration(model, gptq, max_memory=10**9) as calibration:
        model(torch.ones(1))
    assert_type(calibration.unseen, list[str])
    assert_type(requantize_(model, freeze_(model).state_dict(), quantization_map=quantization_map(model)), nn.Module)
    save_quantized(model, folder)
    assert_type(load_quantized_(model, folder), nn.Module)
    assert_type(dequantize_(model, torch.float16), nn.Module)
    assert_type(hf_quant.__version__, str)
    LinearScheme(TensorQuant("int4", "group", group_size=32))
    assert_type([FORMATS[name].bits for name in PRESETS], list[int])
    QuantizedCache(None, KVCacheConfig("int4", group_size=32), max_cache_len=256)
    QuantizedCache(None, {"format": "int8"})
    assert_type(fuse_projections_(unfuse_projections_(model)), nn.Module)
    assert_type(fuse_activations_(unfuse_activations_(model)), nn.Module)
    embedding, experts = model.get_submodule("embedding"), model.get_submodule("experts")
    assert isinstance(embedding, QuantEmbedding) and isinstance(experts, QuantExperts)
    assert_type(embedding.compute_dtype, torch.dtype)
    assert_type(experts.weight_names, tuple[str, ...])
    linear = model.get_submodule("0")
    if isinstance(linear, QuantLinear):
        assert_type(linear.scheme, LinearScheme)
        assert_type(linear.dequantize_weight(), torch.Tensor)
    with capture_generate(model) as graphs:
        graphs.release()
    model_card(model, {"bits_per_weight": 4.1}, repo_id="user/name").save(folder / "README.md")
    export_compressed_tensors(model, folder, reader="transformers")
    assert_type(export_gguf(model, folder, repo_id="user/name"), tuple[str, ...])
    x = torch.randn(4, 64)
    assert_type(kernels.quantize_rowwise(x, format="int8"), tuple[torch.Tensor, torch.Tensor])
    assert_type(kernels.hadamard(x, block_size=64), torch.Tensor)
    assert_type(kernels.weight_only_mm(x, x, x, None, None, None, format="int8", group_size=64), torch.Tensor)
    assert_type(import_checkpoint("user/name", folder), tuple[str, ...])


def misuse(model: nn.Module, folder: Path) -> None:
    quantize_(model, 4)  # pyrefly: ignore[bad-argument-type]
    quantize_(model, "int4", verbose=True)  # pyrefly: ignore[unexpected-keyword]
    quantize_(model, "int4", "cuda")  # pyrefly: ignore[bad-argument-count]
    quantize_("gpt2")  # pyrefly: ignore[bad-specialization]
    prepare_qat_(model, "int4", False)  # pyrefly: ignore[bad-argument-count]
    plan(model)  # pyrefly: ignore[missing-argument]
    plan(model, "int4", dtype="bfloat16")  # pyrefly: ignore[bad-argument-type]
    print(plan(model, "int4").scheme)  # pyrefly: ignore[missing-attribute]
    save_quantized(folder, model)  # pyrefly: ignore[bad-argument-type]
    QuantizerConfig("int4", modules=["lm_head"])  # pyrefly: ignore[bad-argument-type]
    QuantizerConfig("int4", group_size="64")  # pyrefly: ignore[bad-argument-type]
    TensorQuant("int4", "group", group_size=32.0)  # pyrefly: ignore[bad-argument-type]
    kernels.quantize_rowwise([1.0], format="int8")  # pyrefly: ignore[bad-argument-type]
    kernels.quantize_rowwise(torch.ones(2, 64), fmt="int8")  # pyrefly: ignore[missing-argument, unexpected-keyword]
    KVCacheConfig(4)  # pyrefly: ignore[bad-argument-type]
    QuantizedCache(None, 4)  # pyrefly: ignore[bad-argument-type]
    export_compressed_tensors(model)  # pyrefly: ignore[missing-argument]
    import_checkpoint(model, folder)  # pyrefly: ignore[bad-argument-type]
    LinearScheme("int4")  # pyrefly: ignore[bad-argument-type]
    from hf_quant import quantise_  # noqa: F401  # pyrefly: ignore[missing-module-attribute]

    hf_quant.quantise_(model)  # pyrefly: ignore[missing-attribute]
