"""Huge pages under the weights of a model."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import hf_quant.kernels.native.pages as pages
from hf_quant import quantize_
from hf_quant.kernels.native import use_huge_pages


def joined() -> int:
    """Bytes of this process in huge pages."""
    return 1024 * int(re.search(r"AnonHugePages: *(\d+) kB", Path("/proc/self/smaps_rollup").read_text())[1])


@pytest.fixture
def model() -> nn.Module:
    """48 MiB in layers each of which is smaller than a huge page."""
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(48)))


def mapped(path: Path) -> nn.Module:
    """Layers whose weights are pages of a file, as those of a checkpoint are."""
    values = torch.arange(8 << 20, dtype=torch.float32)
    path.write_bytes(values.numpy().tobytes())
    storage = torch.UntypedStorage.from_file(str(path), False, 32 << 20)
    weights = torch.tensor([], dtype=torch.float32).set_(storage).view(32, 512, 512)
    layers = nn.Sequential(*(nn.Linear(512, 512, bias=False, device="meta") for _ in range(32)))
    for layer, weight in zip(layers, weights):
        layer.weight = nn.Parameter(weight)
    return layers


@pytest.mark.parametrize("kind", ["memory", "memory of a system that takes long", "file", "file that is copied"])
def test_weights_move_and_stay_what_they_are(model, kind, monkeypatch, tmp_path):
    if not pages.page_size():
        pytest.skip("this system has no huge pages")
    if "file" in kind:
        model = mapped(tmp_path / "weights")
    monkeypatch.setattr(pages, "_wanted", "copy" if "copied" in kind else "on")
    if "long" in kind:
        monkeypatch.setattr(pages, "_SECONDS", -1)
    kept, addresses = [p.clone() for p in model.parameters()], [p.data_ptr() for p in model.parameters()]
    moved = use_huge_pages(model)
    assert moved <= sum(weight.nbytes for weight in kept)
    if "long" in kind:
        assert moved == 0
    elif kind == "memory":  # those of files may be few, or of the file system
        assert joined() >= moved
    elif "copied" in kind:
        assert moved >= 16 << 20
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), kept))
    assert [p.data_ptr() for p in model.parameters()] == addresses
    if "file" in kind:
        with torch.no_grad():
            model[3].weight.zero_()
        assert (tmp_path / "weights").read_bytes() == torch.cat(kept).detach().numpy().tobytes()


def test_quantize_moves_them(model, monkeypatch):
    seen = []
    monkeypatch.setattr("hf_quant.quantize.use_huge_pages", seen.append)
    quantize_(model, "int8")
    assert seen == [model]


@pytest.mark.parametrize("setting", ["off", "never", "missing"])
def test_systems_and_users_without(model, monkeypatch, tmp_path, setting):
    monkeypatch.setattr(pages, "_wanted", "off" if setting == "off" else "on")
    monkeypatch.setattr(pages, "_SETTINGS", tmp_path)
    if setting != "missing":
        (tmp_path / "enabled").write_text("always madvise [never]" if setting == "never" else "[always] madvise never")
        (tmp_path / "hpage_pmd_size").write_text("2097152")
    assert use_huge_pages(model) == 0


def test_values_of_the_variable(monkeypatch):
    for value, wanted in (("", "on"), ("on", "on"), ("off", "off"), ("copy", "copy")):
        monkeypatch.setenv(pages.VARIABLE, value)
        assert pages._read_variable() == wanted
    monkeypatch.setenv(pages.VARIABLE, "2MB")
    with pytest.raises(ValueError, match="HF_QUANT_HUGE_PAGES is '2MB'; allowed: on, off, copy"):
        pages._read_variable()
