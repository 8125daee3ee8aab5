"""`inspect_checkpoint` and `hf-quant inspect` of a repository of the Hub: what they read, and what they refuse."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from torch import nn

from hf_quant import quantize_, save_quantized
from hf_quant.checkpoint import DTYPES, TensorInfo, expected_tensors, inspect_checkpoint, inspect_parts
from hf_quant.cli import main
from hf_quant.config import QuantizerConfig
from hf_quant.planning import schemes_to_list
from hf_quant.resolve import resolve_scheme
from integration_tests.support.hub_records import Content, Fault, Sparse
from integration_tests.support.hub_server import Hub, asked_by_this_process
from integration_tests.support.tiny_models import build


NAMES = {dtype: name for name, dtype in DTYPES.items()}


@pytest.fixture
def hub(monkeypatch):
    with Hub() as server, asked_by_this_process(server.url, monkeypatch):
        yield server


def files_of(directory: Path) -> dict[str, Content]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A sharded int4 checkpoint of transformers."""
    directory = tmp_path_factory.mktemp("llama")
    quantize_(build("llama"), "int4").save_pretrained(directory, max_shard_size="20KB")
    assert len(list(directory.glob("*.safetensors"))) > 3
    return directory


def header(tensors: dict[str, TensorInfo]) -> Sparse:
    """A safetensors file of zeros."""
    entries, position = {}, 0
    for name, info in tensors.items():
        span = [position, position + info.nbytes]
        entries[name] = {"dtype": NAMES[info.dtype], "shape": list(info.shape), "data_offsets": span}
        position += info.nbytes
    text = json.dumps(entries).encode()
    return Sparse(len(text).to_bytes(8, "little") + text, 8 + len(text) + position)


def huge() -> dict[str, Content]:
    """A model of 40e9 weights in int4: 80 layers in 20 shards, more than 20 GB."""
    scheme, _ = resolve_scheme({"weights": "int4"}, torch.bfloat16)
    shapes = {f"self_attn.{n}_proj": (8192, 8192) for n in "qkvo"} | {"mlp.up_proj": (28672, 8192)}
    files, weight_map, names = {}, {}, []
    for shard in range(20):
        tensors = {}
        for layer in range(4 * shard, 4 * shard + 4):
            for leaf, shape in shapes.items():
                names.append(f"model.layers.{layer}.{leaf}")
                parts = expected_tensors(scheme, {"weight": shape})
                tensors |= {f"{names[-1]}.{key}": info for key, info in parts.items()}
            tensors[f"model.layers.{layer}.norm.weight"] = TensorInfo(torch.bfloat16, (8192,))
        file = f"model-{shard + 1:05}-of-00020.safetensors"
        files[file] = header(tensors)
        weight_map |= dict.fromkeys(tensors, file)
    config = QuantizerConfig("int4")
    config.plan = schemes_to_list(dict.fromkeys(names, scheme))
    fields = {"model_type": "llama", "quantization_config": config.to_dict()}
    index = {"metadata": {}, "weight_map": weight_map}
    return {
        **files,
        "config.json": json.dumps(fields).encode(),
        "model.safetensors.index.json": json.dumps(index).encode(),
    }


def test_twenty_gigabytes_cost_less_than_two_megabytes(hub):
    files = huge()
    size = sum(content.size for content in files.values() if isinstance(content, Sparse))
    assert size > 20e9
    hub.add("me/huge", files)
    summary = inspect_checkpoint("me/huge")
    assert summary.num_files == 20 and summary.nbytes == pytest.approx(size, rel=1e-3)
    assert summary.bits_per_weight == pytest.approx(4.25, abs=1e-5)
    assert {row.count for row in summary.rows} == {80}
    sent = sum(request.sent for request in hub.requests)
    assert sent < 2e6, f"{sent} bytes"  # as docs/cli.md says
    assert all(request.sent < 1e6 for request in hub.requests)
    assert len(hub.asked("GET", "/cdn/.*safetensors$")) == 20


def test_a_server_without_ranges_is_not_read_to_the_end(hub):
    hub.honours_ranges = False
    files = huge()
    hub.add("me/huge", files)
    assert inspect_checkpoint("me/huge").num_files == 20
    # What the buffers between the two took up before the connection was closed.
    assert sum(request.sent for request in hub.requests) < 20 * 12e6


def test_the_table_is_that_of_the_directory(hub, llama, tmp_path, capsys):
    hub.add("me/model", files_of(llama))
    expected = str(inspect_checkpoint(llama))
    assert str(inspect_checkpoint("me/model")) == expected
    assert main(["inspect", str(llama)]) == main(["inspect", "me/model", "--revision", "main"]) == 0
    assert capsys.readouterr() == (f"{expected}\n" * 2, "")
    # At a commit, what was pushed later does not count.
    commit = hub.repositories["me/model"].branches["main"]
    hub.repositories["me/model"].commit("main", "nothing left", dict.fromkeys(files_of(llama)))
    assert str(inspect_checkpoint("me/model", revision=commit)) == expected
    with pytest.raises(ValueError, match="me/model is not the directory of a quantized model: no config.json"):
        inspect_checkpoint("me/model")
    save_quantized(quantize_(nn.Sequential(nn.Linear(64, 64)), "int8"), tmp_path)
    hub.add("me/module", files_of(tmp_path))
    assert str(inspect_checkpoint("me/module")) == str(inspect_checkpoint(tmp_path))


