"""`capture_generate`: one capture, a replay per token, the tokens of eager `generate`; and the host's own compilation.

The capture is `Recorder`'s: the ops of a step, replayed on the same memory, with everything that Python had decided.
"""

import contextlib
import copy
import gc
import pickle
import threading
import types
import weakref

import pytest
import torch
import transformers
from torch import Tensor, nn

from hf_quant import capture_generate, fuse_projections_, quantize_, unfuse_activations_
from hf_quant.integrations.transformers.graphs.capture import DecodeGraphs, _rounded
from hf_quant.integrations.transformers.graphs.decode import CudaGraphs
from hf_quant.integrations.transformers.graphs.state import globals_of
from hf_quant.tests.recording import Recorder


_SMALL = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    max_position_embeddings=1024,
    bos_token_id=0,
    eos_token_id=None,
    pad_token_id=2,
)
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SMALL)),
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**_SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    ),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**_SMALL, sliding_window=16, layer_types=["sliding_attention", "full_attention"])
    ),
}
LENGTH = 12


def make(name: str = "llama", config="int4", fused: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    if config is not None:
        unfuse_activations_(quantize_(model, config))  # on GPUs there are no native blocks
    model.generation_config.eos_token_id = None
    return fuse_projections_(model) if fused and config is not None else model


def prompt(rows: int = 1, length: int = 6, seed: int = 0) -> Tensor:
    return torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(seed))


def eager(model: nn.Module, ids: Tensor, **kwargs) -> Tensor:
    """What the host generates with a static cache of the captured length; a copy of the model is not captured."""
    model = copy.deepcopy(model)
    kwargs = {"max_new_tokens": LENGTH, "do_sample": False, "cache_implementation": "static", **kwargs}
    return model.generate(ids, max_cache_len=256, disable_compile=True, **kwargs)


def generate(model: nn.Module, ids: Tensor, **kwargs) -> Tensor:
    return model.generate(ids, **{"max_new_tokens": LENGTH, "do_sample": False, **kwargs})


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return make()


@pytest.fixture
def captured(llama):
    """(model, recorder, graphs) for one test."""
    recorder = Recorder()
    with capture_generate(llama, backend=recorder) as graphs:
        yield llama, recorder, graphs


# The tokens, the captures, the replays.


@pytest.mark.parametrize("name", MODELS)
def test_one_capture_and_the_tokens_of_eager_generate(name):
    model = make(name)
    ids, others = prompt(2), prompt(2, 9, seed=1)
    expected = eager(model, ids), eager(model, others, max_new_tokens=30)
    recorder = Recorder()
    with capture_generate(model, backend=recorder) as graphs:
        assert torch.equal(generate(model, others, max_new_tokens=30), expected[1])
        kinds = 2 if name == "gemma3" else 1  # a window that is full is another step
        assert (recorder.warm_ups, recorder.captures, recorder.replays) == (kinds, kinds, 29 - kinds)
        assert torch.equal(generate(model, ids), expected[0])
        assert torch.equal(generate(model, others, max_new_tokens=30), expected[1])
        assert (recorder.warm_ups, recorder.captures) == (kinds, kinds)  # every later step is a replay
        assert recorder.replays == graphs.num_replays == 29 - kinds + LENGTH - 1 + 29
        assert not graphs.reasons and graphs.num_captures == kinds
    assert recorder.ops and not any("_local_scalar_dense" in op for op in recorder.ops)


@pytest.mark.parametrize("kv_cache", ["int8", {"format": "int4", "sink_tokens": 2, "recent_tokens": 5}], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_quantized_cache_is_captured(name, kv_cache):
    """Lengths are read from device memory, so a replay sees the tokens that came since."""
    model = make(name, config={"weights": "int4", "kv_cache": kv_cache})
    ids, others = prompt(2), prompt(2, 9, seed=1)
    # Without the length: a static cache that is as long holds the same codes and reads them in the same blocks.
    expected = [eager(model, x, max_new_tokens=n) for x, n in ((ids, LENGTH), (others, 30))]
    recorder = Recorder()
    with capture_generate(model, backend=recorder) as graphs:
        for _ in range(2):
            assert torch.equal(generate(model, others, max_new_tokens=30), expected[1])
            assert torch.equal(generate(model, ids), expected[0])
        assert not graphs.reasons and graphs.num_captures == (2 if name == "gemma3" else 1)
        assert graphs.num_replays > 60


def test_a_step_is_the_fused_products(captured):
    model, recorder, _ = captured
    generate(model, prompt())
    products = [op for op in recorder.ops if "hf_quant" in op]
    assert len(products) == 4 * 2, "qkv, o, gate and up, down in each of two layers"


def test_logits_are_equal_to_the_bit(llama):
    kwargs = dict(return_dict_in_generate=True, output_logits=True)
    expected = eager(llama, prompt(2), **kwargs)
    with capture_generate(llama, backend=Recorder()):
        found = generate(llama, prompt(2), **kwargs)
    assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))
    assert len({tuple(step.flatten()[:8].tolist()) for step in found.logits}) > LENGTH // 2  # steps do differ


