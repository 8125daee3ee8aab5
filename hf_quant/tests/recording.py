"""What tests watch calls with: a counter of ops, and a capture backend that behaves on a CPU as CUDA graphs do."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Calls(TorchDispatchMode):
    """Counts the calls of hf_quant's ops by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "hf_quant":
            name = func._schema.name.split("::")[1]
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


class Recorder:
    """Captures the ops of a step with the very tensors that they got, and replays these.

    As on a GPU, a capture changes nothing that lives outside of it, whatever Python decides is decided at capture,
    memory is that of the capture, and reading a value on the host fails.

    Attributes:
        captures, replays, warm_ups: how many there were.
        ops: names of the ops of the last capture.
        fail: raised in the middle of the next capture, once.
    """

    def __init__(self) -> None:
        self.captures = self.replays = self.warm_ups = 0
        self.ops: list[str] = []
        self.fail: BaseException | None = None

    def unavailable(self, device: torch.device) -> str | None:
        return None

    def warm_up(self, step: Callable[[], Any], device: torch.device) -> Any:
        self.warm_ups += 1
        return step()

    def capture(self, step: Callable[[], Any], device: torch.device) -> tuple[Any, Callable[[], None]]:
        mode = _Recording(self)
        try:
            with mode:
                outputs = step()
        finally:
            for tensor, value in mode.saved:
                tensor.copy_(value)
        self.captures += 1
        self.ops = [str(func) for func, *_ in mode.calls]

        def replay() -> None:
            self.replays += 1
            for func, args, kwargs, results in mode.calls:
                found = func(*args, **kwargs)
                for old, new in zip(results, tree_leaves(found)):
                    if isinstance(old, Tensor) and old is not new and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return outputs, replay


class _Recording(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.calls: list[tuple] = []
        self.saved: list[tuple[Tensor, Tensor]] = []
        self.seen: set[int] = set()  # storages that the capture has made, or whose values are saved

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default or func is torch.ops.aten.equal.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.recorder.fail is not None and len(self.calls) == 20:
            error, self.recorder.fail = self.recorder.fail, None
            raise error
        for argument, schema in zip(args, func._schema.arguments):
            if argument is not None and schema.alias_info is not None and schema.alias_info.is_write:
                storage = argument.untyped_storage()
                if storage._cdata not in self.seen:
                    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                    self.saved.append((whole, whole.clone()))
                    self.seen.add(storage._cdata)
        result = func(*args, **kwargs)
        given = {a.untyped_storage()._cdata for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)}
        leaves = tree_leaves(result)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
                self.seen.add(leaf.untyped_storage()._cdata)
        self.calls.append((func, args, kwargs, leaves))  # holds every tensor: memory is never used twice
        return result
