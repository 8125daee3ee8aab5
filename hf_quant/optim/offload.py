"""`CPUOffloadOptimizer`: states, and with them the step, in the memory of the CPU."""

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from hf_quant.coded_weight import CodedWeight
from hf_quant.optim._place import dropped_if_refused


_OWN = ("params", "param_names")  # keys of a group that are not options
_MOVES = WeakIdKeyDictionary()  # {parameter: the RemovableHandle of the hook that moves its gradient}
_UNCLIPPED = (
    "offload_gradients=True: gradients are on the CPU, where clipping by torch.nn.utils, accelerate or Trainer (whose "
    "max_grad_norm is 1.0 by default) finds none, and clips nothing. If they are to be clipped, call clip_grad_norm_ "
    "of this optimizer before each step; in Trainer by optimizer.register_step_pre_hook"
)


class CPUOffloadOptimizer(Optimizer):
    """An optimizer of any class that keeps its states and a copy of the parameters on the CPU, and steps there.

    The accelerator holds parameters and gradients only: with `AdamW8bit` and bf16 parameters the CPU takes 4 bytes per
    parameter, of which 2 are the copy. A step sends gradients to the CPU and parameters back. Gradient accumulation,
    clipping, schedulers (its `param_groups` hold the options) and closures work as with the class itself, whose state
    dict it saves and loads. A parameter that is changed in place by others, as by loading weights, is copied again;
    a frozen one takes no memory until it is unfrozen.

    With `offload_gradients` each gradient goes to the CPU as soon as it is complete, is added up there until the next
    step, which uses it up, and leaves no memory on the accelerator. Then `param.grad` is None when the step comes:
    clip by `clip_grad_norm_` of this optimizer, not by torch.nn.utils (in Trainer: max_grad_norm=0), and drop
    gradients without a step by its `zero_grad`, not by that of the model. A first step without that clipping warns.

    A process alone may do so: DistributedDataParallel would average gradients that are gone.

    Parameters on the CPU work, too, and save nothing. The idea is from ZeRO-Offload
    (https://arxiv.org/abs/2101.06840).

    Args:
        params: parameters, named parameters or groups of them.
        cls: the class of the optimizer, such as `AdamW8bit` or torch.optim.AdamW.
        offload_gradients: send gradients while the backward pass is running.
        options: arguments of cls.

    Raises:
        ValueError: a parameter is a DTensor (FSDP2 has CPUOffloadPolicy for that), cls refuses an option, or
            `offload_gradients` is set where several processes train, which `step` finds, too.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        cls: type[Optimizer],
        *,
        offload_gradients: bool = False,
        **options: Any,
    ) -> None:
        self._cls, self._options, self._offload_gradients = cls, options, offload_gradients
        self._host: Optimizer | None = None
        self._pairs: list[tuple[Tensor, Tensor]] = []  # (parameter, its copy)
        self._seen: dict[Tensor, tuple[int, int]] = {}  # parameters as they were when both were the same
        self._warns_of_clipping = offload_gradients
        self._check_alone()
        super().__init__(params, dict(options))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; see torch.optim.Optimizer."""
        with dropped_if_refused(self):
            super().add_param_group(param_group)
            group = self.param_groups[-1]
            hosts = [self._host_of(p) for p in group["params"]]
            host_group = {"params": hosts, **_options_of(group)}
            if self._host is None:
                self._host = self._cls([host_group], **self._options)
                self.defaults = dict(self._host.defaults)  # by which schedulers know what it has
            else:
                self._host.add_param_group(host_group)
        group.update(_options_of(self._host.param_groups[-1]))
        for p, host in zip(group["params"], hosts, strict=True):
            if p.requires_grad:
                self._pair(p, host)

    def _host_of(self, p: Tensor) -> Tensor:
        """The copy of a parameter on the CPU; of a frozen one an empty tensor in its place."""
        if hasattr(p, "device_mesh"):
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is sharded; with FSDP2 use fully_shard(..., "
                "offload_policy=CPUOffloadPolicy()) and the optimizer itself, which then steps on the CPU"
            )
        if not p.requires_grad:
            return nn.Parameter(torch.empty(0, dtype=p.dtype, device="cpu"), requires_grad=False)
        if isinstance(p, CodedWeight):
            return nn.Parameter(p.detach().to("cpu", copy=True))
        return nn.Parameter(torch.empty_like(p, device="cpu", pin_memory=p.is_cuda))

    def _pair(self, p: Tensor, host: Tensor) -> None:
        """Train a parameter by its copy from now on."""
        self._pairs.append((p, host))
        if self._offload_gradients:
            _move_gradient(p, host)
            if p in _MOVES:  # by an earlier optimizer, which would leave none for this one
                _MOVES[p].remove()
            _MOVES[p] = p.register_post_accumulate_grad_hook(partial(_move_gradient, host=host))

    def _pair_unfrozen(self) -> None:
        """Give parameters that were frozen when they were added, and are not any more, copies at their places."""
        inner = self._inner()
        for group, host_group in zip(self.param_groups, inner.param_groups, strict=True):
            for i, (p, old) in enumerate(zip(group["params"], host_group["params"], strict=True)):
                if p.requires_grad and not old.requires_grad:
                    host = host_group["params"][i] = self._host_of(p)
                    # It checks the parameter, and makes the states that Adagrad has from the start.
                    made = self._cls([{"params": [host], **_options_of(group)}], **self._options)
                    inner.state.pop(old, None)
                    inner.state.update(made.state)
                    self._pair(p, host)

    def _inner(self) -> Optimizer:
        """The optimizer on the CPU, with the options that the groups have now."""
        assert self._host is not None
        for group, host_group in zip(self.param_groups, self._host.param_groups, strict=True):
            host_group.update(_options_of(group))
        return self._host

    def _check_alone(self) -> None:
        """Raise ValueError if gradients leave before other processes have added theirs."""
        if self._offload_gradients and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"offload_gradients=True in one of {dist.get_world_size()} processes: a gradient would leave for the "
                "CPU before DistributedDataParallel has averaged it, and the copies of the model would drift apart. "
                "Leave out offload_gradients, or shard by FSDP2 with its CPUOffloadPolicy and the optimizer itself"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step with the gradients that are there; a closure computes them first, its result is returned."""
        self._check_alone()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._warns_of_clipping:
            self._warns_of_clipping = False
            warnings.warn(_UNCLIPPED, stacklevel=4)  # two wrappers of torch
        self._pair_unfrozen()
        for p, host in self._pairs:
            if type(p) is not type(host):
                raise ValueError("a weight has become one of int8 codes since this optimizer was made: make it anew")
            if not self._offload_gradients and p.grad is not None:
                host.grad = p.grad.to("cpu", non_blocking=True, copy=True)
            if self._seen.get(p) != _state_of(p):
                host.copy_(p)
        self._wait()
        self._inner().step()
        for p, host in self._pairs:
            if host.grad is not None:
                p.copy_(host, non_blocking=True)
                host.grad = None
            self._seen[p] = _state_of(p)
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch.amp.GradScaler asks for it before it would fail as it finds no gradients."""
        if self._offload_gradients:
            raise ValueError(
                "GradScaler finds no gradients to unscale: offload_gradients=True has sent them to the CPU. Leave out "
                "offload_gradients, or train in bf16, which needs no GradScaler"
            )
        return False

    def _wait(self) -> None:
        """Until everything that was sent is here."""
        for device in {p.device for p, _ in self._pairs if p.device.type != "cpu"}:
            torch.accelerator.synchronize(device)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, also those on the CPU; see torch.optim.Optimizer."""
        super().zero_grad(set_to_none)
        for _, host in self._pairs:
            host.grad = None

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their 2-norm is at most max_norm; return what it was."""
        self._warns_of_clipping = False
        self._pair_unfrozen()
        self._wait()
        moved = [host if self._offload_gradients else p for p, host in self._pairs]
        return nn.utils.clip_grad_norm_(moved, max_norm)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the optimizer on the CPU: what `cls` itself would save."""
        return self._inner().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this class, or of `cls`, gave."""
        self._pair_unfrozen()
        inner = self._inner()
        inner.load_state_dict(state_dict)
        for group, host_group in zip(self.param_groups, inner.param_groups, strict=True):
            group.update(_options_of(host_group))


def _state_of(p: Tensor) -> tuple[int, int]:
    """The version and the address of a parameter's memory, which change with its values."""
    return p._version, (p.codes if isinstance(p, CodedWeight) else p).data_ptr()


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _OWN}


def _move_gradient(p: Tensor, host: Tensor) -> None:
    """Add the gradient of p to that of its copy, and free it."""
    if p.grad is None:
        return
    if host.grad is None:
        host.grad = p.grad.to("cpu", copy=True)
    else:
        host.grad += p.grad.to("cpu")
    p.grad = None
