"""Latency: seconds of layers on this machine, by scheme and number of tokens, measured once and kept in a file.

A layer is timed alone, by copies that take turns, so that its weights come from memory as they do in the model, and on
CPUs with other data in the caches of the core before each call. The rest of a model (norms, attention, Python) is what
remains of its time when its layers return at once.
"""

import copy
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from hf_quant._version import __version__
from hf_quant.calibration import Call, replace_forward
from hf_quant.kernels import native
from hf_quant.machine import cache_directory, cpu
from hf_quant.modules import convert_module_, expert_weight_names
from hf_quant.planning import PlanEntry
from hf_quant.scheme import LinearScheme


logger = logging.getLogger("hf_quant")

_COLD = 256 * 10**6  # bytes of weights that no cache holds
_OTHERS = 2**20  # bytes that a core reads between two layers
_MOST_COPIES = 512
_SECONDS = 0.25  # of one measurement, at least
_ROUNDS = 5


class Workload(NamedTuple):
    """One call of a model, the time of which counts.

    Attributes:
        label: text for tables, such as "1 token".
        call: the call.
    """

    label: str
    call: Call


class Seen(NamedTuple):
    """The times of one workload in 16 bit.

    Attributes:
        seconds: of the whole call.
        rest: of everything but the layers.
        inputs: {layer: the shapes of its inputs}; layers that are not called are missing.
    """

    seconds: float
    rest: float
    inputs: dict[str, list[tuple[int, ...]]]


def find_workloads(model: Any, tokens: Sequence[int] | None, calls: Sequence[Call]) -> list[Workload]:
    """Calls of so many tokens each of a language model; of other models, the first of the recorded calls.

    Raises ValueError if `tokens` are given for a model that reads none.
    """
    config = getattr(model, "config", None)
    reads_ids = getattr(model, "main_input_name", None) == "input_ids" and hasattr(config, "get_text_config")
    if reads_ids and not config.is_encoder_decoder and (tokens or getattr(model, "can_generate", lambda: False)()):
        size = config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        made = [(n, torch.randint(size, (1, n), generator=generator).to(model.device)) for n in tokens or (1,)]
        options = {"use_cache": False} if getattr(model, "can_generate", lambda: False)() else {}
        return [Workload(f"{n} token" + "s" * (n != 1), Call((), {"input_ids": ids, **options})) for n, ids in made]
    if tokens:
        raise ValueError(
            f"the objective names numbers of tokens, but a {type(model).__name__} is not called with token ids alone: "
            "give 'latency', and data with calls like yours"
        )
    if not calls:
        raise ValueError(f"the latency of a {type(model).__name__} is that of its calls: give calibration data")
    return [Workload("a call", calls[0])]


