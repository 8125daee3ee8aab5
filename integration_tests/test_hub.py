"""Round trips over a Hub on this machine: what is pushed comes back in a new process, equal to the bit.

A model of transformers by LFS in one part, in several, and by Xet; in shards; on a branch; in a private
repository; over a connection that broke while sending, and one that broke while receiving; after an upload that failed
half-way; in shards where a whole file was, and the reverse; a tokenizer; a model of diffusers with a variant; a
pipeline of diffusers by LFS and by Xet, and a subfolder of it; a quantized model pushed again from where it was
pulled. A process does several steps, because to import the hosts takes longer than a step. `hf-quant quantize --push`
is in test_push_command.py.
"""

import hashlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from torch import Tensor, uint8

from integration_tests.support.hub_records import Fault
from integration_tests.support.hub_server import Hub


pytest.importorskip("diffusers", reason="diffusers is an optional host")


def run(hub: Hub, directory: Path, code: str, *arguments: object, **options: str) -> dict[str, str]:
    """The JSON that a new process prints in its last line; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-c", _SHARED + code, *map(str, arguments)],
        env=hub.environment(directory / options.pop("home"), **options),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def digest(tensors: dict[str, Tensor]) -> str:
    """Hash the names, dtypes, shapes and bytes of tensors."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(bytes(tensor.detach().contiguous().flatten().view(uint8).tolist()))
    return found.hexdigest()


_SHARED = """
import json, os, sys
import torch
from hf_quant import quantize_
from integration_tests.test_hub import digest
from integration_tests.support.tiny_models import build

def pipeline():
    from integration_tests.support.tiny_diffusion import make_flux_pipeline
    pipe = make_flux_pipeline(torch.bfloat16)
    quantize_(pipe.transformer, "W8A8"), quantize_(pipe.text_encoder_2, "int4")
    return pipe

def of_pipeline(pipe):
    return digest({f"{n}.{k}": t for n in ("transformer", "text_encoder_2", "vae")
                   for k, t in getattr(pipe, n).state_dict().items()})
"""
PUSH = """
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoTokenizer

torch.manual_seed(0)
model = quantize_(build("llama").bfloat16(), "int4")
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
for _ in range(2):
    model.push_to_hub("me/model")
    tokenizer.push_to_hub("me/model")
model.push_to_hub("me/parts")
model.push_to_hub("me/shards", max_shard_size="20KB")
other = quantize_(build("llama").bfloat16(), "int8")
other.push_to_hub("me/whole-then-shards")
model.push_to_hub("me/whole-then-shards", max_shard_size="20KB")
HfApi().create_branch("me/model", branch="v2")
other.push_to_hub("me/model", revision="v2")
model.push_to_hub("me/secret", private=True)
model.push_to_hub("me/dropped")
model.push_to_hub("me/cut")
failed = None
try:
    model.push_to_hub("me/broken", max_shard_size="20KB")
except RuntimeError as error:
    failed = error.__cause__.response.status_code
model.push_to_hub("me/broken", max_shard_size="20KB")
refused = None
try:
    model.push_to_hub("other/model")
except HfHubHTTPError as error:
    refused = error.response.status_code
pipe = pipeline()
pipe.transformer.push_to_hub("me/transformer", variant="q")
for part, name in ((pipe.transformer, "shards-then-whole"), (pipe, "pipeline")):
    part.save_pretrained(name, push_to_hub=True, repo_id=f"me/{name}", private=True, max_shard_size="100KB")
pipe.transformer.push_to_hub("me/shards-then-whole")
pipe.push_to_hub("me/pipeline", private=True)
print(json.dumps({"model": digest(model.state_dict()), "other": digest(other.state_dict()),
                  "transformer": digest(pipe.transformer.state_dict()), "pipe": of_pipeline(pipe),
                  "tokens": tokenizer("The first three primes").input_ids, "failed": failed, "refused": refused}))
"""
PULL = """
from diffusers import FluxPipeline, FluxTransformer2DModel
from transformers import AutoModelForCausalLM, AutoTokenizer

def pulled(name, **options):
    return digest(AutoModelForCausalLM.from_pretrained(f"me/{name}", **options).state_dict())

found = {name: pulled(name) for name in ("model", "parts", "shards", "secret", "dropped", "cut", "broken")}
found["whole-then-shards"] = pulled("whole-then-shards")
found["v2"] = pulled("model", revision="v2")
again = AutoModelForCausalLM.from_pretrained("me/model")
again.push_to_hub("me/again")
found["again"] = pulled("again")
found["tokens"] = AutoTokenizer.from_pretrained("me/model")("The first three primes").input_ids
options = {"torch_dtype": torch.bfloat16}
transformer = FluxTransformer2DModel.from_pretrained("me/transformer", variant="q", **options)
found["transformer"] = digest(transformer.state_dict())
transformer = FluxTransformer2DModel.from_pretrained("me/shards-then-whole", **options)
found["shards-then-whole"] = digest(transformer.state_dict())
transformer = FluxTransformer2DModel.from_pretrained("me/pipeline", subfolder="transformer", **options)
found["subfolder"] = digest(transformer.state_dict())
found["pipe"] = of_pipeline(FluxPipeline.from_pretrained("me/pipeline", tokenizer=None, tokenizer_2=None, **options))
errors = {}
for name in ("secret", "pipeline"):
    try:
        AutoModelForCausalLM.from_pretrained(f"me/{name}", token=False, cache_dir="elsewhere")
    except OSError as error:
        errors[name] = str(error)
print(json.dumps({**found, "errors": errors}))
"""


