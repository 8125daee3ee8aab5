"""Untrusted checkpoints through `from_pretrained`: they load, or end in a ValueError of one line.

Never another weight than the checkpoint holds, no file beside it, no pickle, and no hour of waiting. 300 cases break
the config or the file of a good checkpoint, the same in every run; the rest is what an attacker would try first.
"""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_quant import quantize_
from hf_quant.tests.test_hostile_checkpoints import cases, edited, put_together, taken_apart
from integration_tests.support.tiny_models import build


from hypothesis import given  # noqa: E402, isort: skip  (the module above skips this one where it is missing)
from hypothesis import strategies as st  # noqa: E402, isort: skip


AUTO = transformers.AutoModelForCausalLM
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """The host's reports and progress bars are not what is looked at."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(before)
    transformers.logging.enable_progress_bar()


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("good") / "model"
    quantize_(build("llama"), "int4").save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def state(good) -> dict[str, Tensor]:
    return AUTO.from_pretrained(good).state_dict()


@pytest.fixture(scope="module")
def place(good, tmp_path_factory) -> Path:
    """A copy to break again and again."""
    return Path(shutil.copytree(good, tmp_path_factory.mktemp("broken") / "model"))


@pytest.fixture
def broken(good, tmp_path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "model"))


def loaded(directory: Path, **kwargs: Any) -> dict[str, Tensor] | None:
    """The weights; None if it was refused."""
    try:
        return AUTO.from_pretrained(directory, **kwargs).state_dict()
    except ValueError as error:
        message = str(error)
        assert type(error) is ValueError, type(error)
        assert message.isprintable() and len(message) > 10, message[:2000]
        return None


def refusal(directory: Path, **kwargs: Any) -> str:
    start = time.perf_counter()
    with pytest.raises(ValueError) as caught:
        AUTO.from_pretrained(directory, **kwargs)
    assert time.perf_counter() - start < 10
    assert type(caught.value) is ValueError and str(caught.value).isprintable()
    return str(caught.value)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@cases(150)
@given(data=st.data())
def test_configs(data, good, place, state):
    """Whatever the config says of the codes: if it is believed, they are those of the file."""
    fields = json.loads((good / "config.json").read_text())
    changed = data.draw(edited(fields["quantization_config"]))
    fields["quantization_config"] = {**changed, "quant_method": "hf_quant"}  # without it the host asks somebody else
    (place / "config.json").write_text(json.dumps(fields))
    shutil.copyfile(good / WEIGHTS, place / WEIGHTS)
    found = loaded(place)
    assert found is None or same(found, state)


@cases(150)
@given(data=st.data())
def test_files(data, good, place, state):
    """Header and tensors: what loads has each weight of the model, as the file has it."""
    raw = (good / WEIGHTS).read_bytes()
    header, tensors = taken_apart(raw)
    edit = data.draw(st.sampled_from(("header", "cut", "append", "flip in the header", "length")))
    if edit == "header":
        raw = put_together(json.dumps(data.draw(edited(header))).encode(), tensors)
    elif edit == "cut":
        raw = raw[: -data.draw(st.sampled_from((1, 2, 8, 100, len(tensors), len(raw) - 8, len(raw))))]
    elif edit == "append":
        raw += data.draw(st.binary(min_size=1, max_size=9))
    else:
        span = (0, 7) if edit == "length" else (8, len(raw) - len(tensors) - 1)
        at = data.draw(st.integers(*span))
        raw = raw[:at] + bytes([data.draw(st.integers(0, 255))]) + raw[at + 1 :]
    (place / WEIGHTS).write_bytes(raw)
    shutil.copyfile(good / "config.json", place / "config.json")
    found = loaded(place)
    if found is not None:
        assert found.keys() == state.keys() and all(found[n].shape == state[n].shape for n in state)
        assert edit in ("header", "flip in the header") or raw == (good / WEIGHTS).read_bytes()


def change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])
def test_weights_are_not_made_up(name, broken):
    """A missing 16-bit tensor is an error, too: the host would draw random values for it."""
    change_tensors(broken, lambda tensors: tensors.pop(name))
    assert f"the checkpoint lacks {name}; is a shard missing?" in refusal(broken)


def test_other_heads_are_new(broken):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(broken, num_labels=3)
    assert model.score.weight.shape == (3, 64)
    model.save_pretrained(broken.parent / "classifier")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(broken.parent / "classifier")
    assert torch.equal(again.score.weight, model.score.weight)
    # Of the saved class, with another number of labels, where the user says so.
    saved, options = broken.parent / "classifier", {"num_labels": 5, "ignore_mismatched_sizes": True}
    try:
        other = transformers.AutoModelForSequenceClassification.from_pretrained(saved, **options)
    except ValueError as error:  # older versions of transformers load what does not fit
        assert "score.weight is (3, 64); the model's config needs (5, 64)" in str(error)
    else:
        assert other.score.weight.shape == (5, 64)


@pytest.mark.parametrize("leaf", ["qdata_", "qdata_weight", "qdata_x"])
def test_names_almost_of_codes(leaf, broken):
    name = "model.layers.1.mlp.up_proj"
    change_tensors(broken, lambda tensors: tensors.update({f"{name}.{leaf}": tensors.pop(f"{name}.qdata")}))
    assert name in refusal(broken)


def test_integers_are_no_weights(broken):
    name = "model.norm.weight"
    change_tensors(broken, lambda tensors: tensors.update({name: tensors[name].to(torch.int64)}))
    assert f"the checkpoint has {name} as [64] int64, which the model computes with" in refusal(broken)


def test_thousands_of_empty_tensors(broken, state):
    change_tensors(broken, lambda tensors: tensors.update({f"x.{i}.weight": torch.empty(0) for i in range(20_000)}))
    start = time.perf_counter()
    assert same(AUTO.from_pretrained(broken).state_dict(), state)
    assert time.perf_counter() - start < 15


def test_a_plan_of_as_many_prefixes_as_names(broken, state):
    fields = json.loads((broken / "config.json").read_text())
    fields["quantization_config"]["plan"][0]["modules"] += ["{0-99999}.x", "{100000-199999}.x"]
    (broken / "config.json").write_text(json.dumps(fields))
    start = time.perf_counter()
    assert same(AUTO.from_pretrained(broken).state_dict(), state)
    assert time.perf_counter() - start < 15


@pytest.mark.parametrize("shard", ["../other/model.safetensors", "{other}/model.safetensors", "a/../../other/x"])
def test_shards_elsewhere(shard, good, broken, tmp_path):
    shutil.copytree(good, tmp_path / "other")
    names = list(load_file(broken / WEIGHTS))
    (broken / WEIGHTS).unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, shard.format(other=tmp_path / "other"))}
    (broken / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    assert "a shard is a .safetensors file beside the index" in refusal(broken)


class Mark:
    """Leaves a mark when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("names_a_dtype", [True, False])
