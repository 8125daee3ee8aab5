"""llama.cpp computes what hf_quant computes of the same weights, and splits text as the tokenizer does."""

import ctypes
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_quant import QuantizerConfig, export_gguf, import_checkpoint, quantize_
from integration_tests.support.gguf_files import MOE, moe_metadata, moe_tensors, write_gguf
from integration_tests.support.gguf_models import (
    ASSET,
    MODELS,
    TEXTS,
    make_model,
    make_tokenizer,
    with_one_silent_layer,
)


if importlib.util.find_spec("llama_cpp") is None:
    pytest.skip("the package llama-cpp-python is not installed", allow_module_level=True)

import llama_cpp  # noqa: E402


_SILENCE = llama_cpp.llama_log_callback(lambda *_: None)  # C calls it: it must live


@contextmanager
def loaded(path: Path, *, vocab_only: bool = False) -> Iterator[Any]:
    """A GGUF file in llama.cpp."""
    llama_cpp.llama_log_set(_SILENCE, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    options = llama_cpp.llama_model_default_params()
    options.vocab_only = vocab_only
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
    assert model, f"llama.cpp does not load {path}"
    yield model
    llama_cpp.llama_model_free(model)


def logits_of(path: Path, ids: list[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary] of llama.cpp, with keys and values in fp32."""
    with loaded(path) as model:
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = 256
        options.n_threads = options.n_threads_batch = 1
        options.flash_attn_type, options.type_k, options.type_v = 0, 0, 0
        context, batch = llama_cpp.llama_init_from_model(model, options), llama_cpp.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, 1
        assert llama_cpp.llama_decode(context, batch) == 0
        size = (llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)),)
        rows = [
            np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), size).copy() for i in range(len(ids))
        ]
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        return torch.from_numpy(np.stack(rows))


def tokens_of(path: Path, text: str) -> list[int]:
    with loaded(path, vocab_only=True) as model:
        data = text.encode()
        found = (llama_cpp.llama_token * (len(data) + 8))()
        vocab = llama_cpp.llama_model_get_vocab(model)
        return list(found[: llama_cpp.llama_tokenize(vocab, data, len(data), found, len(found), True, True)])


def distance(model: torch.nn.Module, path: Path, ids: list[int]) -> float:
    """The relative distance of llama.cpp's logits from those of a model in fp32."""
    with torch.no_grad():
        ours = model(torch.tensor([ids])).logits[0]
    return float((logits_of(path, ids) - ours).norm() / ours.norm())


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_computes_the_same(name, tmp_path):
    model = with_one_silent_layer(name)
    export_gguf(model, tmp_path / "out")
    ids = list(range(3, 43))
    (path,) = (tmp_path / "out").glob("*.gguf")
    # ggml takes GELU from a table of fp16 numbers.
    assert distance(model, path, ids) < (1e-3 if name == "gemma3" else 1e-5)
    model.model.layers[1].self_attn.o_proj.weight.data[:4] *= -1
    assert distance(model, path, ids) > 1e-2


@pytest.mark.parametrize(
    ("config", "rounding"),
    [
        (QuantizerConfig("int4"), 0.02),
        (QuantizerConfig("int4", symmetric=False), 0.02),
        (QuantizerConfig("W4A16"), 0.02),
        (QuantizerConfig("mxfp4"), 0.02),
        (QuantizerConfig("int8", modules={"lm_head": "int8", "model.embed_tokens": "int8"}), 0.0),
    ],
    ids=str,
)
def test_a_trained_model_computes_the_same_but_for_its_rounded_inputs(config, rounding, tmp_path):
    """`rounding`: the least distance from the model in 16 bits."""
    model = AutoModelForCausalLM.from_pretrained(ASSET, dtype=torch.bfloat16, quantization_config=config)
    model.save_pretrained(tmp_path / "in")
    AutoTokenizer.from_pretrained(ASSET).save_pretrained(tmp_path / "in")
    assert export_gguf(tmp_path / "in", tmp_path / "out") == ()
    (path,) = (tmp_path / "out").glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.float32)
    ids = np.load(ASSET / "val_ids.npy")[:48].astype(int).tolist()
    assert distance(model, path, ids) < 0.01  # llama.cpp rounds inputs to 8 bits
    assert distance(AutoModelForCausalLM.from_pretrained(ASSET, dtype=torch.float32), path, ids) > rounding
    text = (ASSET / "eval.txt").read_text()[:3000]
    assert tokens_of(path, text) == AutoTokenizer.from_pretrained(ASSET)(text)["input_ids"]


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "spm", "spm without space"])
def test_text_is_split_as_the_tokenizer_does(kind, tmp_path):
    tokenizer = make_tokenizer(kind)
    model = make_model("llama", vocab_size=len(tokenizer) + 5)
    quantize_(model, QuantizerConfig("int8", group_size=32, scale_dtype="float16"))
    model.save_pretrained(tmp_path / "in")
    tokenizer.save_pretrained(tmp_path / "in")
    export_gguf(tmp_path / "in", tmp_path / "out")
    (path,) = (tmp_path / "out").glob("*.gguf")
    for text in (*TEXTS, (ASSET / "eval.txt").read_text()[40000:43000]):
        assert tokens_of(path, text) == tokenizer(text)["input_ids"], text


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        *((2, "Q4_0"), (7, "Q8_0"), (8, "Q5_0"), (18, "Q6_K"), (11, "Q3_K"), (30, "IQ4_XS")),
        *((36, "TQ1_0"), (37, "TQ2_0")),
    ],
)
def test_what_llama_cpp_has_quantized_arrives(number, kind, tmp_path):
    fields = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "tie_word_embeddings": False}
    plain = make_model("llama", **fields)
    quantize_(
        plain,
        QuantizerConfig(
            None,
            modules={"re:.*layers.0.mlp.down_proj": {"weights": "int8", "group_size": 32, "scale_dtype": "float16"}},
        ),
    )
    export_gguf(plain, tmp_path / "plain")
    (source,) = (tmp_path / "plain").glob("*.gguf")
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread, options.allow_requantize = number, 1, True
    path = tmp_path / "quantized.gguf"
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(options)) == 0
    import_checkpoint(path, tmp_path / "in")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.float32)
    host = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).state_dict()
    for name in ("model.layers.1.mlp.up_proj", "model.layers.0.self_attn.k_proj", "lm_head"):
        assert torch.equal(model.get_submodule(name).dequantize_weight(), host[f"{name}.weight"])
    assert distance(model, path, list(range(3, 43))) < 0.05


@pytest.mark.parametrize("name", MOE)
def test_models_with_experts_compute_the_same(name, tmp_path):
    tensors = moe_tensors(name, {"*": "Q8_0"})
    more = {"tokenizer.ggml.model": "none", "general.file_type": 7}
    path = write_gguf(tmp_path / "m.gguf", {**moe_metadata(name), **more}, tensors)
    import_checkpoint(path, tmp_path / "in")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.float32)
    ids = list(range(3, 43))
    assert distance(model, path, ids) < 0.05  # llama.cpp rounds inputs to 8 bits
    layer = model.model.layers[0].mlp
    (layer.router if name == "gpt-oss" else layer.gate).weight.data.neg_()  # other experts
    assert distance(model, path, ids) > 0.2