def test_lfs(asset_model_dir, tmp_path):
    with Hub() as hub:
        hub.part_sizes["me/parts"] = 20_000
        hub.faults = [
            Fault("PUT", "/lfs/me/dropped/", after=5000),
            Fault("PUT", "/lfs/me/broken/", status=403, skip=2),
            Fault("GET", "/cdn/me/cut/", after=30_000),
        ]
        pushed = run(hub, tmp_path, PUSH, asset_model_dir, home="first")
        check_pushes(hub, pushed)
        sent = len(hub.requests)
        pulled = run(hub, tmp_path, PULL, home="second")
        models = ("model", "parts", "shards", "secret", "dropped", "cut", "broken", "again", "whole-then-shards")
        assert {pulled[name] for name in models} == {pushed["model"]}
        assert pulled["v2"] == pushed["other"] != pushed["model"]
        assert pulled["transformer"] == pulled["subfolder"] == pulled["shards-then-whole"] == pushed["transformer"]
        assert pulled["pipe"] == pushed["pipe"] and pulled["tokens"] == pushed["tokens"]
        assert set(pulled["errors"]) == {"secret", "pipeline"}
        # The connection that broke: the rest was asked for, or all of it, and no file twice but this one.
        reads = Counter(r.path for r in hub.requests[sent:] if r.method == "GET" and r.path.startswith("/cdn/"))
        assert {path for path, count in reads.items() if count > 1 and "me/pipeline" not in path} == {
            path for path in reads if path.startswith("/cdn/me/cut/")
        }
        assert not any(fault.times for fault in hub.faults)


def check_pushes(hub: Hub, pushed: dict[str, str]) -> None:
    """Check the requests that PUSH made."""
    assert (pushed["failed"], pushed["refused"]) == (403, 403)
    # What was pushed twice was committed once: the model, and its tokenizer.
    assert len([branch for branch, _ in hub.repositories["me/model"].commits if branch == "main"]) == 2
    assert len(hub.asked("PUT", "/lfs/me/model/")) == 2  # on main, and on v2
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(hub.files("me/model"))
    assert len(hub.asked("PUT", r"/lfs/me/parts/.*/\d+$")) > 2
    assert len([name for name in hub.files("me/shards") if name.endswith(".safetensors")]) > 2
    assert hub.repositories["me/secret"].private and hub.repositories["me/pipeline"].private
    # Files of an earlier upload that hosts would load instead of the newer ones are gone, and no others.
    assert "model.safetensors" not in hub.files("me/whole-then-shards")
    assert not [name for name in hub.files("me/shards-then-whole") if "index" in name]
    assert not [name for name in hub.files("me/pipeline") if "safetensors.index" in name]
    assert [name for name in hub.files("me/pipeline") if "-of-" in name]
    # After the failure, only what the Hub did not have was sent.
    uploads = hub.asked("PUT", "/lfs/me/broken/")
    stored = Counter(request.path for request in uploads if request.status == 200)
    assert [request.status for request in uploads].count(403) == 1
    assert set(stored.values()) == {1}
    assert len(stored) == len([name for name in hub.files("me/broken") if name.endswith(".safetensors")])
    assert len(hub.repositories["me/broken"].commits) == 1
    # The connection that broke: the client began anew by itself.
    assert [request.status for request in hub.asked("PUT", "/lfs/me/dropped/")] == [0, 200]
    assert {"config.json", "diffusion_pytorch_model.q.safetensors"} <= set(hub.files("me/transformer"))
    config = json.loads(hub.files("me/pipeline")["transformer/config.json"])
    assert config["quantization_config"]["quant_method"] == "hf_quant"


PUSH_XET = """
torch.manual_seed(0)
model = quantize_(build("llama").bfloat16(), "int4")
for _ in range(2):
    model.push_to_hub("me/model")
pipe = pipeline()
pipe.push_to_hub("me/pipeline")
print(json.dumps({"model": digest(model.state_dict()), "pipe": of_pipeline(pipe)}))
"""
PULL_XET = """
from diffusers import FluxPipeline
from transformers import AutoModelForCausalLM
from hf_quant.checkpoint import inspect_checkpoint

model = AutoModelForCausalLM.from_pretrained("me/model")
options = {"torch_dtype": torch.bfloat16, "tokenizer": None, "tokenizer_2": None}
pipe = FluxPipeline.from_pretrained("me/pipeline", **options)
print(json.dumps({"model": digest(model.state_dict()), "pipe": of_pipeline(pipe),
                  "bits": inspect_checkpoint("me/model").bits_per_weight}))
"""


def test_xet(tmp_path):
    pytest.importorskip("hf_xet", reason="Xet needs hf_xet, which huggingface_hub brings along on common platforms")
    with Hub(xet=tmp_path / "store") as hub:
        (tmp_path / "store").mkdir()
        pushed = run(hub, tmp_path, PUSH_XET, home="first")
        assert not hub.asked("PUT", "") and hub.asked("GET", "xet-write-token")
        assert len(hub.repositories["me/model"].commits) == 1
        pulled = run(hub, tmp_path, PULL_XET, home="second")
        assert (pulled["model"], pulled["pipe"]) == (pushed["model"], pushed["pipe"])
        assert hub.asked("GET", "xet-read-token")
        # Weights came from the store; `inspect` read the header over HTTP.
        assert [request.path.rpartition("/")[2] for request in hub.asked("GET", "/cdn/")] == ["model.safetensors"]
        assert 4 < pulled["bits"] < 5
