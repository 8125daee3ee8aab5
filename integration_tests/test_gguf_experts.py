"""GGUF files of models with experts: every weight arrives, in the fused layout of transformers, and goes back."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from hf_quant import QuantizerConfig, dequantize_, export_gguf, import_checkpoint, quantize_
from hf_quant.convert.gguf.codes import common_quant
from hf_quant.convert.gguf.files import PLAIN, Gguf
from hf_quant.modules import QuantizedModule
from integration_tests.support.gguf_files import MOE, moe_metadata, moe_tensors, values_of, write_gguf
from integration_tests.support.gguf_models import make_model


EXPERTS = "model.layers.0.mlp.experts"


def file_of(path, name, kinds, **more):
    return write_gguf(path / "m.gguf", moe_metadata(name, **more), moe_tensors(name, kinds))


def loaded(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def stored(path):
    """The tensors of a checkpoint, but for the one without elements by which hosts know quantized weights."""
    return {key: value for key, value in load_file(path / "model.safetensors").items() if value.numel()}


def decoded(tensors, part):
    kind, blocks = tensors[f"blk.0.ffn_{part}_exps.weight"]
    return torch.from_numpy(values_of(kind, blocks))


def fused(experts, gate, up):
    """Gate and up as transformers has them: of gpt-oss in turn, and transposed."""
    if experts.is_transposed:
        return torch.stack([gate, up], 2).flatten(1, 2).transpose(1, 2)
    return torch.cat([gate, up], 1)


def check_experts(model, tensors):
    experts = model.get_submodule(EXPERTS)
    gate_up = fused(experts, decoded(tensors, "gate"), decoded(tensors, "up"))
    assert torch.equal(experts.dequantize_weight("gate_up_proj", torch.float32), gate_up)
    down = decoded(tensors, "down")
    down = down.transpose(1, 2) if experts.is_transposed else down
    assert torch.equal(experts.dequantize_weight("down_proj", torch.float32), down)
    assert not torch.equal(gate_up, fused(experts, decoded(tensors, "up"), decoded(tensors, "gate")))
    if "blk.0.ffn_up_exps.bias" in tensors:
        gate, up, down = (torch.from_numpy(tensors[f"blk.0.ffn_{p}_exps.bias"][1]) for p in ("gate", "up", "down"))
        assert torch.equal(experts.gate_up_proj_bias, torch.stack([gate, up], 2).flatten(1))
        assert torch.equal(experts.down_proj_bias, down)


MIXED = {"*": "Q4_K", "ffn_down_exps": "Q6_K", "output": "Q6_K"}


@pytest.mark.parametrize("name", MOE)
@pytest.mark.parametrize("kinds", [{"*": "Q4_0"}, {"*": "Q4_K"}, {"*": "MXFP4", "attn_q": "Q8_0"}, MIXED], ids=str)
def test_every_expert_arrives_fused(name, kinds, tmp_path):
    path = file_of(tmp_path, name, kinds)
    notes = import_checkpoint(path, tmp_path / "out")
    model = loaded(tmp_path / "out")
    check_experts(model, moe_tensors(name, kinds))
    layer = model.model.layers[0].mlp
    ids = torch.arange(1, 33)[None]
    with torch.no_grad():
        logits, expected = model(ids).logits, dequantize_(loaded(tmp_path / "out"))(ids).logits
    assert (logits - expected).norm() < 1e-4 * expected.norm() and expected.std() > 0
    router = layer.router if name == "gpt-oss" else layer.gate
    assert torch.equal(router.weight, torch.from_numpy(moe_tensors(name, kinds)["blk.0.ffn_gate_inp.weight"][1]))
    if kinds == MIXED:
        assert any(note.startswith("weights of Q4_K take more bytes than in the file") for note in notes)
        assert str(layer.experts.scheme.weight) == "int8 g16 floating-point zero points"
    if name in ("llama", "gpt-oss"):  # transformers reads no such files: llama.cpp does, in test_gguf_engine.py
        return
    config = model.config
    del config.quantization_config
    options = {"gguf_file": path.name, "dtype": torch.float32, "config": config}
    host = AutoModelForCausalLM.from_pretrained(path.parent, **options).state_dict()
    count = 0
    for key, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            for weight in module.weight_names:
                assert torch.equal(module.dequantize_weight(weight, torch.float32), host[f"{key}.{weight}"]), key
                count += 1
    assert count == 8 + 3 * (name == "qwen2moe")
    assert all(torch.equal(p, host[key]) for key, p in model.named_parameters() if key in host and p.numel())


@pytest.mark.parametrize(
    "types",
    [("Q4_0", "Q4_1", "Q5_K"), ("Q2_K", "Q3_K", "Q8_0"), ("IQ4_XS", "Q5_0", "Q5_1"), ("Q4_0", "Q4_K", "Q4_1")],
    ids=str,
)
def test_types_of_one_module_have_a_common_form(types, tmp_path):
    kinds = {"*": "Q8_0", **dict(zip(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), types))}
    path = file_of(tmp_path, "qwen3moe", kinds)
    import_checkpoint(path, tmp_path / "out")
    check_experts(loaded(tmp_path / "out"), moe_tensors("qwen3moe", kinds))


def test_a_new_process_reads_and_saves_the_same_bytes(tmp_path):
    path = file_of(tmp_path, "qwen2moe", MIXED)
    import_checkpoint(path, tmp_path / "out")
    code = (
        "import sys; from transformers import AutoModelForCausalLM as A; "
        "A.from_pretrained(sys.argv[1], dtype='auto').save_pretrained(sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "out", tmp_path / "again"], check=True)
    first, second = stored(tmp_path / "out"), stored(tmp_path / "again")
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


SAME = {"*": "Q4_0", "ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q4_K", "ffn_down_exps": "Q4_K", "output": "Q6_K"}
SEVERAL = {"*": "Q4_0", "ffn_gate_exps": "Q5_K", "ffn_up_exps": "Q4_K", "ffn_down_exps": "Q6_K", "output": "Q6_K"}


@pytest.mark.parametrize("kinds", [SAME, MIXED, SEVERAL], ids=str)
@pytest.mark.parametrize("name", MOE)
def test_blocks_of_experts_go_back(name, kinds, tmp_path):
    path = file_of(tmp_path, name, kinds)
    import_checkpoint(path, tmp_path / "in")
    export_gguf(tmp_path / "in", tmp_path / "out")
    before, after = Gguf(path), Gguf(next((tmp_path / "out").glob("*.gguf")))
    assert before.tensors.keys() == after.tensors.keys()
    for own in before.tensors:
        kind = before.kind(own)
        assert after.kind(own) == kind and after.shape(own) == before.shape(own)
        values = [file.read(own) if kind in PLAIN else file.decode(own) for file in (before, after)]
        assert torch.equal(*values), own
    import_checkpoint(tmp_path / "out", tmp_path / "back")
    first, second = stored(tmp_path / "in"), stored(tmp_path / "back")
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_experts_of_types_that_are_not_written_are_refused(tmp_path):
    path = file_of(tmp_path, "qwen3moe", {"*": "Q8_0", "ffn_gate_exps": "Q4_K", "ffn_down_exps": "Q3_K"})
    import_checkpoint(path, tmp_path / "in")
    with pytest.raises(ValueError, match="gate_up_proj: .* an import of Q4_K, Q5_K, Q6_K has them only"):
        export_gguf(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize("name", ["mixtral", "qwen2moe", "qwen3moe", "gpt-oss"])
@pytest.mark.parametrize("config", [QuantizerConfig("int4"), QuantizerConfig("mxfp4")], ids=str)
def test_codes_of_experts_are_the_same_there_and_back(name, config, tmp_path):
    model = make_model(name).to(torch.bfloat16)
    quantize_(model, config)
    model.save_pretrained(tmp_path / "in")
    export_gguf(tmp_path / "in", tmp_path / "out")
    import_checkpoint(tmp_path / "out", tmp_path / "back")
    models = [loaded(tmp_path / place) for place in ("in", "back")]
    count = 0
    for key, module in models[0].named_modules():
        if isinstance(module, QuantizedModule):
            for weight in module.weight_names:
                other = models[1].get_submodule(key).dequantize_weight(weight)
                assert torch.equal(module.dequantize_weight(weight), other), key
                count += 1
    assert count >= 8


def _cut(tensors, part, rows):
    kind, blocks = tensors[f"blk.0.ffn_{part}_exps.weight"]
    tensors[f"blk.0.ffn_{part}_exps.weight"] = kind, np.ascontiguousarray(blocks[:, :rows])


def _plain(tensors, part):
    tensors[f"blk.0.ffn_{part}_exps.weight"] = "F16", np.zeros((4, 256, 256), np.float16)


@pytest.mark.parametrize(
    ("change", "more", "message"),
    [
        (lambda t: t.pop("blk.0.ffn_up_exps.weight"), {}, "it lacks 1 tensors of .*mlp.experts.gate_up_proj among"),
        (lambda t: _cut(t, "gate", 128), {}, r"ffn_gate_exps.weight is \[4, 128, 256\]; .* needs \[4, 256, 256\]"),
        (lambda t: _plain(t, "down"), {}, "ffn_down_exps.weight is F16, but .*gate_up_proj is in blocks: the w"),
        (lambda t: _plain(t, "up"), {}, "ffn_up_exps.weight is F16, but .* are one weight in transformers: all or"),
        (lambda t: None, {"expert_count": 8}, r"ffn_gate_exps.weight is \[4, 256, 256\]; .* needs \[8, 256, 256"),
        (lambda t: None, {"expert_used_count": "two"}, "expected int, got str .value: 'two'"),
        (lambda t: None, {"expert_used_count": 5}, "has 5 for expert_used_count; there are 4 experts"),
        (lambda t: None, {"expert_gating_func": 2}, "a qwen3moe model with expert_gating_func, which is not read"),
    ],
)
def test_files_that_are_wrong_are_refused_with_what_is_needed(change, more, message, tmp_path):
    tensors = moe_tensors("qwen3moe", {"*": "Q8_0"})
    change(tensors)
    path = write_gguf(tmp_path / "m.gguf", moe_metadata("qwen3moe", **more), tensors)
    with pytest.raises(ValueError, match=message):
        import_checkpoint(path, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_types_without_a_common_form_are_refused_or_rounded_together(tmp_path):
    path = file_of(tmp_path, "qwen3moe", {"*": "Q8_0", "ffn_down_exps": "MXFP4"})
    with pytest.raises(ValueError, match="no format holds int8 g32 and mxfp4 g32.*requantize='int8'"):
        import_checkpoint(path, tmp_path / "out")
    tensors = moe_tensors("qwen3moe", {"*": "Q8_0", "ffn_down_exps": "IQ3_S"})
    path = write_gguf(path, moe_metadata("qwen3moe"), tensors)
    with pytest.raises(ValueError, match="ffn_down_exps.weight: no format of hf_quant holds IQ3_S exactly"):
        import_checkpoint(path, tmp_path / "out")
    import_checkpoint(path, tmp_path / "out", requantize={"weights": "int8", "group_size": 32})
    model = loaded(tmp_path / "out")
    for leaf, parts in {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.items():
        meant = torch.cat([decoded(tensors, part) for part in parts], 1)
        error = (model.get_submodule(EXPERTS).dequantize_weight(leaf, torch.float32) - meant).norm() / meant.norm()
        assert 1e-5 < error < 0.02


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("qwen2moe", {"norm_topk_prob": True}, "its norm_topk_prob is True"),
        ("qwen3moe", {"norm_topk_prob": False}, "its norm_topk_prob is False"),
        ("qwen3moe", {"mlp_only_layers": [1]}, "it has layers without experts"),
        ("qwen2moe", {"decoder_sparse_step": 2}, "it has layers without experts"),
        ("gpt-oss", {"layer_types": ["full_attention"] * 2}, "its layer_types are not sliding_attention and"),
        ("gpt-oss", {"swiglu_limit": 5.0}, "its swiglu_alpha and swiglu_limit are not"),
        ("gpt-oss", {"attention_bias": False}, "its attention has no biases"),
        ("qwen3moe", {"use_sliding_window": True, "sliding_window": 8}, "it attends to a window of tokens"),
    ],
)
def test_experts_that_llama_cpp_computes_otherwise_are_refused(name, fields, message, tmp_path):
    model = make_model(name, **fields)
    quantize_(model, QuantizerConfig("int8", group_size=32, scale_dtype="float16"))
    with pytest.raises(ValueError, match=message):
        export_gguf(model, tmp_path / "out")


def test_the_rotation_of_gpt_oss_is_the_original_one(tmp_path):
    scaling = {"type": "yarn", "factor": 32.0, "original_context_length": 4096}
    more = {f"rope.scaling.{key}": value for key, value in scaling.items()}
    path = file_of(tmp_path, "gpt-oss", {"*": "MXFP4", "attn_q": "Q8_0"}, **more)
    notes = import_checkpoint(path, tmp_path / "out")
    assert any(note.startswith("llama.cpp rounds the bounds of yarn") for note in notes)
    rope = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "rope_theta": 10000.0}
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.rope_parameters == {**rope, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    assert (config.sliding_window, config.num_local_experts, config.num_experts_per_tok) == (32, 4, 2)
    metadata = moe_metadata("gpt-oss")
    del metadata["gpt-oss.embedding_length"]
    path = write_gguf(path, metadata, moe_tensors("gpt-oss", {"*": "MXFP4"}))
    with pytest.raises(ValueError, match="its metadata lacks gpt-oss.embedding_length"):
        import_checkpoint(path, tmp_path / "other")


def test_one_quantization_is_its_own_common_form():
    from hf_quant.convert.gguf.blocks import TYPES

    assert all(common_quant({known.quant}) == known.quant for known in TYPES.values())