@torch.inference_mode()
def watch(model: nn.Module, names: Iterable[str], workload: Workload) -> Seen:
    """Time a workload in 16 bit, with the layers `names` and without them."""
    names, device = list(names), next(model.parameters()).device
    is_training = model.training
    model.eval()
    try:
        whole = _seconds([lambda: model(*workload.call.args, **workload.call.kwargs)], device)
        # The layers would drop from the caches what the rest reads: half of their 16-bit bytes do it instead.
        nbytes = sum(p.nbytes for name in names for p in model.get_submodule(name).parameters()) // 2
        others = torch.ones(min(nbytes, _COLD) // 8, dtype=torch.float64, device=device)
        with _without(model, names) as inputs:

            def run() -> None:
                for shapes in inputs.values():
                    shapes.clear()
                model(*workload.call.args, **workload.call.kwargs)

            rest = _seconds([run], device, before=others.sum)
    finally:
        model.train(is_training)
    return Seen(whole, rest, {name: shapes for name, shapes in inputs.items() if shapes})


@contextmanager
def _without(model: nn.Module, names: list[str]) -> Iterator[dict[str, list[tuple[int, ...]]]]:
    """The layers return zeros at once; yields the shapes of the inputs of the last call, to be cleared before it."""
    inputs: dict[str, list[tuple[int, ...]]] = {name: [] for name in names}
    zeros: dict[Any, Tensor] = {}
    modules = {name: model.get_submodule(name) for name in names}

    def returns_at_once(name: str, module: nn.Module) -> Callable[..., Tensor]:
        shapes = inputs[name]
        width = None if expert_weight_names(module) else _matrix_rows(module)

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            top_k = args[0].shape[-1:] if args else ()
            shapes.append((*x.shape, *top_k))
            shape = x.shape if width is None else (*x.shape[:-1], width)
            if (shape, x.dtype) not in zeros:
                zeros[shape, x.dtype] = x.new_zeros(shape)
            return zeros[shape, x.dtype]

        return forward

    undo = [replace_forward(module, returns_at_once(name, module)) for name, module in modules.items()]
    try:
        yield inputs
    finally:
        for take_back in undo:
            take_back()


def _matrix_rows(module: Any) -> int:
    return module.out_features if hasattr(module, "out_features") else module.nf  # transformers' Conv1D


class Latencies:
    """Seconds of layers on this machine, from `hf_quant/latency.json` in the user's cache as far as it has them.

    Args:
        model: the 16-bit model, whose layers are copied to be timed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        directory = cache_directory()
        self.path = None if directory is None else directory / "latency.json"  # None: there is no home
        self._device = next(model.parameters()).device
        self._machine = _machine(self._device)
        self._known = _read(self.path).get(self._machine, {})

    def measure(
        self, wanted: Sequence[tuple[PlanEntry, tuple[int, ...], float]], *, progress: bool = False
    ) -> list[float]:
        """Seconds of each (entry of a plan, shape of its input, bytes of the model's layers), in turn.

        The bytes say how much else is read before the layer's weights are read again.
        """
        keys = [_key(*each) for each in wanted]
        new = {key: each for key, each in zip(keys, wanted) if key not in self._known}
        for key, (entry, shape, nbytes) in tqdm(new.items(), desc="Timing layers", disable=not progress):
            self._known[key] = _seconds_of_layer(self.model.get_submodule(entry.name), entry, shape, nbytes)
        if new:
            self._write()
        return [self._known[key] for key in keys]

    def _write(self) -> None:
        if self.path is None:
            return
        everything = {**_read(self.path)}
        everything[self._machine] = {**everything.get(self._machine, {}), **self._known}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            staged = self.path.with_suffix(f".{os.getpid()}")
            staged.write_text(json.dumps(everything, indent=1), encoding="utf-8")
            staged.replace(self.path)
        except OSError as error:
            logger.warning("the measured latencies are not kept: %s cannot be written (%s)", self.path, error)


def _read(path: Path | None) -> dict[str, dict[str, float]]:
    """The measured latencies of all machines, {} if there are none. Raises ValueError if the file is damaged."""
    if path is None or not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not all(type(value) is float and value > 0 for of in found.values() for value in of.values()):
            raise ValueError("each latency must be a number of seconds")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no file of latencies ({error}): delete it, and they are measured again") from None
    return found


def _machine(device: torch.device) -> str:
    """The machine and the software that a latency holds for."""
    software = f"torch {torch.__version__}, hf_quant {__version__}"
    if device.type == "cpu":
        return f"{cpu()[0]}, {native.active() or 'torch'}, {torch.get_num_threads()} threads, {software}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}, {software}"


def _key(entry: PlanEntry, shape: tuple[int, ...], nbytes: float) -> str:
    scheme = None if entry.scheme is None else entry.scheme.to_dict()
    weights = " + ".join("x".join(map(str, weight)) for weight in entry.shapes.values())
    cold = _copies(entry, nbytes) * _nbytes(entry) // 10**6
    dtype = str(entry.dtype).removeprefix("torch.")
    form = "16 bit" if scheme is None else json.dumps(scheme, sort_keys=True)
    return f"{entry.kind} {weights} {dtype}, input {'x'.join(map(str, shape))}, {cold} MB: {form}"


def _nbytes(entry: PlanEntry) -> int:
    return max(entry.bytes_after, 1)


def _copies(entry: PlanEntry, nbytes: float) -> int:
    return max(2, min(_MOST_COPIES, round(min(nbytes, _COLD) / _nbytes(entry))))


@torch.inference_mode()
def _seconds_of_layer(module: nn.Module, entry: PlanEntry, shape: tuple[int, ...], nbytes: float) -> float:
    """Seconds of a layer, by copies of it that take turns."""
    first = copy.deepcopy(module)
    if entry.scheme is not None:
        convert_module_(first, _timed(entry.scheme), algorithm="absmax", dtype=entry.dtype, name=entry.name)
    device, dtype = next(first.parameters()).device, entry.dtype
    if entry.kind == "experts":
        *lead, top_k = shape
        count = next(iter(entry.shapes.values()))[0]
        index = torch.rand(*lead[:-1], count, dtype=torch.float32, device=device).topk(top_k).indices
        inputs = (
            torch.randn(lead, device=device, dtype=dtype),
            index,
            torch.rand(index.shape, dtype=torch.float32, device=device).to(dtype),
        )
    else:
        inputs = (torch.randn(shape, device=device, dtype=dtype),)
    once = _seconds([lambda: first(*inputs)], device, rounds=1)
    count = max(1, min(_copies(entry, nbytes), int(_SECONDS / once)))
    layers = [first, *(copy.deepcopy(first) for _ in range(count - 1))]
    calls = [partial(layer, *inputs) for layer in layers]
    if device.type == "cpu":
        others = torch.ones(_OTHERS // 8, dtype=torch.float64)
        return _seconds(calls, device, before=others.sum) / count
    return _seconds([lambda: [call() for call in calls]], device) / count  # a GPU is not waited for between layers


def _timed(scheme: LinearScheme) -> LinearScheme:
    """The scheme with a scale per token in place of a static one, which takes as long, but needs no calibration."""
    if not scheme.is_static:
        return scheme
    fields = scheme.to_dict()
    fields["activation"] = {**fields["activation"], "dynamic": True, "granularity": "row"}
    return LinearScheme.from_dict(fields)


def _seconds(
    runs: Sequence[Callable[[], Any]],
    device: torch.device,
    rounds: int = _ROUNDS,
    before: Callable[[], Any] = lambda: None,
) -> float:
    """The least time of all runs one after the other, without what comes `before` each.

    It is the processor time of the thread where there is only one, which other processes disturb less.
    """
    is_cpu = device.type == "cpu"
    now = time.thread_time if is_cpu and torch.get_num_threads() == 1 else time.perf_counter
    wait = (lambda: None) if is_cpu else torch.accelerator.synchronize
    for run in runs:
        run()
    best, begin, number = float("inf"), time.perf_counter(), 0
    while number < rounds or (rounds > 1 and time.perf_counter() - begin < _SECONDS):
        total = 0.0
        for run in runs:
            before()
            wait()
            start = now()
            run()
            wait()
            total += now() - start
        best, number = min(best, total), number + 1
    return max(best, 1e-9)
