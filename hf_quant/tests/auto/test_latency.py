"""Autoquant: layers are timed once, the fastest plan keeps its bounds, and its config makes it again."""

import itertools
import json

import pytest
import torch
from torch import nn

from hf_quant import QuantizerConfig, auto_plan, autoquant, plan, quantize_
from hf_quant.auto import latency
from hf_quant.auto.allocate import Unit, fastest, one_for_all
from hf_quant.auto.latency import Latencies, find_workloads, watch
from hf_quant.calibration import Call
from hf_quant.tests.auto.test_allocate import total, units_of
from hf_quant.tests.calibration.test_observe import IDS, llama
from hf_quant.tests.modules.test_experts import HOSTS


CANDIDATES = ["int2", "int4", "W8A8", None]
# Relative speeds that make the choice known: the fewer bits, the faster.
SECONDS = {"int2": 1.0, "int4": 2.0, "int8": 3.0, None: 4.0}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(latency, "_SECONDS", 0.002)
    monkeypatch.setattr(latency, "_ROUNDS", 1)
    return tmp_path / "cache" / "hf_quant" / "latency.json"


@pytest.fixture
def known_times(monkeypatch):
    """Latencies that depend on the format and the number of weights alone, beside a model that takes no time."""

    def seconds(module, entry, shape, nbytes):
        format = None if entry.scheme is None else entry.scheme.weight.format
        return SECONDS[format] * entry.num_weights * 1e-9

    def seconds_of_model(calls, device, before=None):
        for call in calls:
            call()
        return 1e-9

    monkeypatch.setattr(latency, "_seconds", seconds_of_model)
    monkeypatch.setattr(latency, "_seconds_of_layer", seconds)


def fast(**budget) -> QuantizerConfig:
    return QuantizerConfig("auto", objective="latency", budget=budget or None, candidates=CANDIDATES)


@pytest.mark.parametrize("seed", range(4))
def test_the_fastest_choice_keeps_both_bounds(seed):
    units = units_of(seed)
    generator = torch.Generator().manual_seed(seed + 100)
    nbytes = torch.randint(1, 100, (6, 4), generator=generator).double().tolist()
    choices = list(itertools.product(range(4), repeat=6))
    sizes = {c: sum(of[i] for of, i in zip(nbytes, c)) for c in choices}
    losses = {c: total(units, c, "costs") for c in choices}
    loss, size = sorted(losses.values())[2000], sorted(sizes.values())[2000]
    allowed = [total(units, c, "scores") for c in choices if losses[c] <= loss and sizes[c] <= size]
    chosen = tuple(fastest(units, nbytes, loss, size, str))
    assert losses[chosen] <= loss and sizes[chosen] <= size
    rank = sum(time < total(units, chosen, "scores") for time in allowed) / len(allowed)
    assert rank < 0.15
    with pytest.raises(ValueError, match="keeps both bounds of the budget.* the smallest takes"):
        fastest(units, nbytes, min(losses.values()), min(sizes.values()) - 1, str)


def test_without_a_bound_of_bytes_their_price_is_zero():
    unit = Unit(("a",), [1.0, 2.0], [5.0, 3.0])
    assert fastest([unit], [[10, 20]], 2.0, float("inf"), str) == [1]


def test_a_mixture_must_be_measurably_faster_than_one_candidate_for_all():
    units = [Unit((name,), [3.0, 2.0, 0.0], [times, 1.0, 3.0]) for name, times in (("a", 0.9), ("b", 0.5))]
    nbytes = [[1.0, 2.0, 8.0]] * 2
    assert one_for_all([0, 1], units, nbytes, 16.0, 2.0) == [1, 1]  # 3.9 against 4.0, and a loss of 5 against 4
    assert one_for_all([0, 1], units, nbytes, 3.0, 2.0) == [0, 1]  # which is too large
    assert one_for_all([0, 1], units, nbytes, 16.0, 0.0) == [0, 1]  # 1.9 against 2.0
    assert one_for_all([1, 0], units, nbytes, 16.0, 2.0) == [1, 0]  # 3.5 against 4.0


def test_the_bound_of_the_loss_decides(known_times):
    model, losses = llama(), []
    loose, tight = 1.0, 1e-30
    for bound, formats in ((loose, {"int2"}), (tight, {None})):
        found = auto_plan(model, fast(kl=bound), calibration=IDS)
        entries = [e for n, e in found.entries.items() if n in found.scores]
        assert {None if e.scheme is None else e.scheme.weight.format for e in entries} == formats
        losses.append(found.loss)
    assert losses[1] == 0 < losses[0]
    found = auto_plan(model, fast(kl=losses[0] / 3), calibration=IDS)
    assert 0 < found.loss <= losses[0] / 3 and len(set(found.schemes.values())) > 1
    assert "predicted time: " in str(found) and "ms for 1 token" in str(found)
    size = plan(model, "int4").nbytes / 1e9
    both = auto_plan(model, fast(kl=losses[0] / 3, gb=size), calibration=IDS)
    assert both.nbytes <= size * 1e9 and both.loss <= losses[0] / 3
    with pytest.raises(ValueError, match="keeps both bounds of the budget"):
        auto_plan(model, fast(kl=1e-12, gb=size), calibration=IDS)
    only = QuantizerConfig("auto", objective="latency", budget={"kl": 1e-12}, candidates=["int2", "int4"])
    with pytest.raises(ValueError, match="best candidates of LlamaForCausalLM lose"):
        auto_plan(model, only, calibration=IDS)


