"""Checkpoints of torchao become ours without rounding: flattened subclasses, and pickles, of which no code is run."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from hf_quant import import_checkpoint
from integration_tests.support import packed_torchao as torchao
from integration_tests.support.foreign_checkpoints import load_all, make_llama, mismatches, weights_of
from integration_tests.support.hub_server import Hub
from integration_tests.support.tiny_diffusion import load, make_model
from integration_tests.support.tiny_pipelines import save_flux
from integration_tests.test_importing_libraries import UP, check_flux, check_import, refused
from integration_tests.test_model_cards import files_of
from integration_tests.test_model_cards import run as run_with_hub


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("llama") / "bf16")


SYMMETRIC = {"_type": "QuantizeTensorToInt8Kwargs", "_data": {"mapping_type": {"_type": "", "_data": "SYMMETRIC"}}}
ASYMMETRIC = {"_type": "QuantizeTensorToInt8Kwargs", "_data": {"mapping_type": {"_type": "", "_data": "ASYMMETRIC"}}}


def int8_with(kwargs):
    return lambda *args: torchao.int8(*args, act_quant_kwargs=kwargs)


@pytest.mark.parametrize(
    ("pack", "scheme", "bits", "note"),
    [
        (torchao.int8, "int8 row", 8.222, None),
        (int8_with(SYMMETRIC), "int8 row, int8 activations", 8.222, None),
        (int8_with(ASYMMETRIC), "int8 row", 8.222, "inputs stay in 16 bit"),
        (torchao.intx(4, 32, True), "int4 g32", 4.5, None),
        (torchao.intx(4, 32, False), "int4 g32 asym", 4.75, None),
        (torchao.intx(3, 64, False), "int3 g64 asym", 3.375, None),
        (torchao.intx(2, 16, True), "int2 g16", 3.0, None),
        (torchao.intx(6, 32, True), "int8 g32", 8.5, None),
        (torchao.intx(6, 32, False), "int8 g32 floating-point zero points", 9.5, None),
        (torchao.int4_pairs(64), "int4 g64 floating-point zero points", 4.75, None),
        (torchao.int4_tiles(64), "int4 g64 floating-point zero points", 4.75, None),
        (torchao.float8("row"), "fp8_e4m3 row", 8.222, None),
        (torchao.float8("tensor"), "fp8_e4m3 tensor", 8.002, None),
        (torchao.float8("block"), "fp8_e4m3 block", 8.002, None),
        (torchao.float8("row", torch.float8_e5m2), "fp8_e5m2 row", 8.222, None),
        (torchao.fp4("MXTensor"), "mxfp4 g32", 4.25, None),
        (torchao.fp4("NVFP4Tensor"), "nvfp4 g16", 4.502, None),
        (torchao.fp4("NVFP4Tensor", swizzled=True), "nvfp4 g16", 4.502, None),
    ],
)
def test_flattened_subclasses(pack, scheme, bits, note, llama, tmp_path):
    meant = torchao.torchao_checkpoint(tmp_path / "in", llama, pack)
    notes = import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert (note is None and notes == ()) or (len(notes) == 1 and notes[0].startswith(note))
    check_import(tmp_path / "in", tmp_path / "out", meant, scheme, bits)


def test_the_last_group_of_a_row_may_be_shorter(llama, tmp_path):
    meant = torchao.torchao_checkpoint(tmp_path / "in", llama, torchao.int4_pairs(96))
    assert all(weight.shape[1] % 96 for weight in meant.values())
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert mismatches(meant, weights_of(model))[0] == 0


@pytest.mark.parametrize(
    "pack",
    [
        *(torchao.int8, torchao.intx(4, 32, False), torchao.float8("row"), torchao.affine, torchao.affine4),
        torchao.int4_tiles(64),
    ],
)
def test_pickles_without_torchao(pack, llama, tmp_path):
    meant = torchao.torchao_checkpoint(tmp_path / "in", llama, pack, pickled=True)
    assert [path.name for path in (tmp_path / "in").glob("*.bin")] == ["pytorch_model.bin"]
    assert import_checkpoint(tmp_path / "in", tmp_path / "out") == ()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert mismatches(meant, weights_of(model))[0] == 0
    assert pack is not torchao.affine4 or model.get_submodule(UP).scheme.weight.format == "int4"
    stored = load_all(tmp_path / "out")
    kept = {key: tensor for key, tensor in load_all(llama).items() if "_proj" not in key}
    assert all(torch.equal(stored[key], tensor) for key, tensor in kept.items())


def test_shards_of_pickles(llama, tmp_path):
    meant = torchao.torchao_checkpoint(tmp_path / "in", llama, torchao.int8, pickled=True)
    with torchao.fake_torchao():
        whole = torch.load(tmp_path / "in" / "pytorch_model.bin", weights_only=False)
        names = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
        weight_map = {key: names[i % 2] for i, key in enumerate(whole)}
        for name in names:
            torch.save({key: whole[key] for key in whole if weight_map[key] == name}, tmp_path / "in" / name)
    (tmp_path / "in" / "pytorch_model.bin").unlink()
    index = tmp_path / "in" / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert mismatches(meant, weights_of(model))[0] == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    (tmp_path / "in" / names[1]).unlink()
    assert "lacks 1 of 2 shards" in refused(tmp_path / "in", tmp_path / "second")
    index.write_text(json.dumps({"weight_map": {"a": "../other.bin"}}))
    assert "names no shards beside it" in refused(tmp_path / "in", tmp_path / "second")


class _Harm:
    def __reduce__(self):
        return (print, ("this must not run",))


def test_pickles_that_are_not_opened(llama, tmp_path, capsys):
    torchao.torchao_checkpoint(tmp_path / "in", llama, torchao.int8, pickled=True)
    file = tmp_path / "in" / "pytorch_model.bin"
    torch.save({"x": _Harm()}, file)
    message = refused(tmp_path / "in", tmp_path / "out")
    assert "print', which is none of them" in message
    assert "must not run" not in capsys.readouterr().out
    torch.save([torch.zeros(1)], file)
    assert "holds a list; needs a table of tensors" in refused(tmp_path / "in", tmp_path / "out")
    torch.save({"x": 3}, file)
    assert "has 'x' as a int; needs a tensor" in refused(tmp_path / "in", tmp_path / "out")
    torch.save({"x": torch.zeros(1)}, file)
    assert "no layer of it is quantized" in refused(tmp_path / "in", tmp_path / "out")
    file.write_bytes(b"\x80\x02no")
    assert "is a pickle, and only tensors and classes of torchao are read" in refused(
        tmp_path / "in", tmp_path / "out"
    )
    file.unlink()
    assert "holds no safetensors file, and no pytorch_model.bin" in refused(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize("pickled", [False, True])
def test_models_of_diffusers(pickled, tmp_path):
    make_model("flux", torch.bfloat16).save_pretrained(tmp_path / "flux")
    ends = ("attn.to_q.weight", "attn.to_out.0.weight", "proj_mlp.weight")
    meant = torchao.torchao_checkpoint(tmp_path / "in", tmp_path / "flux", torchao.int8, pickled=pickled, ends=ends)
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    check_flux(tmp_path / "out", meant)


def replaced(record: torchao.Subclass, **changes) -> torchao.Subclass:
    """The record with another kind, or other fields or tensors; None removes one."""
    kind = changes.pop("kind", record.kind)
    fields = {**record.fields, **{k: v for k, v in changes.items() if not isinstance(v, torch.Tensor)}}
    tensors = {**record.tensors, **{k: v.clone() for k, v in changes.items() if isinstance(v, torch.Tensor)}}
    return record._replace(
        kind=kind, fields=fields, tensors={k: v for k, v in tensors.items() if fields.get(k, 0) is not None}
    )


@pytest.mark.parametrize(
    ("pack", "changes", "message"),
    [
        (torchao.int4_tiles(32), {"block_size": [2, 32]}, "has one scale for 2 rows; needs one for each"),
        (torchao.int4_pairs(32), {"block_size": "x"}, "has the block_size x; needs two positive integers"),
        (torchao.int4_tiles(32), {"shape": [512, 128]}, r"of the shape .512, 128.; needs .N . 8, K . 32 J, 32"),
        (torchao.int4_tiles(32), {"scale_and_zero": torch.ones(32, 8, 2)}, "_scale_and_zero is .32, 8, 2. f"),
        (torchao.int4_pairs(32), {"zero_point": None}, "has no zero_point"),
        (torchao.int4_pairs(32), {"scale": torch.ones(4, 8)}, "_weight_scale is .4, 8. float32; needs .4, 256."),
        (torchao.int8, {"kind": "Int4PreshuffledTensor"}, "in the order of a device's kernels"),
        (torchao.int8, {"kind": "SparseTensor"}, "readable: Int8Tensor, Intx"),
        (torchao.int8, {"scale": None}, "has no scale"),
        (torchao.int8, {"block_size": [3, 5]}, "one scale for 3 x 5 of its"),
        (torchao.int8, {"block_size": "x"}, "has the block_size x"),
        (torchao.int8, {"zero_point": torch.full((1,), 3)}, "_weight_zero_point is .1. int64 beside scales"),
        (torchao.int8, {"act_pre_scale": torch.ones(128)}, "has an act_pre_scale"),
        (torchao.intx(4, 32, True), {"qdata": torch.full((256, 128), 8, dtype=torch.int8)}, "codes outside of int4"),
        (torchao.intx(4, 32, True), {"zero_point": torch.full((256, 4), torch.nan)}, "has NaN or inf"),
        (torchao.intx(4, 32, True), {"target_dtype": torch.uint4}, "has uint4 codes; readable: int1, int2"),
        (torchao.float8("row"), {"block_size": [2, 128]}, "one scale for 2 x 128"),
        (torchao.fp4("MXTensor"), {"block_size": 16}, "codes in blocks of 16"),
        (torchao.fp4("NVFP4Tensor"), {"is_swizzled_scales": True}, "_weight_scale has 2048 scales; 256 x 8 in"),
    ],
)
def test_subclasses_that_cannot_be(pack, changes, message, llama, tmp_path):
    if "is_swizzled_scales" in changes:
        changes = {**changes, "scale": torch.ones(256, 8).to(torch.float8_e4m3fn)[:, :7]}
        message = "_weight_scale has 1792 scales; 256 x 8 in blocks need 2048"

    def pack_one(N, K, dtype, seed):
        record = pack(N, K, dtype, seed)
        return replaced(record, **changes) if (N, K) == (256, 128) else record

    torchao.torchao_checkpoint(tmp_path / "in", llama, pack_one)
    found = refused(tmp_path / "in", tmp_path / "out")
    assert re.search(message, found), found


def test_metadata_that_cannot_be(llama, tmp_path):
    torchao.torchao_checkpoint(tmp_path / "in", llama, torchao.int8)
    file, tensors = tmp_path / "in" / "model.safetensors", load_all(tmp_path / "in")
    name = f"{UP}.weight"
    for metadata, message in (
        ({}, "no file of it describes a tensor subclass"),
        ({"tensor_names": "3"}, "is no list of names"),
        ({"tensor_names": "["}, "is not JSON"),
        ({"tensor_names": json.dumps([name]), name: "[]"}, "is a JSON list"),
        (
            {"tensor_names": json.dumps([name]), name: '{"_tensor_data_names": ["qdata"]}'},
            "needs a class and its fields",
        ),
    ):
        save_file(tensors, file, metadata={"format": "pt", **metadata})
        found = refused(tmp_path / "in", tmp_path / "out")
        assert message in found, found


FROM_THE_HUB = """
from hf_quant import import_checkpoint