def test_padded_prompts_and_sampling(captured):
    model, recorder, _ = captured
    ids, mask = prompt(3, 8), torch.ones(3, 8, dtype=torch.int64)
    mask[0, :5] = mask[1, :1] = 0
    expected = eager(model, ids, attention_mask=mask)
    for _ in range(2):
        assert torch.equal(generate(model, ids, attention_mask=mask), expected)
    assert not torch.equal(generate(model, ids), expected)
    torch.manual_seed(3)
    expected = eager(model, ids, do_sample=True, top_k=5, num_return_sequences=2)
    torch.manual_seed(3)
    assert torch.equal(generate(model, ids, do_sample=True, top_k=5, num_return_sequences=2), expected)
    # With a padding mask, without one (which transformers 5.23 drops if it is all ones), and for six rows.
    assert recorder.captures in (2, 3)


def test_a_prompt_of_one_token_and_embeddings(captured):
    model, recorder, _ = captured
    assert torch.equal(generate(model, prompt(1, 1)), eager(model, prompt(1, 1)))
    embeds = model.get_input_embeddings()(prompt(1, 5)).detach()
    assert torch.equal(generate(model, None, inputs_embeds=embeds), eager(model, None, inputs_embeds=embeds))
    assert recorder.replays == 2 * (LENGTH - 1) - 1


def test_batch_sizes_and_lengths_are_captured_once_each(llama):
    recorder = Recorder()
    with capture_generate(llama, backend=recorder, max_caches=2) as graphs:
        for rows, captures in ((1, 1), (2, 2), (1, 2), (2, 2), (3, 3), (2, 3), (1, 4)):
            assert torch.equal(generate(llama, prompt(rows)), eager(llama, prompt(rows)))
            assert recorder.captures == captures, rows
            assert len(graphs._memories) <= 2
        generate(llama, prompt(1, 300), max_new_tokens=4)
        assert recorder.captures == 5
    assert [_rounded(n) for n in (1, 256, 257, 2048, 2049, 5000, 131072)] == [256, 256, 512, 2048, 2560, 5120, 131072]


def test_memory_is_kept_and_cleared_in_between(captured):
    model, recorder, graphs = captured
    generate(model, prompt(1, 20), max_new_tokens=40)
    (memory,) = graphs._memories.values()
    addresses = [t.data_ptr() for layer in memory.layers for _, t in layer.tensors]
    (graph,) = memory.graphs.values()
    buffers = [b.data_ptr() for b in graph.buffers]
    assert memory.is_free and any(bool(t.any()) for layer in memory.layers for _, t in layer.tensors)
    memory.layers[0].tensors[0][1].fill_(float("nan"))  # nothing of an earlier generation may be read
    assert torch.equal(generate(model, prompt()), eager(model, prompt()))
    assert addresses == [t.data_ptr() for layer in memory.layers for _, t in layer.tensors]
    assert memory.graphs and buffers == [b.data_ptr() for b in graph.buffers] and recorder.captures == 1


# What a step depends on.


def test_changed_weights_are_used(captured):
    model, recorder, _ = captured
    ids, layer = prompt(), model.model.layers[0].mlp
    before, weight = generate(model, ids), layer.down_proj.weight.dequantize()
    layer.down_proj.weight = weight.roll(1, 0)  # in place: the replay reads it
    after = generate(model, ids)
    assert torch.equal(after, eager(model, ids)) and not torch.equal(after, before) and recorder.captures == 1
    layer.down_proj._parameters["qdata"] = nn.Parameter(layer.down_proj.qdata.clone(), requires_grad=False)
    assert torch.equal(generate(model, ids), after) and recorder.captures == 2
    layer.down_proj.weight = weight
    assert torch.equal(generate(model, ids), before)


