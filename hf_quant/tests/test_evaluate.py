"""Perplexity and KL against their definitions, timing, reading of texts."""

import math
import time

import numpy
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from hf_quant import quantize_
from hf_quant.evaluate import PeakMemory, bits_per_weight, generation_speed, machine, quality, read_ids, read_windows


def tiny_llama(seed: int = 0, **fields) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**{"vocab_size": 96, **sizes, **fields})
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 96, (70,), generator=torch.Generator().manual_seed(1))


def test_quality_is_what_its_definition_says(ids, monkeypatch):
    monkeypatch.setattr("hf_quant.evaluate.MAX_LOGITS", 16 * 96 * 3)  # batches of 3, then 1
    reference, model = tiny_llama(0), tiny_llama(1)
    found = quality({"model": model, "reference": reference}, ids, window=16, reference="reference")
    windows = ids[:64].view(4, 16)
    with torch.no_grad():
        log_q = model(windows).logits[:, :-1].double().log_softmax(-1)
        log_p = reference(windows).logits[:, :-1].double().log_softmax(-1)
    nll = nn.functional.nll_loss(log_q.flatten(0, 1), windows[:, 1:].flatten())
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    assert found["model"].num_tokens == 60
    assert found["model"].perplexity == pytest.approx(math.exp(nll), rel=1e-5)
    assert found["model"].kl == pytest.approx(kl.item(), rel=1e-4)
    assert found["model"].kl > 1e-3
    same = (log_p.argmax(-1) == log_q.argmax(-1)).double().mean().item()
    assert found["model"].agreement == pytest.approx(same)
    assert same < 1
    assert found["reference"].kl == 0
    assert found["reference"].agreement == 1


def test_quality_records_nothing_for_a_backward_pass(ids):
    model, recorded = tiny_llama(), []
    model.register_forward_hook(lambda module, args, output: recorded.append(output.logits.requires_grad))
    quality({"model": model}, ids, window=16)  # sums over a whole text would keep the activations of all its batches
    assert recorded == [False]


def test_quality_without_a_reference_has_no_kl(ids):
    (found,) = quality({"model": tiny_llama()}, ids, window=70).values()
    assert (found.kl, found.agreement, found.num_tokens) == (None, None, 69)


@pytest.mark.parametrize(
    ("window", "token", "match"),
    [
        (71, 0, "70 tokens in windows of 71"),
        (1, 0, "windows of at least 2"),
        (16, 96, "token id 96 is not in"),
        (2049, 0, r"model has 2048 positions .* give a window of at most 2048"),
    ],
)
def test_quality_refuses(ids, window, token, match):
    ids = ids.clone()
    ids[0] = token
    with pytest.raises(ValueError, match=match):
        quality({"model": tiny_llama()}, ids, window=window)


def test_a_reference_of_another_vocabulary_is_refused(ids):
    models = {"model": tiny_llama(), "other": tiny_llama(vocab_size=128)}
    with pytest.raises(ValueError, match="model has a vocabulary of 96, and other one of 128"):
        quality(models, ids, window=16, reference="other")
    assert set(quality(models, ids, window=16)) == set(models)  # without one there is no distance


@pytest.mark.parametrize("kind", ["dynamic", "linear", "yarn"])
def test_positions_that_are_stretched_are_no_bound(ids, kind):
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}
    assert quality({"m": tiny_llama(max_position_embeddings=16, rope_parameters=rope)}, ids, window=32)


def test_only_causal_language_models_are_judged(ids):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    encoder = BertModel(BertConfig(vocab_size=96, **sizes))
    with pytest.raises(ValueError, match="encoder is a BertModel; needs a causal"):
        quality({"encoder": encoder}, ids, window=16)
    with pytest.raises(ValueError, match="needs a causal"):
        generation_speed({"encoder": encoder})


def test_generation_speed_counts_seconds_and_tokens():
    now = iter(range(1000))  # a second passes between any two looks at the clock
    model = tiny_llama()
    model.generation_config.eos_token_id = list(range(95))  # must not end the measurement
    found = generation_speed({"a": model}, prompt_tokens=4, new_tokens=3, rounds=2, clock=lambda: next(now))
    assert found["a"].prefill == 1
    assert found["a"].decode == 1
    assert next(now) == 3 + 2 * 4  # start and 2 tokens to warm up, then start and 3 tokens in each round


