"""Errors of users, and defects of checkpoints: each is reported in one line that names the cause."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from hf_quant import QuantizerConfig, quantize_
from integration_tests.support.tiny_models import build


LLAMA = transformers.LlamaForCausalLM
LAYER = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("plain")
    build("llama").save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("int8")
    quantize_(build("llama"), "int8").save_pretrained(directory)
    return directory


@pytest.fixture
def damaged(stored, tmp_path) -> Path:
    """A copy of the quantized checkpoint to damage."""
    return Path(shutil.copytree(stored, tmp_path / "damaged"))


def edit_config(directory: Path, **fields) -> None:
    """Change fields of the stored quantization config; None removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for name, value in fields.items():
        config["quantization_config"][name] = value
        if value is None:
            del config["quantization_config"][name]
    path.write_text(json.dumps(config))


def edit_tensors(directory: Path, **changes) -> None:
    """Replace tensors, {name with "__" for ".": tensor or function}; None removes one."""
    tensors = load_file(directory / "model.safetensors")
    for name, change in changes.items():
        name = name.replace("__", ".")
        tensor = tensors.pop(name, None)
        if change is not None:
            tensors[name] = change(tensor) if callable(change) else change
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def load_error(directory: Path | None, error=ValueError, **kwargs) -> str:
    """The message of the error that loading raises: one line."""
    with pytest.raises(error) as raised:
        LLAMA.from_pretrained(directory, **{"dtype": "auto", **kwargs})
    message = str(raised.value)
    assert error is not ValueError or "\n" not in message
    return message


# The files


@pytest.mark.parametrize("size", [0, 5, 300, -100])
def test_truncated_file(size, damaged):
    path = damaged / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:size] if size else b"")
    # The host opens the file first to see of which kind it is; from a certain length on its header is whole.
    message = load_error(damaged, Exception)
    assert "truncated" in message or "header" in message.lower()


def test_missing_shard(stored, tmp_path):
    LLAMA.from_pretrained(stored, dtype="auto").save_pretrained(tmp_path, max_shard_size="40KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    assert f"{shards[1].name} does not exist" in load_error(tmp_path)
    # An index that does not know of it either.
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = {key: file for key, file in content["weight_map"].items() if file != shards[1].name}
    index.write_text(json.dumps(content))
    assert "is a shard missing?" in load_error(tmp_path)
    with pytest.raises(ValueError, match="is a shard missing?"):  # where the names are other ones than in the plan
        transformers.AutoModel.from_pretrained(tmp_path, dtype="auto")


def test_missing_experts(tmp_path):
    model = quantize_(build("mixtral"), "int4")
    model.save_pretrained(tmp_path)
    experts = "model.layers.0.block_sparse_moe.experts"
    for part in ("qdata_gate_up_proj", "scale_gate_up_proj"):
        edit_tensors(tmp_path, **{f"{experts}.{part}": None})
    with pytest.raises(ValueError, match="lacks model.layers.0.mlp.experts.qdata_gate_up_proj; is a shard missing"):
        type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("part", "change", "expected"),
    [
        ("qdata", lambda t: t[:, :32].clone(), "[128, 32] int8"),
        ("qdata", lambda t: t.to(torch.int16), "[128, 64] int16"),
        ("scale", lambda t: t.view(torch.bfloat16).float(), "[128, 1] float32"),
        ("scale", lambda t: t[:64].clone(), "[64, 1] int16"),
        ("qdata", None, "is a shard missing?"),
        ("scale", None, "is a shard missing?"),
        ("zero_point", torch.zeros(128, 1, dtype=torch.uint8), "which its scheme (int8 row) does not use"),
    ],
)
def test_tensors_that_disagree_with_the_config(part, change, expected, damaged):
    edit_tensors(damaged, **{f"{LAYER}.{part}": change})
    message = load_error(damaged)
    assert (f"{LAYER}.{part}" in message or change is None and LAYER in message) and expected in message
    assert not callable(change) or "need" in message


def test_config_of_another_size(damaged):
    path = damaged / "config.json"
    config = json.loads(path.read_text())
    config["intermediate_size"] = 192
    path.write_text(json.dumps(config))
    message = load_error(damaged)
    assert "down_proj.qdata" in message and "[64, 128]" in message and "[64, 192]" in message


@pytest.mark.parametrize("config", [None, QuantizerConfig("int4")], ids=["quantized", "on the fly"])
def test_config_of_another_size_of_what_is_not_quantized(config, plain, stored, tmp_path, caplog):
    source = shutil.copytree(stored if config is None else plain, tmp_path / "source")
    content = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**content, "vocab_size": 128}))
    kwargs = {} if config is None else {"quantization_config": config}
    message = load_error(source, Exception, **kwargs)
    # The host's own report, or, in versions that do not look at shapes when there is a quantizer, ours.
    assert "mismatched" in message or "embed_tokens.weight is (96, 64); the model's config needs (128, 64)" in message