def test_changed_modules_are_captured_anew(captured):
    model, recorder, _ = captured
    ids, norm = prompt(), model.model.norm

    def check(captures: int) -> None:
        assert torch.equal(generate(model, ids), eager(model, ids))
        assert recorder.captures == captures

    check(1)
    hook = norm.register_forward_hook(lambda _, args, out: out * 1.5)
    check(2)
    hook.remove()
    norm.variance_epsilon, epsilon = 0.5, norm.variance_epsilon
    check(3)
    norm.variance_epsilon = epsilon
    norm.weight.data = norm.weight.data.clone()
    check(4)
    model.set_attn_implementation("eager")
    check(5)
    model.set_attn_implementation("sdpa")
    check(5)  # that one is still there
    outside = globals_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert globals_of(model) != outside
    assert globals_of(model) == outside


def test_inference_mode_and_back(captured):
    model, recorder, _ = captured
    expected = eager(model, prompt())
    with torch.inference_mode():
        assert torch.equal(generate(model, prompt()), expected)
    assert torch.equal(generate(model, prompt()), expected)
    with torch.inference_mode():
        assert torch.equal(generate(model, prompt()), expected)
    assert recorder.captures == 1


def test_results_own_their_cache(captured):
    model, recorder, _ = captured
    kwargs = dict(return_dict_in_generate=True)
    first = generate(model, prompt(), **kwargs)
    kept = [layer.keys.clone() for layer in first.past_key_values.layers]
    second = generate(model, prompt(seed=5), **kwargs)
    assert all(torch.equal(layer.keys, k) for layer, k in zip(first.past_key_values.layers, kept))
    assert not torch.equal(second.past_key_values.layers[0].keys, kept[0])
    more = torch.cat([first.sequences, prompt(1, 2)], 1)
    went_on = generate(model, more, past_key_values=first.past_key_values, max_new_tokens=4)
    assert torch.equal(went_on, eager(model, more, max_new_tokens=4))
    assert recorder.captures == 2


# Errors, ends, copies.


class Stop(Exception):
    pass


def test_an_error_in_a_step_leaves_the_model_usable(captured):
    model, recorder, _ = captured
    expected, calls = eager(model, prompt()), []

    def fail(*args):
        calls.append(0)
        if len(calls) == 3:  # the prompt, the warm-up, the capture
            raise Stop

    hook = model.model.norm.register_forward_hook(fail)
    with pytest.raises(Stop):
        generate(model, prompt())
    hook.remove()
    assert torch.equal(generate(model, prompt()), expected)
    for error, raised in ((RuntimeError("not permitted"), ValueError), (KeyboardInterrupt(), KeyboardInterrupt)):
        hook = model.model.norm.register_forward_hook(lambda *args: None)  # a new graph
        recorder.fail = error
        with pytest.raises(raised) as caught:
            generate(model, prompt())
        if raised is ValueError:
            assert "decoding step of this LlamaForCausalLM cannot be captured into a graph: not permitted" in str(
                caught.value
            )
        assert torch.equal(generate(model, prompt()), expected)
        hook.remove()


def test_a_failed_capture_leaves_the_cache_as_it_was():
    model, recorder = make("gemma3"), Recorder()
    with capture_generate(model, backend=recorder) as graphs:
        kept = []
        watch = graphs._memory_for
        graphs._memory_for = lambda rows, cache: kept.append(cache) or watch(rows, cache)
        recorder.fail = RuntimeError("not permitted")
        with pytest.raises(ValueError, match="cannot be captured"):
            generate(model, prompt())
        (cache,) = kept
        assert [layer.get_seq_length() for layer in cache.layers] == [7, 7]
        assert int(cache.layers[1].cumulative_length) == 7


def test_a_step_that_reads_a_value_is_an_error(captured):
    model, _, graphs = captured
    hook = model.model.norm.register_forward_hook(lambda _, args, out: out * float(out.abs().max() > 0))
    with pytest.raises(ValueError, match="not permitted when stream is capturing.*`release\\(\\)`"):
        generate(model, prompt())
    graphs.release()
    assert torch.equal(generate(model, prompt()), eager(model, prompt()))
    hook.remove()


