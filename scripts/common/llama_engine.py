"""llama.cpp as an `Engine`, by its Python package llama-cpp-python.

`write_gguf` writes the weights of a Llama to a GGUF file without a vocabulary by the package gguf: matrices in one
format, the output embedding, too; norms in fp32. Rows of queries and keys are put in llama.cpp's order.
"""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import torch
from torch import Tensor, nn

from common.engine import Engine


_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model: nn.Module, path: Path, kind: str) -> Path:
    """Write a Llama of transformers to a GGUF file. `kind`: the format of its matrices, "Q4_0", "Q8_0" or "BF16"."""
    config = model.config
    if config.model_type != "llama":
        raise ValueError(f"a {config.model_type} model; only llama models are written for llama.cpp here")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    D = config.hidden_size // config.num_attention_heads
    for name, weight in _tensors(model):
        kept = gguf.GGMLQuantizationType[kind if weight.dim() == 2 else "F32"]
        rows = _neighbors(weight, D) if name.endswith(("attn_q.weight", "attn_k.weight")) else weight
        writer.add_tensor(name, gguf.quants.quantize(rows.float().numpy(), kept), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name in GGUF, weight) of every weight."""
    state, tied = model.state_dict(), model.config.tie_word_embeddings
    yield "token_embd.weight", state["model.embed_tokens.weight"]
    for i in range(model.config.num_hidden_layers):
        for name, of_gguf in _NAMES.items():
            yield f"blk.{i}.{of_gguf}.weight", state[f"model.layers.{i}.{name}.weight"]
    yield "output_norm.weight", state["model.norm.weight"]
    if not tied:
        yield "output.weight", state["lm_head.weight"]


def _neighbors(weight: Tensor, D: int) -> Tensor:
    """Rows of heads of D channels in the order of llama.cpp: channels that are turned together lie side by side."""
    return weight.reshape(-1, 2, D // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


class LlamaCpp(Engine):
    """A GGUF file in llama.cpp, in this process, with the threads of torch."""

    def __init__(self, config: Any, path: Path, *, batch_size: int, context: int) -> None:
        super().__init__(config)
        self._silence = llama_cpp.llama_log_callback(lambda *_: None)  # kept: C calls it
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_seq_max = batch_size * (-(-context // 256) * 256), batch_size
        options.n_batch = options.n_ubatch = max(512, batch_size)
        options.n_threads = options.n_threads_batch = torch.get_num_threads()
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self._capacity = options.n_batch
        self._batch = llama_cpp.llama_batch_init(self._capacity, 0, 1)

    def steps(self, prompts: list[list[int]], new_tokens: int) -> Iterator[list[int]]:
        """Continue prompts greedily: the next token of each prompt, `new_tokens` times."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        entries = [(token, at, row) for row, ids in enumerate(prompts) for at, token in enumerate(ids)]
        last = {(len(ids) - 1, row) for row, ids in enumerate(prompts)}
        tokens = [0] * len(prompts)
        for start in range(0, len(entries), self._capacity):
            for row, token in self._decode(entries[start : start + self._capacity], last).items():
                tokens[row] = token
        yield list(tokens)
        for step in range(new_tokens - 1):
            places = [len(ids) + step for ids in prompts]
            entries = [(token, at, row) for row, (token, at) in enumerate(zip(tokens, places))]
            found = self._decode(entries, {(at, row) for row, at in enumerate(places)})
            tokens = [found[row] for row in range(len(prompts))]
            yield list(tokens)

    def logits(self, ids: list[int]) -> Tensor:
        """The logits behind each of up to 512 tokens, fp32 [tokens, vocabulary]."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        found = self._logits([(token, at, 0) for at, token in enumerate(ids)], set(range(len(ids))))
        return torch.from_numpy(np.stack([found[at] for at in range(len(ids))]))

    def _decode(self, entries: list[tuple[int, int, int]], wanted: set[tuple[int, int]]) -> dict[int, int]:
        """Compute (token, position, row) together: {row: next token} behind the wanted (position, row)."""
        places = {i: row for i, (_, at, row) in enumerate(entries) if (at, row) in wanted}
        return {places[i]: int(values.argmax()) for i, values in self._logits(entries, set(places)).items()}

    def _logits(self, entries: list[tuple[int, int, int]], wanted: set[int]) -> dict[int, np.ndarray]:
        """Compute (token, position, row) together: {wanted entry: its logits, until the next call}."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, at, row) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, at, 1, row
            batch.logits[i] = i in wanted
        if llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp does not decode")
        shape = (self.config.vocab_size,)
        logits = {i: llama_cpp.llama_get_logits_ith(self._context, i) for i in wanted}
        return {i: np.ctypeslib.as_array(at, shape) for i, at in logits.items()}

    def close(self) -> None:
        """Free the model."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)