@pytest.mark.parametrize(
    ("weights", "part", "value", "expected"),
    [
        ("fp8_e5m2", "qdata", 0x7C, "fp8_e5m2 codes"),  # inf
        ("int8", "scale", -1, "scales, as bits, lie in"),
        ("int8", "scale", 0x7F80, "scales, as bits, lie in"),  # inf
        ("fp8_e4m3", "qdata", 0x7F, "fp8_e4m3 codes"),  # NaN
        ({"weights": "int2", "symmetric": False}, "zero_point", 9, "zero points lie in [0, 3], but it has 9"),
    ],
)
def test_codes_outside_of_the_grid(weights, part, value, expected, plain, tmp_path):
    quantize_(build("llama"), weights).save_pretrained(tmp_path)

    def spoil(tensor):
        tensor.view(-1)[7] = value
        return tensor

    edit_tensors(tmp_path, **{f"{LAYER}.{part}": spoil})
    message = load_error(tmp_path)
    assert message.startswith(f"{LAYER}.{part} is corrupt") and expected in message


# The config


def test_newer_format_version(damaged):
    edit_config(damaged, format_version=99)
    message = load_error(damaged)
    assert "format_version 99" in message and "install a newer hf_quant" in message


def test_foreign_quant_method(damaged, caplog):
    edit_config(damaged, quant_method="somebody_elses")
    message = load_error(damaged, RuntimeError)  # the guard
    assert "mismatched" in message
    assert "Unknown quantization type, got somebody_elses" in caplog.text


def test_config_of_another_library_with_ours(plain, damaged):
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (damaged / "config.json").write_text(json.dumps(config))
    message = load_error(damaged, quantization_config=QuantizerConfig("int4"))
    assert "quantized by 'gptq' already" in message and "`hf-quant import MODEL OUT`" in message


@pytest.mark.parametrize(
    ("plan", "expected"), [(None, "has no plan: restore"), ([], LAYER.split(".")[0]), ("x", "list")]
)
def test_no_stored_plan(plan, expected, damaged):
    edit_config(damaged, plan=plan)
    assert expected in load_error(damaged)


def test_a_plan_that_does_not_fit(damaged):
    config = json.loads((damaged / "config.json").read_text())["quantization_config"]
    config["plan"][0]["modules"].append("lm_head")
    edit_config(damaged, plan=config["plan"])
    assert "the stored plan names lm_head, but the checkpoint has no codes" in load_error(damaged)


def test_an_edited_format(damaged, stored, caplog):
    LLAMA.from_pretrained(stored)
    assert not caplog.text
    edit_config(damaged, weights="int4")
    LLAMA.from_pretrained(damaged)
    assert "has weights='int4', but its plan, which says what is stored, has int8" in caplog.text


# The arguments


def test_another_config_for_a_quantized_checkpoint(stored):
    message = load_error(stored, quantization_config=QuantizerConfig("int4"))
    assert "quantized already, by QuantizerConfig(weights='int8')" in message
    assert "the given QuantizerConfig(weights='int4') cannot be applied" in message


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(
    ("stored_transform", "others"),
    [(None, ["none", {"block_size": 32}]), ({"block_size": 32}, ["none"]), ("none", ["hadamard", {"block_size": 32}])],
)
def test_another_input_transform_than_the_checkpoint_has(stored_transform, others, tmp_path):
    quantize_(build("llama"), QuantizerConfig("W8A8", input_transform=stored_transform)).save_pretrained(tmp_path)
    for asked in (None, "none", "hadamard", {"block_size": 32}):
        config = QuantizerConfig("W8A8", input_transform=asked)
        if asked in others:
            assert f"the given {config} cannot be applied" in load_error(tmp_path, quantization_config=config)
        else:
            LLAMA.from_pretrained(tmp_path, dtype="auto", quantization_config=config)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_a_config_is_compared_with_what_is_stored_not_with_the_defaults_of_today(tmp_path):
    made = QuantizerConfig("int4", group_size=128, scale_dtype="model")  # an older default
    quantize_(build("llama"), made).save_pretrained(tmp_path)
    edit_config(tmp_path, group_size=None, scale_dtype=None)
    fitting = [{}, {"group_size": 128}, {"scale_dtype": "model"}, {"symmetric": True}, {"granularity": "group"}]
    for fields in (*fitting, {"weights": "W4A16"}):
        LLAMA.from_pretrained(
            tmp_path, dtype="auto", quantization_config=QuantizerConfig(**{"weights": "int4"} | fields)
        )
    others = [{"group_size": 32}, {"scale_dtype": "float8_e4m3fn"}, {"symmetric": False}, {"granularity": "row"}]
    for fields in (*others, {"algorithm": "hqq"}, {"weights": "nf4"}, {"input_transform": "hadamard"}):
        config = QuantizerConfig(**{"weights": "int4"} | fields)
        message = load_error(tmp_path, quantization_config=config)
        assert f"by QuantizerConfig(weights='int4'): int4 g128; the given {config} cannot be applied" in message