def test_release_puts_everything_back(llama):
    before = {k: v for k, v in llama.__dict__.items() if callable(v)}
    calls = []

    def prepare(self, *args, **kwargs):
        calls.append(args)
        return type(self)._prepare_cache_for_generation(self, *args, **kwargs)

    llama._prepare_cache_for_generation = own = types.MethodType(prepare, llama)  # as another cache would do it
    try:
        graphs = capture_generate(llama, backend=Recorder())
        generate(llama, prompt())
        assert len(calls) == 1 and graphs.num_replays
        memory = [weakref.ref(m) for m in graphs._memories.values()]
        graphs.release()
        assert llama._prepare_cache_for_generation is own and all(ref() is None for ref in memory)
        graphs.release()
    finally:
        del llama._prepare_cache_for_generation
    assert {k: v for k, v in llama.__dict__.items() if callable(v)} == before


def test_a_copy_generates_as_the_host_does(captured):
    model, recorder, _ = captured
    expected = generate(model, prompt())
    count = recorder.captures, recorder.replays
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(eager(other, prompt()), expected)
        assert (recorder.captures, recorder.replays) == count
        with capture_generate(other, backend=Recorder()) as graphs:
            assert torch.equal(generate(other, prompt()), expected) and graphs.num_captures == 1
    assert torch.equal(generate(model, prompt()), expected) and recorder.captures == count[0]


def test_a_deleted_model_is_freed():
    model = make(fused=False)
    graphs = capture_generate(model, backend=Recorder())
    generate(model, prompt())
    gc.collect()
    gc.disable()
    try:
        ref = weakref.ref(model)
        del model
        assert ref() is None
    finally:
        gc.enable()
    graphs.release()


def test_threads_have_memory_of_their_own(captured):
    model, _, graphs = captured
    prompts = [prompt(seed=seed) for seed in range(4)]
    expected, found = [eager(model, ids) for ids in prompts], [[] for _ in prompts]
    barrier = threading.Barrier(len(prompts))

    def work(i: int) -> None:
        for _ in range(3):
            barrier.wait()
            found[i].append(generate(model, prompts[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(f) == 3 and all(torch.equal(t, e) for t in f) for f, e in zip(found, expected))
    assert graphs.num_replays > 0


# What runs as before.


def test_what_is_not_captured_says_why(captured):
    model, recorder, graphs = captured
    ids = prompt()
    cases = {
        "beam search": dict(num_beams=2),
        "use_cache is False": dict(use_cache=False),
        "the cache is 'dynamic'": dict(cache_implementation="dynamic"),
        "the cache is the caller's": dict(past_key_values=transformers.DynamicCache(config=model.config)),
    }
    for reason, kwargs in cases.items():
        found = generate(model, ids, **kwargs)
        assert found.shape == (1, 6 + LENGTH)
        assert graphs.reasons[reason] == 1 and recorder.captures == 0
    compiled = transformers.CompileConfig(backend="eager", mode=None)
    generate(model, ids, compile_config=compiled, disable_compile=True)
    assert graphs.reasons["compile_config asks for torch.compile"] == 1
    assert "without a graph, 1 x: beam search" in repr(graphs)
    model.train()
    try:
        generate(model, ids)
    finally:
        model.eval()
    assert graphs.reasons["the model is in training mode"] == 1
    model._can_compile_fullgraph = False
    generate(model, ids)
    del model._can_compile_fullgraph
    assert graphs.reasons["transformers knows no static cache for LlamaForCausalLM"] == 1
    model.hf_device_map = {"a": 0, "b": 1}
    generate(model, ids)
    del model.hf_device_map
    assert graphs.reasons["the model is spread over devices"] == 1
    assert torch.equal(generate(model, ids), eager(model, ids)) and recorder.captures == 1


def test_a_rotary_embedding_that_reads_the_length():
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**_SMALL, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    ).eval()
    with capture_generate(model, backend=Recorder()) as graphs:
        model.generate(prompt(), max_new_tokens=3)
    assert list(graphs.reasons) == ["its rotary embedding reads the length on the host"]


def test_a_cache_that_counts_in_python_is_watched(captured, monkeypatch):
    model, recorder, graphs = captured
    update = transformers.StaticLayer.update

    def counting(self, *args, **kwargs):
        self.num_updates = getattr(self, "num_updates", 0) + 1
        return update(self, *args, **kwargs)

    monkeypatch.setattr(transformers.StaticLayer, "update", counting)
    assert torch.equal(generate(model, prompt()), eager(model, prompt()))
    assert recorder.captures == 0
    assert graphs.reasons == {"a StaticLayer changes its `num_updates` in Python": LENGTH - 2}
    monkeypatch.undo()
    graphs._memories.clear()

    def moving(self, *args, **kwargs):
        found = update(self, *args, **kwargs)
        self.keys = self.keys.clone()
        return found

    monkeypatch.setattr(transformers.StaticLayer, "update", moving)
    assert torch.equal(generate(model, prompt()), eager(model, prompt()))
    assert recorder.captures == 0 and "the tensors of the cache were replaced" in graphs.reasons


_OTHER_CACHES = {
    "glm_moe_dsa": (
        lambda: transformers.GlmMoeDsaForCausalLM(
            transformers.GlmMoeDsaConfig(
                **{k: v for k, v in _SMALL.items() if k != "head_dim"},
                **dict(index_topk=4, index_n_heads=2, index_head_dim=16, q_lora_rank=32, kv_lora_rank=16),
                **dict(qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, first_k_dense_replace=2),
            )
        ),
        "a StaticIndexedLayer makes more in its `lazy_initialization_indexer`",
    ),
    "qwen3_next": (
        lambda: transformers.Qwen3NextForCausalLM(
            transformers.Qwen3NextConfig(
                **{**_SMALL, "num_key_value_heads": 2},
                **dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16),
                **dict(linear_value_head_dim=16, num_experts=0, layer_types=["linear_attention", "full_attention"]),
            )
        ),
        "a LinearAttentionLayer keeps its states in dicts or lists",
    ),
}