@pytest.mark.parametrize("kind", ["instead", "beside", "index", "named by the config"])
def test_pickles_are_not_run(kind, names_a_dtype, broken, tmp_path):
    """Not even where the host opens them first: to see their dtype, which the config does not name."""
    fields = json.loads((broken / "config.json").read_text())
    file = {"index": "x.bin", "named by the config": "adapter_model.bin"}.get(kind, "pytorch_model.bin")
    torch.save({"a": Mark(tmp_path / "mark")}, broken / file)
    if kind == "named by the config":
        fields["transformers_weights"] = file
    if kind == "index":
        weight_map = dict.fromkeys(load_file(broken / WEIGHTS), file)
        index = json.dumps({"metadata": {}, "weight_map": weight_map})
        (broken / f"{WEIGHTS}.index.json").write_text(index)
    if kind != "beside":
        (broken / WEIGHTS).unlink()
    if not names_a_dtype:
        del fields["dtype"]
    (broken / "config.json").write_text(json.dumps(fields))
    options = {"use_safetensors": False} if kind == "beside" else {}
    assert "weights_only=False lets a pickle run any code" in refusal(broken, weights_only=False, **options)
    with pytest.raises(Exception, match="is no safetensors file but|Weights only load failed"):
        AUTO.from_pretrained(broken, **options)
    assert not (tmp_path / "mark").exists()