def test_generation_speed_takes_the_models_in_turns(monkeypatch):
    models, order = {"a": tiny_llama(0), "b": tiny_llama(1)}, []
    for name, model in models.items():
        generate = model.generate
        monkeypatch.setattr(
            model, "generate", lambda *args, _name=name, _run=generate, **kw: (order.append(_name), _run(*args, **kw))
        )
    found = generation_speed(models, prompt_tokens=4, new_tokens=2, rounds=2)
    assert order == ["a", "b"] * 3
    assert all(speed.prefill > 0 and speed.decode > 0 for speed in found.values())
    with pytest.raises(ValueError, match="new_tokens=1"):
        generation_speed(models, new_tokens=1)


def test_bits_per_weight_counts_tied_codes_once():
    model = tiny_llama(tie_word_embeddings=True)
    assert bits_per_weight(model) is None
    quantize_(model, {"weights": "int8", "modules": {"lm_head": "int4"}})
    linear = 4 * 64 * 64 + 3 * 64 * 128
    # int8 has an fp32 scale for each row, int4 two of 8 bits for 64 columns, and a global scale.
    rows = 4 * 64 + 2 * 128 + 64
    expected = 8 * (linear + 4 * rows + 96 * 64 / 2 + 2 * 96 + 4) / (linear + 96 * 64)
    assert bits_per_weight(model) == pytest.approx(expected)


def test_read_ids(tmp_path):
    numpy.save(tmp_path / "ids.npy", numpy.array([1, 2, 65535], dtype="uint16"))
    assert read_ids(tmp_path / "ids.npy").tolist() == [1, 2, 65535]
    (tmp_path / "a.txt").write_text("ab")
    assert read_ids(tmp_path / "a.txt", lambda text: {"input_ids": [ord(c) for c in text]}).tolist() == [97, 98]
    numpy.save(tmp_path / "x.npy", numpy.zeros((2, 2)))
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe\x00")
    for name, match in [
        ("none.txt", "is not a file"),
        ("x.npy", "one dimension of integer"),
        ("b.bin", "not a text file in UTF-8"),
    ]:
        with pytest.raises(ValueError, match=match):
            read_ids(tmp_path / name, lambda text: {"input_ids": []})
    with pytest.raises(ValueError, match="has no tokenizer"):
        read_ids(tmp_path / "a.txt")


class Tokenizer:
    """One id for each letter, between those with which a text begins and ends."""

    def __init__(self, start: list[int], end: list[int]) -> None:
        self.start, self.end = start, end

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [ord(letter) - ord("a") + 10 for letter in text]
        return {"input_ids": [*self.start, *ids, *self.end] if add_special_tokens else ids}


def test_every_window_begins_as_a_text_does(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abcdefghijklmnopqrst")
    plain, bos, both = Tokenizer([], []), Tokenizer([2], []), Tokenizer([2, 3], [1])
    assert read_windows(path, plain, window=4, max_tokens=9).tolist() == list(range(10, 18))
    assert read_windows(path, bos, window=4, max_tokens=9).tolist() == [2, 10, 11, 12, 2, 13, 14, 15]
    assert read_windows(path, bos, window=4).numel() == 24  # 18 of the 20 letters
    assert read_windows(path, both, window=4, max_tokens=4).tolist() == [2, 3, 10, 11]
    numpy.save(tmp_path / "ids.npy", numpy.arange(7))
    assert read_windows(tmp_path / "ids.npy", bos, window=3).tolist() == [0, 1, 2, 3, 4, 5]  # cut as they are
    for options, remedy in (
        ({"window": 22}, "takes 21 behind the 1 .* longer text, or a smaller window"),
        ({"window": 1}, "has no room behind the 1 .* and a larger window"),
        ({"window": 8, "max_tokens": 7}, "7 are read, and a window takes 8: read more"),
    ):
        with pytest.raises(ValueError, match=f"a.txt has 20 tokens; .*{remedy}"):
            read_windows(path, bos, **options)
    with pytest.raises(ValueError, match="a window of 21 takes 21: give a longer text"):
        read_windows(path, plain, window=21)


def test_peak_memory_sees_what_was_freed_again():
    with PeakMemory() as memory:
        block = torch.ones(64 << 20, dtype=torch.uint8)  # glibc maps above 32 MB: no pages that are resident already
        time.sleep(0.05)
        del block
    assert 56e6 < memory.nbytes < 256e6
    with PeakMemory() as memory:
        time.sleep(0.02)
    assert memory.nbytes < 4e6


def test_machine_is_one_line():
    assert f"torch {torch.__version__}" in machine()
    assert "\n" not in machine()