@pytest.mark.parametrize("name", _OTHER_CACHES)
def test_caches_with_other_tensors_are_left_to_the_host(name, monkeypatch):
    make_model, reason = _OTHER_CACHES[name]
    monkeypatch.setitem(MODELS, name, make_model)
    model, recorder = make(name, config=None), Recorder()
    prompts = [prompt(), prompt(1, 9, seed=1)]
    expected = [generate(model, ids) for ids in prompts]
    with capture_generate(model, backend=recorder) as graphs:
        for ids, tokens in zip(prompts, expected):
            found = generate(model, ids, return_dict_in_generate=True)
            assert torch.equal(found.sequences, tokens)
            # Not the static cache that was tried: on a GPU the host compiles the steps of one.
            assert type(found.past_key_values) is transformers.DynamicCache
    assert recorder.captures == 0 and graphs.reasons == {reason: 2}


@pytest.mark.parametrize("where", ["before", "after", "dict"])
def test_tensors_made_outside_of_the_initialization_are_noticed(where, captured, monkeypatch):
    model, recorder, graphs = captured
    update = transformers.StaticLayer.update

    def adding_up(self, keys, values, *args, **kwargs):
        """Adds the sum of all values to what was asked for."""
        if where != "before":
            found = update(self, keys, values, *args, **kwargs)
        if not hasattr(self, "sums"):
            total = torch.zeros_like(values[:, :, :1])
            self.sums = {0: total} if where == "dict" else total
        total = self.sums[0] if where == "dict" else self.sums
        total.add_(values.sum(2, keepdim=True))
        if where == "before":
            found = update(self, keys, values, *args, **kwargs)
        return found[0], found[1] + total

    monkeypatch.setattr(transformers.StaticLayer, "update", adding_up)
    for ids in (prompt(), prompt(1, 9, seed=1)):
        assert torch.equal(generate(model, ids), eager(model, ids))
    reason = "keeps tensors in its `sums`" if where == "dict" else "makes its `sums` in a way that is not known"
    assert recorder.captures == 0 and graphs.reasons == {f"a StaticLayer {reason}": 2 * (LENGTH - 1)}


