"""Checkpoints of plain modules: equal to the bit after a reload, and every way in which one can be broken."""

import copy
import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from hf_quant import QuantizerConfig, QuantLinear, load_quantized_, plan, quantize, quantize_, save_quantized
from hf_quant.checkpoint import CONFIG_NAME, check_packed, config_of, guard_entry, inspect_checkpoint, read_header
from hf_quant.modules import QuantizedModule
from hf_quant.testing import all_scheme_fields


SCHEMES = all_scheme_fields()
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


def mlp(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(70, 136), nn.BatchNorm1d(136), nn.Linear(136, 70, bias=False), nn.Linear(70, 8))
    model[1].running_mean.normal_()
    return model.to(dtype)


class Model(nn.Module):
    """Everything at once: tied, used twice, four kinds of modules, parameters and buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(80, 64), nn.Linear(64, 80, bias=False)
        self.head.weight = self.embed.weight
        self.block = nn.Linear(64, 64)
        self.again = self.block
        self.conv = nn.Conv1d(64, 64, 3, padding=1)
        config = MixtralConfig(hidden_size=64, intermediate_size=48, num_local_experts=2, num_experts_per_tok=1)
        self.experts = MixtralExperts(config)
        self.gain = nn.Parameter(torch.randn(64))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("cached", torch.arange(64.0), persistent=False)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.again(self.block(self.embed(ids))) * self.gain + self.cached
        x = self.conv(x.mT).mT
        routing = ids.reshape(-1, 1) % 2
        x = self.experts(x.reshape(-1, 64), routing, torch.ones(routing.shape)).view(x.shape)
        return self.head(x)


EVERYTHING = QuantizerConfig("int4", modules={"embed": "int8", "conv": "fp8", "experts": "nf4"})


def assert_same(first: nn.Module, second: nn.Module) -> None:
    """Both have the same tensors, dtypes, schemes and sharing."""
    a, b = first.state_dict(keep_vars=True), second.state_dict(keep_vars=True)
    assert set(a) == set(b)
    for key in a:
        assert a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]), key
        assert {k for k in a if a[k] is a[key]} == {k for k in b if b[k] is b[key]}, key
    for name, module in first.named_modules():
        other = second.get_submodule(name)
        assert type(other) is type(module)
        if isinstance(module, QuantizedModule):
            assert (other.scheme, other.compute_dtype) == (module.scheme, module.compute_dtype)


def saved(directory: Path, weights="int4", max_shard_size: int | str = "5GB") -> nn.Module:
    model = quantize_(mlp(), weights)
    save_quantized(model, directory, max_shard_size=max_shard_size)
    return model


@pytest.mark.parametrize("fields", SCHEMES.values(), ids=SCHEMES)
def test_round_trip_of_every_scheme(fields, tmp_path):
    model = saved(tmp_path, fields)
    with torch.device("meta"):
        empty = mlp()
    assert load_quantized_(empty, tmp_path) is empty
    assert_same(model, empty)
    x = torch.randn(3, 70, dtype=torch.bfloat16)
    assert torch.equal(model.eval()(x), empty.eval()(x))
    assert sorted(p.name for p in tmp_path.iterdir()) == [CONFIG_NAME, WEIGHTS]


@pytest.mark.parametrize("activations", ["int8", "fp8"])
def test_activations_come_back(activations, tmp_path):
    model = saved(tmp_path, {"weights": "int8", "activations": activations})
    assert_same(model, load_quantized_(mlp(), tmp_path))


@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB", 1])
def test_round_trip_of_everything_at_once(max_shard_size, tmp_path):
    torch.manual_seed(0)
    model = Model()
    model.block.bias.requires_grad_(False)
    quantize_(model, EVERYTHING)
    save_quantized(model, tmp_path, max_shard_size=max_shard_size)
    stored = read_header(tmp_path)
    assert "embed.qdata" in stored and "head.qdata" not in stored and "again.qdata" not in stored
    assert (tmp_path / INDEX).exists() == (max_shard_size != "5GB")
    other = Model()
    other.block.bias.requires_grad_(False)
    load_quantized_(other, tmp_path)
    assert_same(model, other)
    assert other.head.qdata is other.embed.qdata and other.again is other.block
    assert not other.block.bias.requires_grad and other.gain.requires_grad and not other.embed.qdata.requires_grad
    ids = torch.arange(10).view(2, 5)
    assert torch.equal(model(ids), other(ids))


def test_what_was_saved_decides_dtypes_and_sharing(tmp_path):
    torch.manual_seed(0)
    model = quantize_(Model().half(), EVERYTHING)
    save_quantized(model, tmp_path)
    other = Model()  # fp32, and
    other.head.weight = nn.Parameter(torch.zeros(80, 64))  # not tied
    load_quantized_(other, tmp_path)
    assert_same(model, other)
    assert other.gain.dtype == torch.float16 and other.embed(torch.tensor([1])).dtype == torch.float16


def test_a_bare_layer(tmp_path):
    layer = quantize_(nn.Linear(64, 64), "int4")
    save_quantized(layer, tmp_path)
    other = load_quantized_(nn.Linear(64, 64), tmp_path)
    assert isinstance(other, QuantLinear)
    assert_same(layer, other)
    assert read_header(tmp_path)["weight"].shape == (0,)


def test_a_part_of_a_model_that_is_quantized(tmp_path):
    model = mlp()
    quantize_(model[0], "int8")
    save_quantized(model, tmp_path)
    assert_same(model, load_quantized_(mlp(seed=1), tmp_path))


def test_saving_a_loaded_module_into_its_own_directory(tmp_path):
    model = saved(tmp_path, max_shard_size=4000)
    (tmp_path / "model_notes.safetensors").write_bytes(b"of somebody else")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded = load_quantized_(mlp(), tmp_path)
    save_quantized(loaded, tmp_path)  # its tensors lie in the files that go
    assert_same(model, loaded)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == [CONFIG_NAME, WEIGHTS, "model_notes.safetensors"]
    (tmp_path / "model_notes.safetensors").unlink()
    assert_same(model, load_quantized_(mlp(), tmp_path))


def test_the_file_is_the_same_every_time(tmp_path):
    for name in ("a", "b"):
        saved(tmp_path / name)
    for file in (CONFIG_NAME, WEIGHTS):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_observers_hear_of_a_load(tmp_path, monkeypatch):
    saved(tmp_path)
    heard = []
    monkeypatch.setattr(
        quantize, "OBSERVERS", [quantize.Observer(lambda m: True, lambda *args: heard.append(args), heard.append)]
    )
    model = load_quantized_(mlp(), tmp_path)
    assert heard[0][0] is model and heard[0][1].plan is not None


def test_config_of_a_model_is_that_of_most_of_its_modules():
    model = quantize_(mlp(), QuantizerConfig("int4", group_size=64, algorithm="absmax", modules={"3": "int8"}))
    config = config_of(model)
    assert (config.weights, config.group_size, config.algorithm) == ("int4", 64, "absmax")
    assert [group["modules"] for group in config.plan] == [["{0,2}"], ["3"]]
    assert QuantizerConfig.from_dict(config.to_dict()) == config


def test_a_load_without_the_package_fails(tmp_path):
    saved(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    assert tensors["0.weight"].numel() == 0
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        mlp().load_state_dict(tensors, strict=False)


def test_the_guard_is_a_plain_linear_layer_if_there_is_one():
    model = Model()
    assert guard_entry(model) is None
    quantize_(model, EVERYTHING)
    name, tensor = guard_entry(model)
    assert name == "block.weight" and tensor.shape == (0,) and tensor.dtype == torch.float32
    assert guard_entry(quantize_(Model().experts.bfloat16(), "int4"))[0] == "gate_up_proj"
    tied = quantize_(Model(), QuantizerConfig(None, modules={"embed": "int8", "experts": "int8"}))
    assert guard_entry(tied)[0] == "head.weight"


# Saving: errors.


def test_what_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match="nothing in this Sequential is quantized"):
        save_quantized(mlp(), tmp_path)
    with pytest.raises(ValueError, match=r"0\.bias is on the meta device"):
        save_quantized(quantize_(mlp(), "int4").to("meta"), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file; needs a directory"):
        save_quantized(quantize_(mlp(), "int4"), tmp_path / "file")
    with pytest.raises(ValueError, match="5 apples"):
        save_quantized(quantize_(mlp(), "int4"), tmp_path, max_shard_size="5 apples")

    class Extra(nn.Linear):
        def get_extra_state(self) -> dict:
            return {"a": 1}

        def set_extra_state(self, state: dict) -> None:
            pass

    with pytest.raises(ValueError, match="_extra_state is a dict; only tensors can be stored"):
        save_quantized(quantize_(nn.Sequential(Extra(64, 64)), "int4"), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


# Loading: errors. Each breaks a good checkpoint in one way.


def edit_config(**changes):
    def edit(directory: Path) -> None:
        path = directory / CONFIG_NAME
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def edit_plan(**changes):
    def edit(directory: Path) -> None:
        plan = json.loads((directory / CONFIG_NAME).read_text())["plan"]
        plan[0]["scheme"]["weight"].update(changes)
        edit_config(plan=plan)(directory)

    return edit


def edit_tensors(change):
    def edit(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        change(tensors)
        save_file({k: v.contiguous() for k, v in tensors.items()}, directory / WEIGHTS)

    return edit


def put(key: str, value: Tensor):
    return edit_tensors(lambda tensors: tensors.update({key: value}))


def rewrite(change):
    """Apply `change` to the bytes of the weights file."""

    def edit(directory: Path) -> None:
        path = directory / WEIGHTS
        path.write_bytes(change(path.read_bytes()))

    return edit


def edit_header(change):
    """Apply `change` to the parsed header of the weights file; its data stays."""

    def edit(data: bytes) -> bytes:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    return rewrite(edit)


FILES = {
    "no directory": (lambda d: [p.unlink() for p in d.iterdir()], "is not a directory with a hf_quant_config.json"),
    "no config": (lambda d: (d / CONFIG_NAME).unlink(), "is not a directory with a .*save_quantized writes one"),
    "of a host": (
        lambda d: (d / CONFIG_NAME).rename(d / "config.json"),
        "it has a config.json: load it with from_pretrained",
    ),
    "config is no JSON": (lambda d: (d / CONFIG_NAME).write_text("{"), "hf_quant_config.json is not JSON"),
    "config is a list": (lambda d: (d / CONFIG_NAME).write_text("[]"), "is a JSON list; needs an object"),
    "config nested": (lambda d: (d / CONFIG_NAME).write_text("[" * 10**5), "is not JSON"),
    "no weights": (lambda d: (d / WEIGHTS).unlink(), "holds no safetensors file"),
    "foreign method": (edit_config(quant_method="awq"), "quant_method is 'awq'; .* reads 'hf_quant' only"),
    "newer version": (edit_config(format_version=3), "format_version 3, .*reads up to 2: install a newer hf_quant"),
    "unknown field": (edit_config(rotation=True), "unknown field 'rotation'"),
    "no plan": (edit_config(plan=None), "quantization_config has no plan: restore"),
    "unknown format": (edit_plan(format="int9"), "unknown format or preset 'int9'"),
    "no details": (edit_config(module=None), 'needs the tables "dtypes" and "tied"'),
    "bad dtypes": (edit_config(module={"dtypes": {"int8": ["0"]}, "tied": {}}), "\"dtypes\" has 'int8'"),
    "bad ties": (edit_config(module={"dtypes": {}, "tied": {"a": 1}}), '"tied" maps names'),
    "dtypes lack one": (edit_config(module={"dtypes": {}, "tied": {}}), "'0', which .*table of dtypes does not have"),
    "truncated": (rewrite(lambda data: data[:-100]), "is truncated: .* bytes of tensors, its header promises"),
    "too long": (rewrite(lambda data: data + b"0"), "1 bytes at its end belong to no tensor"),
    "header cut": (rewrite(lambda data: data[:50]), "truncated or not a safetensors file: 50 bytes"),
    "empty": (rewrite(lambda data: b""), "truncated or not a safetensors file: 0 bytes"),
    "huge header": (rewrite(lambda data: b"\xff" * 8 + data), "a header that claims 18446744073709551615"),
    "header is no JSON": (rewrite(lambda data: data[:8] + b"?" + data[9:]), "the header of .* is not JSON"),
    "a page": (rewrite(lambda data: b"<!DOCTYPE html><html>..."), "truncated or not a safetensors file"),
    "negative shape": (edit_header(lambda h: h["0.qdata"].update(shape=[-1, 12])), "corrupt: its header has"),
    "huge shape": (edit_header(lambda h: h["0.qdata"].update(shape=[2**60, 2**60])), r"with shape .* takes .* bytes"),
    "shape of floats": (edit_header(lambda h: h["0.qdata"].update(shape=[1.5])), "corrupt: its header has"),
    "unknown dtype": (edit_header(lambda h: h["0.qdata"].update(dtype="I2")), "holds '0.qdata' as 'I2'; known dtypes"),
    "no dtype": (edit_header(lambda h: h["0.qdata"].pop("dtype")), "holds '0.qdata' as None"),
    "dtype list": (edit_header(lambda h: h["0.qdata"].update(dtype=["I32"])), r"holds '0.qdata' as \['I32'\]"),
    "entry of text": (edit_header(lambda h: h.update({"0.qdata": "x" * 10**4})), r"its header has 'xxx.*\.\.\. for"),
    "overlap": (edit_header(lambda h: h["0.bias"].update(data_offsets=[0, 272])), "is corrupt: .* is said to begin"),
    "offsets swapped": (
        edit_header(lambda h: h["0.bias"]["data_offsets"].reverse()),
        "is corrupt: '0.bias' with shape .* takes 272 bytes, its header says -272",
    ),
}
TENSORS = {
    "missing codes": (edit_tensors(lambda t: t.pop("0.qdata")), "lacks 0.qdata"),
    "missing scales": (edit_tensors(lambda t: t.pop("2.scale")), "lacks 2.scale"),
    "missing bias": (edit_tensors(lambda t: t.pop("0.bias")), "lacks 0.bias"),
    "missing buffers": (
        edit_tensors(lambda t: [t.pop(k) for k in list(t) if k.startswith("1.")]),
        "lacks 1.weight, 1.bias, 1.running_mean and 2 more",
    ),
    "unexpected": (put("4.weight", torch.ones(2)), "holds tensors that the module does not have: 4.weight"),
    "no guard": (put("0.weight", torch.ones(136, 70)), "holds tensors that the module does not have: 0.weight"),
    "another shape": (put("0.bias", torch.ones(70)), r"0.bias is \[70\] .*; the model and its scheme need \[136\]"),
    "codes of another shape": (put("0.qdata", torch.zeros(136, 8, dtype=torch.int32)), r"need \[136, 12\] int32"),
    "codes of another dtype": (put("0.qdata", torch.zeros(136, 12, dtype=torch.int64)), r"need \[136, 12\] int32"),
    "scales as numbers": (put("0.scale", torch.ones(136, 1, dtype=torch.bfloat16)), r"need \[136, 3\] uint8"),
    "integers for numbers": (put("0.bias", torch.ones(136, dtype=torch.int32)), "0.bias is .* int32"),
    "another format": (edit_plan(format="int3"), r"need \[136, 9\] int32"),
    "another group": (edit_plan(group_size=64), r"0.scale is \[136, 3\] uint8; .* need \[136, 2\] uint8"),
}


def plan_of(name: str):
    plans = [{"scheme": plan(mlp(), "int4").to_list()[0]["scheme"], "modules": [name]}]
    return edit_config(plan=plans, module={"dtypes": {"bfloat16": [name]}, "tied": {}})


NAMES = {"a module of another model": plan_of("5"), "a module without weights": plan_of("1")}


def assert_refused(directory: Path, message: str) -> None:
    """Loading raises a ValueError of one line, and the module is as it was."""
    model = mlp(seed=1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message) as caught:
        load_quantized_(model, directory)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    assert not any(isinstance(m, QuantizedModule) for m in model.modules())
    after = model.state_dict()
    assert list(before) == list(after) and all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize(("edit", "message"), [*FILES.values(), *TENSORS.values()], ids=[*FILES, *TENSORS])
def test_broken_checkpoints_are_refused_and_the_module_is_unchanged(edit, message, tmp_path):
    saved(tmp_path)
    edit(tmp_path)
    assert_refused(tmp_path, message)


@pytest.mark.parametrize("edit", NAMES.values(), ids=NAMES)
def test_a_plan_that_does_not_fit_the_module(edit, tmp_path):
    saved(tmp_path)
    edit(tmp_path)
    assert_refused(
        tmp_path, "holds a quantized '[15]', (which Sequential does not have|but BatchNorm1d has no weight)"
    )


def test_a_directory_that_does_not_exist(tmp_path):
    assert_refused(tmp_path / "nothing", "nothing is not a directory with a hf_quant_config.json")


def poke(key: str, value: int, at: int = -1):
    return edit_tensors(lambda tensors: tensors[key].view(-1).__setitem__(at, value))


INT3_ASYM, INT2_ASYM = ({"weights": weights, "symmetric": False} for weights in ("int3", "int2"))


@pytest.mark.parametrize(
    ("weights", "edit", "message"),
    [
        ("fp8_e4m3", poke("0.qdata", 0x7F), r"0.qdata is corrupt: fp8_e4m3 codes.* it has 127"),
        ("fp8_e4m3", poke("0.qdata", 0xFF), r"0.qdata is corrupt: fp8_e4m3 codes.* it has 127"),
        ("fp8_e5m2", poke("0.qdata", 0x7C), r"0.qdata is corrupt: fp8_e5m2 codes.* it has 124"),
        ("fp8_e5m2", poke("0.qdata", 0xFE), r"0.qdata is corrupt: fp8_e5m2 codes.* it has 126"),
        (INT2_ASYM, poke("0.zero_point", 4), r"0.zero_point is corrupt: zero points lie in \[0, 3\], but it has 4"),
        ("W4A16", poke("0.scale", 0x7F80), r"0.scale is corrupt: bfloat16 scales.* it has 32640"),  # inf
        ("W4A16", poke("0.scale", 0x7FC0), r"0.scale is corrupt"),  # NaN
        ("W4A16", poke("0.scale", 0), r"0.scale is corrupt: .*it has 0"),
        ("W4A16", poke("0.scale", -128), r"0.scale is corrupt"),  # -inf
        ("W4A16_ASYM", poke("0.scale", -16512), r"0.scale is corrupt"),  # -1.0: with a zero point none is turned round
        (INT3_ASYM, poke("0.scale", 0xB8), r"0.scale is corrupt: float8_e4m3fn scales.* it has 184"),
        ("nf4", poke("0.scale", 0xFF), r"0.scale is corrupt: float8_e4m3fn scales.* it has 127"),  # NaN
        ("fp8_e4m3", poke("0.scale", 0x7F800000), r"0.scale is corrupt: float32 scales"),
        ("mxfp4", poke("0.scale", 255), r"0.scale is corrupt: float8_e8m0fnu scales.* it has 255"),
        ("nvfp4", poke("0.scale", 0x7F), r"0.scale is corrupt: float8_e4m3fn scales.* it has 127"),
        ("nvfp4", poke("0.scale", 0x80), r"0.scale is corrupt: float8_e4m3fn scales.* it has 128"),
        ("nvfp4", poke("0.global_scale", 0), r"0.global_scale is corrupt"),
    ],
)
def test_values_outside_of_the_grid_are_refused(weights, edit, message, tmp_path):
    saved(tmp_path, weights)
    edit(tmp_path)
    assert_refused(tmp_path, message)


@pytest.mark.parametrize("fields", SCHEMES.values(), ids=SCHEMES)
def test_any_word_of_packed_codes_is_valid_and_so_are_the_ends_of_the_grid(fields, tmp_path):
    model = saved(tmp_path, fields)
    if model[0].qdata.dtype == torch.int32:
        for value in (-1, 0, 2**31 - 1, -(2**31)):
            poke("0.qdata", value)(tmp_path)
            load_quantized_(mlp(), tmp_path)
    else:
        for value in {"int8": (-128, 127), "fp8_e4m3": (0x7E, 0xFE), "fp8_e5m2": (0x7B, 0xFB)}[fields["weights"]]:
            poke("0.qdata", value)(tmp_path)
            load_quantized_(mlp(), tmp_path)


def test_shards(tmp_path):
    saved(tmp_path, max_shard_size=4000)
    index = json.loads((tmp_path / INDEX).read_text())

    def with_index(**changes) -> None:
        (tmp_path / INDEX).write_text(json.dumps({**index, **changes}))

    shard = tmp_path / index["weight_map"]["2.qdata"]
    shard.rename(tmp_path / "elsewhere")
    assert_refused(tmp_path, f"lacks 1 of [0-9]+ shards: {shard.name}$")
    shutil.copy(tmp_path / "elsewhere", tmp_path / "model.safetensors")
    assert_refused(tmp_path, f"{shard.name}; it holds model.safetensors, too: delete {INDEX} if that is left over")
    (tmp_path / "elsewhere").rename(shard)
    shutil.copy(shard, tmp_path / "model.safetensors")
    assert_refused(tmp_path, "holds model.safetensors and the shards of model.safetensors.index.json, of two checkpoi")
    (tmp_path / "model.safetensors").unlink()
    with_index(weight_map={**index["weight_map"], "9.weight": shard.name})
    assert_refused(tmp_path, f"says that {shard.name} holds '9.weight', but it does not")
    with_index(weight_map={**index["weight_map"], "9.weight": "../secret.safetensors"})
    assert_refused(tmp_path, "names the shard '../secret.safetensors'; a shard is a .safetensors file beside")
    with_index(weight_map={**index["weight_map"], "9.weight": None})
    assert_refused(tmp_path, "names the shard None")
    with_index(weight_map=[])
    assert_refused(tmp_path, "has no weight_map")
    with_index()
    shard.write_bytes(shard.read_bytes()[:-1])
    assert_refused(tmp_path, f"{shard.name} is truncated")


def test_loading_twice_and_buffers_that_no_checkpoint_holds(tmp_path):
    model = saved(tmp_path)
    with pytest.raises(ValueError, match=r"the module is quantized already \(0 is\): load into a 16-bit one"):
        load_quantized_(model, tmp_path)
    save_quantized(quantize_(Model(), EVERYTHING), tmp_path / "other")
    with torch.device("meta"):
        empty = Model()
    with pytest.raises(ValueError, match="cached is a buffer that no checkpoint holds, and it is on the meta device"):
        load_quantized_(empty, tmp_path / "other")
    empty.cached = torch.arange(64.0)
    assert load_quantized_(empty, tmp_path / "other")(torch.arange(4)[None]).shape == (1, 4, 80)


# Headers alone.


def test_read_header(tmp_path):
    model = saved(tmp_path / "one")
    saved(tmp_path / "many", max_shard_size=4000)
    header = read_header(tmp_path / "one")
    assert header == read_header(tmp_path / "one" / WEIGHTS) == read_header(str(tmp_path / "many"))
    guard = {"0.weight": (torch.bfloat16, (0,))}
    assert header == {k: (v.dtype, tuple(v.shape)) for k, v in model.state_dict().items()} | guard
    assert header["0.qdata"].nbytes == model[0].qdata.nbytes and str(header["0.qdata"]) == "[136, 12] int32"
    with pytest.raises(ValueError, match="nowhere does not exist"):
        read_header(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no safetensors file"):
        read_header(tmp_path)


def test_of_several_files_the_one_that_hosts_load(tmp_path):
    for name, length in (("adapter", 1), ("diffusion_pytorch_model", 2)):
        save_file({"a": torch.ones(length)}, tmp_path / f"{name}.safetensors")
    assert read_header(tmp_path)["a"].shape == (2,)
    (tmp_path / "diffusion_pytorch_model.safetensors").rename(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="holds adapter.safetensors, other.safetensors; name the one to read"):
        read_header(tmp_path)


@pytest.mark.parametrize("max_shard_size", ["5GB", 4000])
@pytest.mark.parametrize("fields", SCHEMES.values(), ids=SCHEMES)
def test_inspect_counts_what_is_there(fields, max_shard_size, tmp_path):
    model = saved(tmp_path, fields, max_shard_size)
    summary = inspect_checkpoint(tmp_path)
    assert summary.nbytes == sum(t.nbytes for t in model.state_dict().values())
    assert [row.scheme for row in summary.rows if row.scheme] == [model[0].scheme] * 2
    packed = sum(t.nbytes for i in (0, 2) for k, t in model[i].state_dict().items() if k != "bias")
    assert sum(row.nbytes for row in summary.rows if row.scheme) == packed
    exact = 8 * packed / (2 * 70 * 136)
    assert summary.bits_per_weight == pytest.approx(exact, rel=0.26)  # K = 70 is packed as 96
    assert summary.bits_per_weight <= exact + 1e-9


def test_the_table_of_inspect(tmp_path):
    with torch.no_grad():
        model = nn.ModuleDict(
            {"layers": nn.ModuleList(nn.Linear(128, 64) for _ in range(3)), "norm": nn.LayerNorm(64)}
        )
    save_quantized(quantize_(model.bfloat16(), "int4"), tmp_path)
    lines = str(inspect_checkpoint(tmp_path)).splitlines()
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    assert cells[0] == ["modules", "count", "shape", "scheme", "bits", "MB"]
    assert cells[2] == ["layers.*", "3", "64x128", "int4 g32", "4.25", "0.01"]
    assert ["layers.*.bias", "3", "64", "not quantized", "16.00", "0.00"] in cells
    assert lines[-1].startswith("3 modules quantized by hf_quant ") and lines[-1].endswith("0.01 MB in 1 file")
    assert "4.254 bits per weight" in lines[-1]


def as_host(directory: Path, **renamed: str) -> None:
    """Turn a checkpoint of ours into what a host writes: config.json, and tensor names that may begin otherwise."""
    fields = json.loads((directory / CONFIG_NAME).read_text())
    fields.pop("module")
    (directory / CONFIG_NAME).unlink()
    (directory / "config.json").write_text(json.dumps({"model_type": "x", "quantization_config": fields}))
    edit_tensors(
        lambda tensors: [
            tensors.__setitem__(k.replace(old, new, 1), tensors.pop(k))
            for old, new in renamed.items()
            for k in list(tensors)
            if k.startswith(old)
        ]
    )(directory)


@pytest.mark.parametrize("renamed", [{}, {"embed": "model.embed", "block": "inner.model.block"}])
def test_inspect_reads_what_hosts_write(renamed, tmp_path):
    model = quantize_(Model(), EVERYTHING)
    save_quantized(model, tmp_path)
    as_host(tmp_path, **renamed)
    summary = inspect_checkpoint(tmp_path)
    found = {row.modules.rpartition(".")[2]: (str(row.scheme), row.shape) for row in summary.rows if row.scheme}
    assert set(found.pop("experts")) == {"nf4 g32", "2x64x64 + 2x96x64"}  # 48 is packed as 64
    assert found == {
        "embed": ("int8 row", "80x64"),
        "block": ("int4 g32", "64x64"),
        "conv": ("fp8_e4m3 row", "64x192"),
    }
    assert summary.nbytes == sum({id(t): t.nbytes for t in model.state_dict(keep_vars=True).values()}.values())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        *(FILES[key] for key in ("foreign method", "newer version", "unknown format", "truncated", "negative shape")),
        (FILES["no plan"][0], FILES["no plan"][1]),
        (lambda d: (d / CONFIG_NAME).unlink(), "is not the directory of a quantized model: no config.json$"),
        (TENSORS["missing scales"][0], "with a scale beside it"),
        (TENSORS["codes of another dtype"][0], "0.qdata is .* int64; the model and its scheme need .* int32"),
        (put("0.scale", torch.ones(135, 3, dtype=torch.uint8)), r"0.scale is \[135, 3\] uint8; .* need \[136, 3\]"),
        (put("0.qdata", torch.zeros(136, 10, dtype=torch.int32)), "rows of int4 codes are multiples of 4 words"),
        (put("9.qdata", torch.zeros(136, 12, dtype=torch.int32)), "'9' is quantized, but the stored plan does not"),
        (
            edit_tensors(lambda t: [t.pop(k) for k in list(t) if "qdata" in k]),
            "holds no codes of hf_quant",
        ),
    ],
)
def test_inspect_refuses_what_contradicts_itself(edit, message, tmp_path):
    saved(tmp_path)
    edit(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        inspect_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def test_inspect_says_what_else_a_directory_is(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="config.json has no quantization_config: the model is not quantized"):
        inspect_checkpoint(tmp_path)
    pipeline = tmp_path / "pipeline"
    saved(pipeline / "transformer")
    as_host(pipeline / "transformer")
    (pipeline / "model_index.json").write_text("{}")
    with pytest.raises(ValueError, match="no config.json; it has the parts transformer: name one of them"):
        inspect_checkpoint(pipeline)
    assert inspect_checkpoint(str(pipeline / "transformer")).rows
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "tiny-Q4_0.gguf").touch()
    with pytest.raises(ValueError, match="no config.json; `hf-quant import` makes a .* such as tiny-Q4_0.gguf there"):
        inspect_checkpoint(tmp_path / "gguf")
    with pytest.raises(ValueError, match="is not the directory of a quantized model"):
        inspect_checkpoint(tmp_path / "nowhere")


# A module that somebody else has filled.


@pytest.mark.parametrize("fields", SCHEMES.values(), ids=SCHEMES)
def test_check_packed_accepts_what_quantize_makes(fields):
    torch.manual_seed(0)
    layer = quantize_(nn.Linear(70, 136), fields)
    check_packed(layer, "layer")
    zeros = nn.Linear(70, 136)
    nn.init.zeros_(zeros.weight)
    check_packed(quantize_(zeros, fields))


def test_check_packed_names_what_is_wrong():
    layer = quantize_(nn.Linear(70, 136), "int8")
    layer.scale.data[3] = 0
    with pytest.raises(ValueError, match="^a.b.scale is corrupt: float32 scales"):
        check_packed(layer, "a.b")
    layer.qdata.data = layer.qdata.data[:, :69]
    with pytest.raises(
        ValueError, match=r"^qdata is \[136, 69\] int8; the model and its scheme need \[136, 70\] int8"
    ):
        check_packed(layer)
    del layer._parameters["qdata"]
    with pytest.raises(ValueError, match="^qdata is missing"):
        check_packed(layer)
    experts = quantize_(Model().experts, "int4")
    check_packed(experts, "experts")
    experts.scale_down_proj.data.zero_()
    with pytest.raises(ValueError, match="^experts.scale_down_proj is corrupt: float8_e4m3fn scales"):
        check_packed(experts, "experts")
