"""GGUF files become checkpoints: every weight as transformers decodes it, or a refusal that says why."""

import json
import math
import shutil
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_quant import export_compressed_tensors, export_gguf, import_checkpoint
from hf_quant.cards import read_card
from hf_quant.cli import main
from hf_quant.convert.gguf import files as gguf_files
from hf_quant.convert.gguf import imports
from hf_quant.convert.gguf.files import Gguf
from hf_quant.modules import QuantizedModule
from integration_tests.support.foreign_checkpoints import load_all
from integration_tests.support.gguf_files import llama_metadata, llama_tensors, write_gguf


MIXED = {"*": "Q4_0", "output": "Q6_K", "blk.0.attn_v": "Q8_0", "blk.0.ffn_down": "Q5_0", "blk.0.ffn_up": "F16"}


def host(path, **options) -> torch.nn.Module:
    """The model as transformers itself decodes the file: an independent reader of names, rows and metadata."""
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, **options)


def differences(out, expected: torch.nn.Module) -> tuple[int, int]:
    """(weights that differ, quantized weights) of a checkpoint in fp32."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    weights, wrong, count = expected.state_dict(), 0, 0
    for name, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            decoded = module.dequantize_weight("weight", torch.float32)
            wrong, count = wrong + int((decoded != weights[f"{name}.weight"]).sum()), count + decoded.numel()
    for name, parameter in model.named_parameters():
        if name in weights and parameter.numel():
            wrong += int((parameter.float() != weights[name]).sum())
    ids = torch.arange(1, 33)[None]
    torch.testing.assert_close(model(ids).logits, expected(ids).logits, atol=2e-4, rtol=2e-4)
    return wrong, count


def test_a_mixed_file_arrives_without_a_difference(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(), llama_tensors(MIXED))
    notes = import_checkpoint(path, tmp_path / "out")
    wrong, count = differences(tmp_path / "out", host(path))
    assert wrong == 0 and count == 2 * 64 * 256 + 256 * 256 * 4 + 128 * 256 * 2
    assert [note for note in notes if "take more bytes" in note] == [
        "weights of Q5_0 take more bytes than in the file: no format of its bits holds them exactly (1)",
        "weights of Q6_K take more bytes than in the file: no format of its bits holds them exactly (1)",
    ]
    fields = json.loads((tmp_path / "out/config.json").read_text())
    schemes = {tuple(group["modules"]): group["scheme"]["weight"] for group in fields["quantization_config"]["plan"]}
    assert schemes["lm_head",]["scale_dtype"] == "float32" and schemes["lm_head",]["group_size"] == 16
    assert fields["dtype"] == "float16" and fields["architectures"] == ["LlamaForCausalLM"]
    assert str(tmp_path) not in json.dumps(fields)


@pytest.mark.parametrize(("down", "dtype"), [("F16", "float16"), ("Q4_0", "bfloat16"), ("F32", "float32")])
def test_the_dtype_is_the_smallest_in_which_all_numbers_are_exact(down, dtype, tmp_path):
    kinds = {"*": "MXFP4", "output": "none", "blk.0.ffn_down": down}
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(), llama_tensors(kinds))
    notes = import_checkpoint(path, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert str(model.dtype) == f"torch.{dtype}" and model.lm_head.qdata is model.model.embed_tokens.qdata  # tied
    assert any("dtype is float32" in note for note in notes) == (dtype == "float32")
    assert differences(tmp_path / "out", host(path))[0] == 0


def test_types_with_minima_arrive_and_go_back(tmp_path):
    kinds = {"*": "Q4_K", "blk.0.ffn_down": "Q5_K", "blk.0.attn_q": "Q4_1"}
    kinds |= {"blk.0.attn_v": "Q5_1", "blk.1.attn_v": "Q2_K"}
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(), llama_tensors(kinds))
    import_checkpoint(path, tmp_path / "out")
    wrong, count = differences(tmp_path / "out", host(path))
    assert wrong == 0 and count > 0
    with pytest.raises(ValueError, match="its zero points are floating-point numbers, which no format of compressed-"):
        export_compressed_tensors(tmp_path / "out", tmp_path / "served")
    for kind in ("blk.0.attn_v", "blk.1.attn_v"):  # Q5_1 and Q2_K are not written
        kinds.pop(kind)
    path = write_gguf(tmp_path / "n.gguf", llama_metadata(), llama_tensors(kinds))
    import_checkpoint(path, tmp_path / "first")
    export_gguf(tmp_path / "first", tmp_path / "back")
    import_checkpoint(tmp_path / "back", tmp_path / "second")
    first, second = load_all(tmp_path / "first"), load_all(tmp_path / "second")
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_ternary_types_arrive_and_go_back(tmp_path):
    kinds = {"*": "TQ2_0", "blk.0.attn_v": "TQ1_0", "output": "Q6_K", "token_embd": "Q4_K"}
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(), llama_tensors(kinds))
    notes = import_checkpoint(path, tmp_path / "out")
    wrong, count = differences(tmp_path / "out", host(path))
    assert wrong == 0 and count > 0
    assert [note.split(" take")[0] for note in notes if "take more" in note] == [
        "weights of Q4_K",
        "weights of TQ1_0",
        "weights of Q6_K",
    ]
    export_gguf(tmp_path / "out", tmp_path / "back")
    found = Gguf(next((tmp_path / "back").glob("*.gguf")))
    before = Gguf(path)
    for name in (f"blk.0.{part}.weight" for part in ("attn_q", "attn_v", "ffn_down")):
        assert found.kind(name) == "TQ2_0" and torch.equal(found.decode(name), before.decode(name))
    import_checkpoint(tmp_path / "back", tmp_path / "again")
    first, second = load_all(tmp_path / "out"), load_all(tmp_path / "again")
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_types_without_a_form_are_refused_and_rounded_again_only_if_asked(tmp_path, capsys):
    kinds = {"*": "Q4_0", "blk.0.ffn_down": "IQ3_S", "blk.0.attn_v": "Q5_1", "blk.0.attn_q": "Q4_1"}
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(), llama_tensors(kinds))
    with pytest.raises(ValueError, match="no format of hf_quant holds IQ3_S exactly.*requantize='int8'"):
        import_checkpoint(path, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf"]
    assert main(["import", str(path), str(tmp_path / "out"), "--requantize", "int8,group_size=32"]) == 0
    assert (
        "weights were rounded again to {'weights': 'int8', 'group_size': 32}: no format of hf_quant holds IQ3_S"
        in capsys.readouterr().out
    )
    expected = host(path).state_dict()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            found, meant = module.dequantize_weight("weight", torch.float32), expected[f"{name}.weight"]
            error = float((found - meant).norm() / meant.norm())
            assert 1e-4 < error < 0.02 if name.endswith("down_proj") and ".0." in name else error == 0, name
    for wrong in ("W8A8", {"weights": "int8", "input_transform": "hadamard"}):
        with pytest.raises(ValueError, match="needs a scheme of weights alone"):
            import_checkpoint(path, tmp_path / "other", requantize=wrong)


def test_licence_and_base_model_are_on_the_card(tmp_path):
    origin = {
        "general.license": "apache-2.0",
        "general.languages": ["en"],
        "general.base_model.count": 1,
        "general.base_model.0.repo_url": "https://huggingface.co/maker/first",
    }
    tensors = llama_tensors({"*": "Q8_0"})
    path = write_gguf(tmp_path / "m.gguf", {**llama_metadata(), **origin}, tensors)
    (tmp_path / "LICENSE").write_text("text of the licence")
    import_checkpoint(path, tmp_path / "out")
    data = read_card(tmp_path / "out/README.md").data
    assert (data.license, data.base_model, data.language) == ("apache-2.0", ["maker/first"], ["en"])
    assert (tmp_path / "out/LICENSE").read_text() == "text of the licence"
    path = write_gguf(
        path, {**llama_metadata(), **origin, "general.source.repo_url": "https://huggingface.co/a/b"}, tensors
    )
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nA card beside the file.\n")
    import_checkpoint(path, tmp_path / "again")
    data = read_card(tmp_path / "again/README.md").data
    assert (data.license, data.base_model) == ("mit", ["a/b"])
    assert "quantized by gguf, imported by hf_quant" in (tmp_path / "again/README.md").read_text()


def test_a_directory_with_one_file_is_that_file_and_one_with_two_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    path = write_gguf(tmp_path / "in/m.gguf", llama_metadata(), llama_tensors({"*": "Q4_0"}))
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert differences(tmp_path / "out", host(path))[0] == 0
    shutil.copyfile(tmp_path / "out/config.json", tmp_path / "in/config.json")  # as repositories of GGUF files have it
    import_checkpoint(tmp_path / "in", tmp_path / "beside a config")
    assert differences(tmp_path / "beside a config", host(path))[0] == 0
    path.rename(tmp_path / "in/a.gguf")
    (tmp_path / "in/b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="holds a.gguf, b.gguf: name one of them"):
        import_checkpoint(tmp_path / "in", tmp_path / "other")
    with pytest.raises(ValueError, match="requantize is 'int8', but .* is no GGUF file"):
        import_checkpoint(tmp_path / "out", tmp_path / "other", requantize="int8")


def _without(name):
    return lambda metadata, tensors: tensors.pop(name)


def _lacking(key):
    return lambda metadata, tensors: metadata.pop(key)


def _with(**changes):
    return lambda metadata, tensors: metadata.update({key.replace("__", "."): value for key, value in changes.items()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("blk.0.attn_v.weight"), "it lacks 1 tensors of a LlamaForCausalLM, model.layers.0.self_attn.v_proj"),
        (_with(general__architecture="falcon"), "it is a falcon model; readable: llama, qwen2, qwen2moe, qwen3"),
        (_with(llama__expert_group_count=8), "a llama model with expert_group_count, which is not read here"),
        (_with(llama__expert_count=8), "its metadata has None for expert_used_count; needs a whole number from 1"),
        (_with(llama__rope__scaling__type="yarn"), "lacks rope.scaling.factor, rope.scaling.original_context_length"),
        (_with(llama__attention__key_length="x"), "has 'x' for attention.key_length; needs a whole number"),
        (_lacking("llama.attention.head_count"), "its metadata lacks attention.head_count"),
        (_with(llama__attention__value_length=32), "its keys have 64 channels, its values 32"),
        (_with(llama__rope__dimension_count=32), "it rotates 32 of the 64 channels of a head"),
        (_with(llama__rope__scaling__type="longrope"), "of the kind 'longrope'; readable: linear, yarn"),
        (_with(llama__feed_forward_length=512), r"ffn_gate.weight is \[256, 256\]; .* needs \[512, 256\]"),
        (
            lambda _, t: t.update({"output_norm.weight": ("Q8_0", np.zeros(272, np.uint8))}),
            r"output_norm.weight is Q8_0 of the shape \[256\]; only matrices are in blocks",
        ),
        (_with(split__count=3), "is one of 3 parts: join them"),
        (lambda _, t: t.update({"blk.0.extra.weight": t["output_norm.weight"]}), "it holds blk.0.extra.weight, which"),
        (lambda _, t: t.update({"rope_freqs.weight": ("F32", np.full(32, 2, "f4"))}), "are not those of Llama 3"),
        (lambda _, t: t.update(llama_tensors({"*": "F16"})), "none of its tensors is quantized"),
    ],
)
def test_what_has_no_exact_form_is_refused(change, message, tmp_path):
    metadata, tensors = llama_metadata(), llama_tensors({"*": "Q8_0"})
    change(metadata, tensors)
    path = write_gguf(tmp_path / "m.gguf", metadata, tensors)
    with pytest.raises(ValueError, match=message):
        import_checkpoint(path, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_a_file_on_the_hub_is_named_behind_its_repository(tmp_path, monkeypatch):
    path, asked = write_gguf(tmp_path / "m.gguf", llama_metadata(), llama_tensors({"*": "Q8_0"})), []

    def download(name, file, **options):
        asked.append((name, file, options["revision"]))
        return str(path)

    monkeypatch.setattr(imports, "hf_hub_download", download)
    monkeypatch.setattr("hf_quant.convert.gguf.card.find_card", lambda name, token: None)
    import_checkpoint("user/name/deep/m.gguf", tmp_path / "out", revision="v1")
    assert asked == [("user/name", "deep/m.gguf", "v1")]
    fields = json.loads((tmp_path / "out/config.json").read_text())
    assert fields["quantization_config"]["imported_from"] == {"method": "gguf", "name": "user/name"}
    with pytest.raises(ValueError, match="is on this machine and has no revision 'v1'"):
        import_checkpoint(path, tmp_path / "other", revision="v1")


def test_damaged_files_are_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(), llama_tensors({"*": "Q8_0"}))
    whole = path.read_bytes()
    for data in (b"", b"GGUF", whole[:3000], whole[:-4000], b"GGML" + whole[4:], whole[:8] + b"\xff" * 8 + whole[16:]):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="cannot be read as GGUF"):
            import_checkpoint(path, tmp_path / "out")
    with pytest.raises(ValueError, match="is not a file"):
        import_checkpoint(str(tmp_path / "none.gguf"), tmp_path / "out")


def test_the_package_is_named_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"need the package gguf: pip install 'hf-quant\[gguf\]'"):
        import_checkpoint(tmp_path / "m.gguf", tmp_path / "out")


def test_factors_of_llama_3_become_its_rotation(tmp_path):
    # As llama.cpp's converter writes them, by its loop over frequencies.
    base, factor, low, high, length, factors = 500000.0, 8.0, 1.0, 4.0, 8192, []
    for i in range(0, 64, 2):
        wave = 2 * math.pi * base ** (i / 64)
        smooth = (length / wave - low) / (high - low)
        middle = 1 / ((1 - smooth) / factor + smooth)
        factors.append(1.0 if wave < length / high else factor if wave > length / low else middle)
    metadata = {**llama_metadata(), "llama.rope.freq_base": base}
    tensors = {**llama_tensors({"*": "Q8_0"}), "rope_freqs.weight": ("F32", np.array(factors, np.float32))}
    assert 1 < sorted(factors)[-5] and min(factors) == 1 and max(factors) == 8
    import_checkpoint(write_gguf(tmp_path / "m.gguf", metadata, tensors), tmp_path / "out")
    rope = json.loads((tmp_path / "out/config.json").read_text())["rope_parameters"]
    assert rope["rope_type"] == "llama3" and rope["factor"] == 8 and rope["rope_theta"] == base
    assert rope["original_max_position_embeddings"] == length


def test_a_file_that_transformers_takes_for_mistral_has_no_window(tmp_path):
    metadata = {**llama_metadata(), "general.name": "mistral"}
    path = write_gguf(tmp_path / "m.gguf", metadata, llama_tensors({"*": "Q8_0"}))
    import_checkpoint(path, tmp_path / "out")
    fields = json.loads((tmp_path / "out/config.json").read_text())
    assert (fields["model_type"], fields["sliding_window"]) == ("mistral", None)
    path = write_gguf(path, {**metadata, "llama.attention.sliding_window": 64}, llama_tensors({"*": "Q8_0"}))
    with pytest.raises(ValueError, match="with attention.sliding_window, which is not read here"):
        import_checkpoint(path, tmp_path / "other")


def test_large_files_are_written_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_files, "_SHARD", 100_000)
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(), llama_tensors({"*": "Q8_0"}))
    import_checkpoint(path, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 3
    assert differences(tmp_path / "out", host(path))[0] == 0


def test_a_tokenizer_that_transformers_would_split_otherwise_is_left_out(tmp_path):
    tokens = [f"t{i}" for i in range(64)]
    own = {"model": "gpt2", "pre": "chatglm-bpe", "tokens": tokens, "merges": ["t 1"], "token_type": [1] * 64}
    metadata = {**llama_metadata(), **{f"tokenizer.ggml.{key}": value for key, value in own.items()}}
    path = write_gguf(tmp_path / "m.gguf", metadata, llama_tensors({"*": "Q8_0"}))
    notes = import_checkpoint(path, tmp_path / "out")
    assert "the tokenizer is left out: transformers has no split of the name 'chatglm-bpe'" in notes[-1]
    assert not list((tmp_path / "out").glob("tokenizer*"))