@pytest.mark.parametrize("how", ["list", "keywords"])
def test_a_list_that_grows_and_an_initialization_by_keywords(how, captured, monkeypatch):
    model, recorder, graphs = captured
    update = transformers.StaticLayer.update

    def noting(self, keys, values, *args, **kwargs):
        if how == "list":
            self.seen = getattr(self, "seen", [])
            self.seen.append(keys.shape[-2])
        elif not self.is_initialized:
            self.lazy_initialization(key_states=keys, value_states=values)
        return update(self, keys, values, *args, **kwargs)

    monkeypatch.setattr(transformers.StaticLayer, "update", noting)
    for ids in (prompt(), prompt(1, 9, seed=1)):
        assert torch.equal(generate(model, ids), eager(model, ids))
    reason = "changes its `seen` in Python" if how == "list" else "makes its `keys` in a way that is not known"
    assert recorder.captures == 0 and list(graphs.reasons) == [f"a StaticLayer {reason}"]


def test_assisted_decoding_runs_as_before(captured):
    model, recorder, graphs = captured
    found = generate(model, prompt(), prompt_lookup_num_tokens=2)
    assert torch.equal(found, generate(model, prompt(), cache_implementation="dynamic"))
    assert recorder.captures == 0 and "assisted generation" in graphs.reasons


def test_a_backend_that_is_not_available_changes_nothing(llama):
    with capture_generate(llama, backend=CudaGraphs()) as graphs:
        expected = generate(llama, prompt())
    assert torch.equal(expected, generate(llama, prompt()))
    assert repr(graphs) == (
        "0 captures, 0 replays\nwithout a graph, 1 x: the model is on cpu, which has no CUDA graphs"
    )


def test_errors_of_the_call(llama):
    with pytest.raises(ValueError, match="Linear has no `generate` of transformers"):
        capture_generate(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="max_caches is 0; needs at least 1"):
        capture_generate(llama, max_caches=0)
    with capture_generate(llama, backend=Recorder()):
        with pytest.raises(ValueError, match="this LlamaForCausalLM is captured already"):
            capture_generate(llama)
    assert isinstance(capture_generate(llama), DecodeGraphs)
    llama.get_compiled_call.graphs.release()


@pytest.fixture
def cuda_events(monkeypatch) -> list[str]:
    """What would be asked of CUDA, where there is none."""
    events: list[str] = []

    class Stream:
        def __init__(self, device: torch.device, name: str = "side") -> None:
            self.name = f"{name}{device.index}"

        def wait_stream(self, other: "Stream") -> None:
            events.append(f"{self.name} waits for {other.name}")

    @contextlib.contextmanager
    def inside(name: str, *args, **kwargs):
        events.append(f"begin {name}")
        yield
        events.append(f"end {name}")

    graph = types.SimpleNamespace(replay=lambda: events.append("replay"))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, "main"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: inside(stream.name))
    monkeypatch.setattr(torch.cuda, "device", lambda device: inside(str(device)))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda g, stream, capture_error_mode: inside(f"on {stream.name}"))
    return events


DEVICE = torch.device("cuda", 1)


def test_cuda_graphs_are_used_as_torch_asks_for(cuda_events):
    events, backend = cuda_events, CudaGraphs()
    assert backend.warm_up(lambda: events.append("step") or 7, DEVICE) == 7
    outputs, replay = backend.capture(lambda: events.append("step") or 8, DEVICE)
    assert outputs == 8
    replay()
    assert events == [
        *("side1 waits for main1", "begin side1", "step", "end side1", "main1 waits for side1"),
        *("begin cuda:1", "begin on side1", "step", "end on side1", "end cuda:1", "replay"),
    ]
    assert backend.unavailable(torch.device("cuda")) is None


def test_outputs_of_a_warm_up_belong_to_the_callers_stream(cuda_events):
    class Output(Tensor):
        is_cuda = True

        def record_stream(self, stream) -> None:
            cuda_events.append(f"used on {stream.name}")

    output = torch.zeros(2).as_subclass(Output)
    found = CudaGraphs().warm_up(lambda: {"logits": output, "others": (output, None)}, DEVICE)
    assert found["logits"] is output and found["others"] == (output, None)
    assert cuda_events[-2:] == ["used on main1"] * 2