def test_pipelines(hub, llama, capsys):
    parts = {"transformer": llama, "text_encoder": llama}
    files = {f"{part}/{name}": data for part, path in parts.items() for name, data in files_of(path).items()}
    files |= {"vae/config.json": b'{"_class_name": "AutoencoderKL"}', "model_index.json": b"{}"}
    hub.add("me/pipe", files)
    found = inspect_parts("me/pipe")
    assert list(found) == ["text_encoder", "transformer"]
    assert str(found["transformer"]) == str(inspect_checkpoint(llama))
    assert main(["inspect", "me/pipe"]) == 0
    assert capsys.readouterr().out.count("modules quantized by hf_quant") == 2
    with pytest.raises(ValueError, match="it has the parts text_encoder, transformer, vae: name one of them"):
        inspect_checkpoint("me/pipe")
    hub.add("me/plain", {name: data for name, data in files.items() if name.startswith(("vae", "model_index"))})
    with pytest.raises(ValueError, match="me/plain is a pipeline without a component that hf_quant has quantized"):
        inspect_parts("me/plain")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("me/nothing", {}, "me/nothing is not a directory, and the Hub has no such model, or it is private: log in"),
        ("me/secret", {"token": False}, "me/secret is not a directory, .* or it is private: log in"),
        ("me/secret", {"token": "hf_other"}, "me/secret is not a directory, .* or it is private: log in"),
        ("me/secret", {"token": "hf_wrong"}, "me/secret: the Hub does not know the token"),
        ("me/model", {"revision": "v2"}, "me/model has no revision 'v2'; give a branch, tag or commit"),
        ("me/model", {"revision": "a\nb"}, r"revision is 'a\\nb'; needs a branch"),
        ("me/empty", {}, "me/empty is not the directory of a quantized model: no config.json"),
        ("me/plain", {}, "me/plain/config.json has no quantization_config: the model is not quantized"),
        ("me/pickle", {}, "me/pickle holds no safetensors file; pytorch_model.bin is a pickle, which could run"),
        (
            "../../nowhere",
            {},
            "../../nowhere is not a directory, and not a name on the Hub either, which is USER/NAME",
        ),
    ],
)
def test_what_is_refused(hub, llama, name, arguments, message):
    files = files_of(llama)
    hub.add("me/model", files)
    hub.add("me/secret", files, private=True)
    hub.add("me/empty", {})
    hub.add("me/plain", {"config.json": b'{"model_type": "llama"}'})
    hub.add("me/pickle", {"config.json": files["config.json"], "pytorch_model.bin": b"x"})
    with pytest.raises(ValueError, match=message) as caught:
        inspect_checkpoint(name, **arguments)
    assert "\n" not in str(caught.value)
    if "revision" not in arguments:  # with the right token
        assert inspect_checkpoint("me/secret", token="hf_test").rows


def test_revisions_are_of_the_hub_and_offline_is_said(hub, llama, monkeypatch):
    with pytest.raises(ValueError, match="is on this machine and has no revision 'main': leave it out"):
        inspect_checkpoint(llama, revision="main")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set: it is not in the cache"):
        inspect_checkpoint("me/model")


def test_dropped_connections_and_errors_of_the_server(hub, llama):
    hub.add("me/model", files_of(llama))
    expected = str(inspect_checkpoint(llama))
    hub.faults = [Fault("GET", "/cdn/", after=100), Fault("GET", "config.json$", after=10)]
    assert str(inspect_checkpoint("me/model")) == expected
    assert not any(fault.times for fault in hub.faults)
    hub.faults = [Fault("GET", "/cdn/", after=100, times=100)]
    with pytest.raises(ValueError, match=r"me/model/model-0.*: the Hub cannot be reached: ") as caught:
        inspect_checkpoint("me/model")
    assert "\n" not in str(caught.value)
    hub.faults = [Fault("GET", "/cdn/", status=403)]
    with pytest.raises(ValueError, match=r"me/model/model-0.*: the Hub answers with status 403: made to fail"):
        inspect_checkpoint("me/model")


def test_hostile_repositories(hub, llama, monkeypatch):
    files = files_of(llama)
    index = json.loads(files["model.safetensors.index.json"])
    for shard in ("../../../etc/passwd.safetensors", "/etc/x.safetensors", "a\\..\\x.safetensors", "x\n.safetensors"):
        weight_map = {**index["weight_map"], "a": shard}
        hub.add("me/evil", {**files, "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode()})
        with pytest.raises(ValueError, match="a shard is a .safetensors file beside the index") as caught:
            inspect_checkpoint("me/evil")
        assert "\n" not in str(caught.value)
    # A header that claims 90 MB of the file's 2 GB, and a budget for all that is read.
    claim = (90_000_000).to_bytes(8, "little")
    hub.add("me/claim", {"config.json": files["config.json"], "model.safetensors": Sparse(claim, 2 << 30)})
    monkeypatch.setattr("hf_quant.checkpoint.folder.MAX_REMOTE_BYTES", 1_000_000)
    with pytest.raises(ValueError, match="me/claim has more than 1000000 bytes of configs and headers"):
        inspect_checkpoint("me/claim")
    assert sum(request.sent for request in hub.asked("GET", "/cdn/me/claim")) < 20e6
