"""Native blocks with a cache of transformers in 16 bit: the host's logits, and caches that somebody changes."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_quant import unfuse_activations_
from hf_quant.kv_cache import next_tokens
from hf_quant.testing import assert_close
from hf_quant.tests.integrations import test_fused_blocks, test_latent_blocks
from hf_quant.tests.integrations.test_fused_blocks import FAMILIES, generate, needs_native, prompt


pytestmark = needs_native
PLAIN = {"weights": "int4", "modules_to_not_convert": ["lm_head"]}
LATENT = ("minicpm3", "deepseek_v2")


def make(kind: str, dtype: torch.dtype = torch.float32, **fields) -> PreTrainedModel:
    if kind in LATENT:
        return test_latent_blocks.make(kind, dtype)
    return test_fused_blocks.make(kind, PLAIN, dtype, **{**FAMILIES[kind][0], **fields})


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    """A model whose decoder has its blocks."""
    model = make("llama")
    for rows in (1, 2):
        for _ in range(3):
            generate(model, prompt(rows))
    return model


def forced(
    model: PreTrainedModel, mask: Tensor, ends: tuple[int, ...], change=lambda cache, at: cache, cache=None
) -> Tensor:
    """Logits of tokens that are given in parts, which end there; `change` of the cache behind each."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    found, ids = [], prompt(*mask.shape)
    with torch.no_grad():
        for end in ends:
            part = {"attention_mask": mask[:, :end], "past_key_values": cache}
            found.append(model(ids[:, cache.get_seq_length() : end], **part).logits)
            cache = change(cache, end)
    return torch.cat(found, 1)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *((kind, {}) for kind in ("llama", "smollm3", "cohere", "gpt_neox", "qwen2_moe", "gpt2", *LATENT)),
        *(("gemma3_text", {"sliding_window": window}) for window in (8, 20, 64)),
    ],
)
def test_logits_of_the_host(parts, kind, fields):
    """Prompts, several tokens behind others and single ones, beyond windows; alone and padded."""
    model, alone, padded = make(kind, **fields), torch.ones(1, 40).long(), torch.ones(3, 40).long()
    padded[0, :11] = padded[2, :1] = 0
    ends, found = (17, 18, 19, 30, *range(31, 41)), []
    for is_fused in (True, False):
        for mask in (alone, padded):
            for _ in range(8 if is_fused else 1):  # a block for each kind of call, after some calls
                parts.clear()
                logits = forced(model, mask, ends)
            found.append(logits[mask.bool()])
            assert (sum(parts) >= 10) == is_fused, parts
        unfuse_activations_(model)
    for ours, host in zip(found[:2], found[2:]):
        assert_close(ours, host, rms=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(parts, dtype):
    model, mask = make("llama", dtype), torch.ones(2, 24).long()
    for _ in range(4):
        parts.clear()
        ours = forced(model, mask, (12, *range(13, 25)))
    assert parts
    unfuse_activations_(model)
    assert_close(ours, forced(model, mask, (12, *range(13, 25))), rms=2e-2 if dtype == torch.bfloat16 else 3e-3)


def test_tokens_are_written_in_place_and_views_keep_theirs(llama):
    cache, ids = DynamicCache(config=llama.config), prompt(1, 20)
    with torch.no_grad():
        llama(ids[:, :10], past_key_values=cache)
        llama(ids[:, 10:11], past_key_values=cache)
        layer = cache.layers[0]
        held, kept, address = layer.keys, layer.keys.clone(), layer.keys.data_ptr()
        for i in range(11, 16):
            llama(ids[:, i : i + 1], past_key_values=cache)
    assert layer.keys.data_ptr() == address and layer.keys.shape[2] == layer.values.shape[2] == 16
    assert held.shape[2] == 11 and torch.equal(held, kept) and torch.equal(layer.keys[:, :, :11], kept)
    assert cache.get_seq_length() == 16


@pytest.mark.parametrize("change", ["read", "replaced", "copied", "repeated"])
def test_views_are_made_for_who_reads_them(llama, change):
    """Layers are of their own class again once their tokens are read, and have all of them."""
    cache, ids = DynamicCache(config=llama.config), prompt(1, 20)
    with torch.no_grad():
        llama(ids[:, :10], past_key_values=cache)
        for i in range(10, 14):
            llama(ids[:, i : i + 1], past_key_values=cache)
    layer = cache.layers[-1]
    assert isinstance(layer, DynamicLayer) and type(layer) is not DynamicLayer and "DynamicLayer" in repr(cache)
    if change == "replaced":
        layer.keys = layer.keys[:, :, :-1]
        layer.values = layer.values[:, :, :-1]
    elif change == "repeated":
        layer.batch_repeat_interleave(2)
    other = copy.copy(layer) if change == "copied" else layer
    assert other.keys.shape == other.values.shape and type(layer) is type(other) is DynamicLayer
    assert other.keys.shape[::2] == (1 + (change == "repeated"), 14 - (change == "replaced"))


def _copied(cache, at):
    return copy.deepcopy(cache) if at == 14 else pickle.loads(pickle.dumps(cache)) if at == 16 else cache


def _shared(cache, at):
    """A copy of the layers, not of their tensors, which goes another way."""
    if at == 14:
        other = copy.copy(cache)
        other.layers = [copy.copy(layer) for layer in cache.layers]
        _shared.model(prompt(2, 30)[:, 20:21], past_key_values=other)
        _shared.model(prompt(2, 30)[:, 22:23], past_key_values=other)
    return cache


def _cropped(cache, at):
    if at in (14, 16):
        cache.crop(-3)
        with torch.no_grad():
            _cropped.model(prompt(2, 30)[:, at - 3 : at], past_key_values=cache)
    return cache


def _selected(cache, at):
    if at == 14:
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([2, 1]))
    return cache