def test_threads_capture_on_streams_of_their_own(cuda_events):
    backend, streams = CudaGraphs(), []

    def work() -> None:
        streams.append((backend._stream(DEVICE), backend._stream(DEVICE)))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    (a, b), (c, d) = streams
    assert a is b and c is d and a is not c


@pytest.mark.parametrize("run", [CudaGraphs.warm_up, CudaGraphs.capture], ids=["warm_up", "capture"])
def test_graphs_do_not_read_the_cache_of_autocast(run, cuda_events):
    """What that holds is freed when the caller leaves autocast."""
    seen = []

    def step() -> None:
        seen.append(torch.is_autocast_cache_enabled())
        if len(seen) % 2 == 0:
            raise Stop

    for before in (True, False):
        torch.set_autocast_cache_enabled(before)
        try:
            run(CudaGraphs(), step, DEVICE)
            assert torch.is_autocast_cache_enabled() is before
            with pytest.raises(Stop):
                run(CudaGraphs(), step, DEVICE)
            assert torch.is_autocast_cache_enabled() is before
        finally:
            torch.set_autocast_cache_enabled(True)
    assert seen == [False] * 4


def test_the_recorder_behaves_as_a_graph():
    """The test double would hide errors if it were more lenient than a GPU."""
    recorder, x, total, count = Recorder(), torch.zeros(2), torch.zeros(2), [0]

    def step() -> Tensor:
        count[0] += 1
        total.add_(x)
        return total * 2 + count[0]

    y, replay = recorder.capture(step, x.device)
    assert torch.equal(total, torch.zeros(2))  # a capture runs nothing
    x.fill_(3)
    replay(), replay()
    assert torch.equal(total, torch.full((2,), 6.0)) and torch.equal(y, torch.full((2,), 13.0)) and count == [1]
    with pytest.raises(RuntimeError, match="capturing"):
        recorder.capture(lambda: total.add_(1).sum().item(), x.device)
    assert torch.equal(total, torch.full((2,), 6.0))


# The host's own way: torch.compile of the step.


@pytest.mark.parametrize(
    ("name", "config"),
    [("llama", "int4"), ("qwen3_moe", "W8A8"), ("gemma3", {"weights": "nf4", "modules": {"*.down_proj": "int8"}})],
    ids=["llama", "qwen3_moe", "gemma3"],
)
def test_the_host_compiles_the_step_into_one_graph(name, config):
    model, graphs = make(name, config), []

    def backend(graph, inputs):
        calls = (node for node in graph.graph.nodes if node.op == "call_function")
        graphs.append(sum("hf_quant" in str(node.target) for node in calls))
        return graph

    compiled = transformers.CompileConfig(fullgraph=True, backend=backend, mode=None)
    compiled._compile_all_devices = True
    kwargs = dict(max_new_tokens=24, do_sample=False, cache_implementation="static")
    expected = model.generate(prompt(2), disable_compile=True, **kwargs)
    assert torch.equal(model.generate(prompt(2), compile_config=compiled, **kwargs), expected)
    # Windows count in Python: one graph for the first position, one for the others, one when they are full.
    assert len(graphs) == (3 if name == "gemma3" else 1) and not torch._dynamo.utils.counters["graph_break"]
    assert set(graphs) == {8}  # per layer qkv and o, then gate and up and down, or both products of the experts
    count = len(graphs)
    for seed in range(2):
        model.generate(prompt(2, seed=seed), compile_config=compiled, **kwargs)
    assert len(graphs) == count, "a new cache compiles nothing"


def test_ops_have_what_cuda_graphs_of_inductor_need():
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("hf_quant::")]
    assert len(names) >= 6
    for name in names:
        op = getattr(torch.ops.hf_quant, name.removeprefix("hf_quant::").partition(".")[0]).default
        assert torch.Tag.cudagraph_unsafe not in op.tags
        assert torch.Tag.data_dependent_output not in op.tags and torch.Tag.dynamic_output_shape not in op.tags
        # These write: to a cache, whose memory is marked as static; to parameters, outside of any graph.
        if name not in ("hf_quant::kv_append", "hf_quant::adam_step_", "hf_quant::requantize_rows_"):
            schema = op._schema
            assert not schema.is_mutable and all(v.alias_info is None for v in (*schema.arguments, *schema.returns))
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta") or torch._library.utils.has_fake_kernel(op)