def test_the_smallest_model_within_a_loss():
    model = llama()
    config = QuantizerConfig("auto", budget={"kl": 1e-4}, candidates=CANDIDATES[:2] + ["int8"])
    found = auto_plan(model, config, calibration=IDS)
    assert found.loss <= 1e-4 and found.seconds == {}
    same = QuantizerConfig("auto", budget={"gb": found.nbytes / 1e9}, candidates=config.candidates)
    assert auto_plan(model, same, calibration=IDS).loss >= 0.9 * found.loss
    with pytest.raises(ValueError, match="without data has no prediction of it: give calibration="):
        auto_plan(nn.Sequential(nn.Linear(64, 64)), config)


def test_autoquant_measures_once_and_its_config_needs_no_search(cache, known_times, monkeypatch):
    model = llama()
    with torch.no_grad():
        expected = model(IDS).logits
    found = autoquant(model, fast(kl=1e-4), calibration=IDS)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, expected)
    chosen = found.points[found.chosen]
    assert {"int2", "int4", "W8A8", "16 bit", found.chosen} <= set(found.points)
    ratios = [found.ratio(label) for label in found.points]
    assert ratios == sorted(ratios) and found.ratio("16 bit") == pytest.approx(1.0) and "(chosen)" in str(found)
    assert chosen.loss <= 1e-4
    assert found.config.objective is None and found.config.weights != "auto"
    assert plan(model, found.config).schemes == chosen.schemes
    quantize_(llama(), QuantizerConfig(**{n: getattr(found.config, n) for n in found.config.user_fields()}))
    # The second search reads the file.
    (machine,) = json.loads(cache.read_text())
    assert f"{torch.get_num_threads()} threads" in machine
    monkeypatch.setattr(latency, "_seconds_of_layer", None)
    again = autoquant(model, fast(kl=1e-4), calibration=IDS)
    labels = {"int2", "int4", "W8A8"}
    assert {f.points[n].seconds["1 token"] > 0 for n in labels for f in (found, again)} == {True}
    cache.write_text('{"a machine": {"a layer": "1 s"}}')
    with pytest.raises(ValueError, match="latency.json is no file of latencies .*: delete it"):
        autoquant(model, fast(kl=1e-4), calibration=IDS)


def test_16_bit_may_be_thefastest(known_times, monkeypatch):
    monkeypatch.setitem(SECONDS, None, 0.5)
    found = autoquant(llama(), fast(kl=1.0), calibration=IDS)
    assert found.config is None and not found.points[found.chosen].quantized
    with pytest.raises(ValueError, match="the search leaves all layers of this LlamaForCausalLM in 16 bit"):
        quantize_(llama(), fast(kl=1.0), calibration=IDS)


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    model = nn.Sequential(nn.Linear(64, 64))
    entry = plan(model, "int8").entries["0"]
    (seconds,) = Latencies(model).measure([(entry, (1, 64), 4096)])
    assert seconds > 0 and "the measured latencies are not kept" in caplog.text


@pytest.mark.parametrize("host", HOSTS)
def test_experts_are_timed_with_random_tokens(host):
    _, model_class, config = HOSTS[host]
    model = model_class(config).eval()
    entries = {n: e for n, e in plan(model, "int4").quantized.items() if e.kind == "experts"}
    (workload,) = find_workloads(model, [5], [])
    seen = watch(model, entries, workload)
    assert entries and all(shapes == [(5, 64, config.num_experts_per_tok)] for shapes in seen.inputs.values())
    wanted = [(entry, shape, 10**4) for n, entry in entries.items() for shape in seen.inputs[n]]
    assert all(seconds > 0 for seconds in Latencies(model).measure(wanted))


def test_a_model_without_its_layers():
    model = llama()
    names = [n for n, e in plan(model, "int8").entries.items() if e.scheme is not None]
    (workload,) = find_workloads(model, [7], [])
    seen = watch(model, names, workload)
    assert workload.label == "7 tokens" and 0 < seen.rest
    assert seen.inputs["model.layers.0.mlp.down_proj"] == [(1, 7, 96)] and set(seen.inputs) == set(names)
    assert not any("forward" in vars(module) for module in model.modules())


def test_calls_of_models_that_read_no_tokens():
    model = nn.Sequential(nn.Linear(64, 64))
    (workload,) = find_workloads(model, None, [Call((torch.randn(3, 64),), {})])
    assert workload.label == "a call" and watch(model, ["0"], workload).inputs == {"0": [(3, 64)]}
    with pytest.raises(ValueError, match="a Sequential is not called with token ids alone"):
        find_workloads(model, [1], [])
    with pytest.raises(ValueError, match="is that of its calls: give calibration data"):
        find_workloads(model, None, [])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"objective": "speed"}, "objective is 'speed'; allowed: None, 'latency'"),
        ({"objective": {"latency": [0]}}, "objective is {'latency': .0.}; allowed"),
        ({"objective": {"size": [1]}}, "objective is {'size': .1.}; allowed"),
        ({"objective": "latency", "budget": {"bits": 4}}, "needs {'kl': n}, above 0, and a size"),
        ({"budget": {"kl": 0.1, "bits": 4}}, "or {'kl': n}"),
        ({"weights": "int4", "objective": "latency"}, "give weights='auto'"),
    ],
)
def test_what_a_config_refuses(fields, message):
    with pytest.raises(ValueError, match=message):
        QuantizerConfig(**{"weights": "auto", **fields})


def test_the_defaults_of_a_config():
    config = QuantizerConfig("auto", objective="latency")
    assert config.budget == {"kl": 0.02} and None in config.named_candidates and config.latency_tokens is None
    again = QuantizerConfig.from_dict(config.to_dict())
    assert again == config and QuantizerConfig("auto", objective={"latency": [1, 8]}).latency_tokens == [1, 8]