@pytest.mark.parametrize(
    "config",
    [QuantizerConfig("int8"), QuantizerConfig("W8A16"), QuantizerConfig("int8", quantization_device="cpu")],
)
def test_the_same_config_for_a_quantized_checkpoint(config, stored):
    with pytest.warns(UserWarning, match="The `quantization_config` from the model will be used"):
        model = LLAMA.from_pretrained(stored, dtype="auto", quantization_config=config)
    expected = LLAMA.from_pretrained(stored, dtype="auto")
    assert model.config.quantization_config.to_dict() == expected.config.quantization_config.to_dict()


def test_a_config_that_was_resolved_for_another_model(plain, stored):
    config = LLAMA.from_pretrained(stored, dtype="auto").config.quantization_config
    assert "holds the plan of another model" in load_error(plain, quantization_config=config)


def test_a_pattern_that_matches_nothing(plain):
    config = QuantizerConfig("int8", modules={"*.dwn_proj": "int4"})
    message = load_error(plain, quantization_config=config)
    assert "matches no module" in message and "down_proj" in message


def test_state_dict_with_a_quantized_checkpoint(stored):
    config = transformers.LlamaConfig.from_pretrained(stored)
    state = load_file(stored / "model.safetensors")
    message = load_error(None, config=config, state_dict=state)
    assert "loaded from its files" in message and "`state_dict`" in message


def test_state_dict_to_quantize(plain):
    config = transformers.LlamaConfig.from_pretrained(plain)
    state = build("llama").state_dict()
    model = LLAMA.from_pretrained(
        None, config=config, state_dict=state, quantization_config=QuantizerConfig("int8"), dtype=torch.bfloat16
    )
    expected = LLAMA.from_pretrained(plain, quantization_config=QuantizerConfig("int8"), dtype="auto").state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


# The weights


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("device_map", [None, "auto"])
def test_nan_in_a_weight(value, device_map, plain, tmp_path, caplog):
    shutil.copytree(plain, tmp_path / "bad")

    def spoil(tensor):
        tensor[3, 5] = value
        return tensor

    edit_tensors(tmp_path / "bad", **{f"{LAYER}.weight": spoil})
    kwargs = {} if device_map is None else {"device_map": device_map}
    message = load_error(tmp_path / "bad", quantization_config=QuantizerConfig("int4"), **kwargs)
    assert (
        message == f"{LAYER}.weight contains NaN or inf and cannot be quantized; repair the checkpoint or exclude it"
    )
    assert "MISSING" not in caplog.text and "Traceback" not in caplog.text
    excluded = QuantizerConfig("int4", modules={LAYER: None})
    assert (
        type(LLAMA.from_pretrained(tmp_path / "bad", quantization_config=excluded).get_submodule(LAYER)) is nn.Linear
    )


def test_nan_in_an_expert(tmp_path):
    model = build("mixtral")
    model.model.layers[0].mlp.experts.down_proj.data[2, 3, 5] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^model.layers.0.mlp.experts.down_proj contains NaN or inf"):
        type(model).from_pretrained(tmp_path, quantization_config=QuantizerConfig("int4"))


def test_a_weight_of_another_shape(plain, tmp_path):
    shutil.copytree(plain, tmp_path / "bad")
    edit_tensors(tmp_path / "bad", **{f"{LAYER}.weight": lambda t: t[:96].clone()})
    message = load_error(tmp_path / "bad", quantization_config=QuantizerConfig("int4"))
    assert f"{LAYER}.weight is (96, 64); needs (128, 64)" in message


# Optional packages


WITHOUT = """
import importlib.machinery, sys

absent = {"triton", "diffusers", "accelerate", "peft"}


class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in absent else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder
import hf_quant, torch

layer = hf_quant.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 64)), "int4")
assert layer(torch.ones(1, 64)).shape == (1, 64)
import transformers

for arguments in ({}, {"quantization_config": hf_quant.QuantizerConfig("int4")}):
    directory = sys.argv[1 + len(arguments)]
    model = transformers.LlamaForCausalLM.from_pretrained(directory, dtype="auto", **arguments)
    assert model.config.quantization_config.weights == ("int4" if arguments else "int8")
    assert torch.isfinite(model(input_ids=torch.arange(3, 9)[None]).logits).all()
assert not absent & set(sys.modules)
"""


def test_without_optional_packages(stored, plain):
    command = [sys.executable, "-c", WITHOUT, os.fspath(stored), os.fspath(plain)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr and "could not register" not in result.stderr


def test_a_16_bit_model_of_a_quantized_config_is_told_from_a_missing_shard(stored, tmp_path):
    """transformers' `from_config` makes one, and saves that config beside its weights."""
    config = transformers.AutoConfig.from_pretrained(stored)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="its weights are in 16 bit, as where a model was made by from_config"):
        LLAMA.from_pretrained(tmp_path)


def test_codes_cannot_be_unfrozen(stored):
    model = LLAMA.from_pretrained(stored)
    assert model.requires_grad_(False) is model
    with pytest.raises(ValueError, match="are codes, which cannot be trained: train adapters on them"):
        model.requires_grad_(True)
    assert not any(p.requires_grad for p in model.parameters())
    plain = quantize_(build("llama"), QuantizerConfig(None, kv_cache="int8"))
    assert plain.requires_grad_() is plain