import_checkpoint("me/llama", "llama")
import_checkpoint("me/flux", "flux")
"""


def test_pickles_on_the_hub(llama, tmp_path):
    """They are downloaded where there is nothing else, of a model and of one component of a pipeline."""
    meant = torchao.torchao_checkpoint(tmp_path / "in", llama, torchao.int8, pickled=True)
    pipeline = save_flux(tmp_path / "pipeline")
    plain, ends = tmp_path / "plain", ("attn.to_q.weight", "proj_mlp.weight")
    (pipeline / "transformer").rename(plain)
    weights = torchao.torchao_checkpoint(pipeline / "transformer", plain, torchao.int8, pickled=True, ends=ends)
    (pipeline / "vae" / "diffusion_pytorch_model.bin").write_bytes(b"not needed")
    with Hub() as hub:
        hub.add("me/llama", files_of(tmp_path / "in"))
        hub.add(
            "me/flux",
            {**files_of(pipeline), "flux.safetensors": b"not needed", "README.md": b"---\nlicense: mit\n---\n"},
        )
        run_with_hub(FROM_THE_HUB, hub, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype="auto")
    assert mismatches(meant, weights_of(model))[0] == 0
    assert mismatches(weights, weights_of(load(tmp_path / "flux" / "transformer")))[0] == 0
    assert not any((tmp_path / "flux").rglob("*.bin")) and not (tmp_path / "flux" / "flux.safetensors").exists()
    assert "license: mit" in (tmp_path / "flux" / "README.md").read_text()