def _reset(cache, at):
    if at == 14:
        cache.reset()
        assert cache.get_seq_length() == 0
        with torch.no_grad():
            _reset.model(prompt(2, 30)[:, :14], past_key_values=cache)
    return cache


def _moved(cache, at):
    """The host's own `update` adds a token, as in a layer without a block."""
    if at == 14:
        layer = cache.layers[0]
        new = layer.keys[:, :, -1:].clone(), layer.values[:, :, -1:].clone()
        layer.crop(-1)
        layer.update(*new)
    return cache


@pytest.mark.parametrize("change", [_copied, _shared, _cropped, _selected, _reset, _moved])
def test_caches_that_somebody_changes(llama, change):
    ends, mask = (12, 13, 14, 15, 16, 17, 25, 26, 30), torch.ones(2, 30).long()
    change.model = llama
    expected = forced(llama, mask, ends)
    assert_close(forced(llama, mask, ends, change), expected, rms=1e-5)


def test_a_window_that_records_the_past():
    """Assisted generation asks for it; what was taken back never was."""
    model, ids = make("gemma3_text", sliding_window=8), prompt(1, 40)
    results = []
    for is_fused in (True, False):
        for _ in range(4 if is_fused else 1):
            cache = DynamicCache(config=model.config)
            for layer in cache.layers:
                if hasattr(layer, "activate_past_recording"):
                    layer.activate_past_recording()
            with torch.no_grad():
                model(ids[:, :12], past_key_values=cache)
                model(ids[:, 30:35], past_key_values=cache)
                cache.crop(-4)
                model(ids[:, 12:13], past_key_values=cache)
                cache.crop(0)
                results.append(model(ids[:, 13:16], past_key_values=cache).logits)
        unfuse_activations_(model)
    assert_close(results[-2], results[-1], rms=1e-4)


def test_beams_and_several_turns(llama):
    ids = prompt(2)
    cache = DynamicCache(config=llama.config)
    first = generate(llama, ids, past_key_values=cache)
    both = torch.cat([first, ids], 1)
    ours = [generate(llama, both, past_key_values=cache), generate(llama, ids, num_beams=3)]
    ours += [generate(llama, ids[:1], prompt_lookup_num_tokens=3)]
    host = unfuse_activations_(copy.deepcopy(llama))
    assert torch.equal(generate(host, ids), first)
    expected = [
        generate(host, both),
        generate(host, ids, num_beams=3),
        generate(host, ids[:1], prompt_lookup_num_tokens=3),
    ]
    assert all(map(torch.equal, ours, expected))


def test_caches_that_are_left_alone(llama):
    """Caches of classes that may do more, and layers that lack something, are not written to."""

    class Own(DynamicCache):
        updates = 0

        def update(self, *args, **kwargs):
            self.updates += 1
            return super().update(*args, **kwargs)

    own, ids = Own(config=llama.config), prompt(1, 9)
    with torch.no_grad():
        for part in ids.split([6, 1, 2], 1):
            llama(part, past_key_values=own)
    assert own.updates == 3 * len(own.layers)
    layer, sizes = DynamicCache(config=llama.config).layers[0], (2, 32, torch.float32)
    assert next_tokens(layer, 2, 1, *sizes) is None and next_tokens(layer, 2, 5, *sizes).place == (0, 5, -1)
    layer.update(torch.zeros(2, 2, 7, 32), torch.zeros(2, 2, 7, 32))
    assert next_tokens(layer, 2, 3, *sizes).place == (0, 10, 0)
    for B, *other in ((1, 2, 32, torch.float32), (2, 4, 32, torch.float32), (2, 2, 16, torch.float32)):
        assert next_tokens(layer, B, 1, *other) is None
    assert next_tokens(layer, 2, 1, 2, 32, torch.bfloat16) is None
    layer.keys.requires_grad_()
    assert next_tokens(layer, 2, 1, *sizes) is None
    # A place that was found while the layer was empty is none of other sequences, and none any more behind tokens.
    layer = DynamicCache(config=llama.config).layers[0]
    before = next_tokens(layer, 2, 5, *sizes)
    assert next_tokens(layer, 3, 5, *sizes).cache is not before.cache
    layer.update(torch.zeros(2, 2, 7, 32), torch.zeros(2, 2, 7, 32))
    assert before.layer.next(9, 5) is None and next_tokens(layer, 2, 5, *sizes).place == (0, 12, 0)


def test_an_embedding_that_keeps_a_state_is_called_once_a_pass():
    """The host sets such a one for an assistant with another tokenizer: it maps ids from the second call on."""

    class Counting(nn.Module):
        def __init__(self, table: nn.Embedding) -> None:
            super().__init__()
            self.table, self.weight, self.calls = table, table.weight, 0

        def forward(self, ids: Tensor) -> Tensor:
            self.calls += 1
            return self.table(ids)

    model, passes = make("llama"), 0
    model.set_input_embeddings(embed := Counting(model.get_input_embeddings()))
    for _ in range(4):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            for part in prompt(1, 12).split([5, 3, 1, 1, 1, 1], 1):
                model(part, past_key_values=cache)
                passes += 1
    assert embed.calls == passes
