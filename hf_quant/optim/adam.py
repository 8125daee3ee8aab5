"""AdamW with states in fp32, bf16, 8 or 4 bits."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from hf_quant.coded_weight import CodedWeight
from hf_quant.kernels.adam_step.op import BLOCKS, CODECS, FLOATS, STATES, adam_step_
from hf_quant.optim._place import Place, dropped_if_refused, local, place_of, sharded_alike, zeros


FORMAT_VERSION = 1  # of state dicts
_SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class AdamW(Optimizer):
    """AdamW whose states may take 8 or 4 bits, and which writes bf16 parameters once, by stochastic rounding.

    It takes the place of torch.optim.AdamW: parameter groups (each may have options of its own), closures, schedulers
    of the learning rate, gradient accumulation and clipping work as there. Parameters are fp32 or bf16. With bf16
    parameters there is no fp32 copy of them: an update that is smaller than their last place moves some of them by a
    whole place, so that it is right on average.

    States lie in blocks of 256 values (4 bits: 128) of a row, each with an fp32 scale: 2.03 bytes per parameter with
    8 bits, 1.06 with 4, where torch takes 8, or 4 for bf16 parameters. All dimensions of a parameter after the first
    are one row. Parameters of one dimension, and those with fewer than `min_size` values, have fp32 states.

    Under FSDP2 and tensor parallelism each process has the states of its shard, as DTensors, and every sharding gives
    the same bits. A state dict holds codes and scales as they are, so that training goes on to the bit; torch.save,
    torch.distributed.checkpoint, Trainer and accelerate save it. A parameter's first step with learning rate 0 and
    gradients of zeros, which torch.distributed.checkpoint makes, makes its states and changes nothing.

    Args:
        params: parameters, named parameters or groups of them.
        lr: the learning rate; a schedule changes `param_groups[i]["lr"]`.
        betas: how much of both moments a step keeps.
        eps: what is added to the root of the second moment.
        weight_decay: what lr is multiplied by to shrink the parameters.
        states: "fp32", "bf16", "int8" (8 bits, the second moment without a zero), "fp8" (float8_e4m3fn) or "int4".
        stochastic_rounding: round bf16 parameters and states below fp32 at random instead of to nearest.
        min_size: values of a parameter from which on `states` holds.
        seed: of the random numbers; they depend on it, the step and the place of a value in its parameter.

    Raises:
        ValueError: an option is out of range, a parameter is neither fp32 nor bf16, or sharded in a way that cuts
            blocks of states. `step` raises it for gradients that are sparse or in another dtype, and for
            weights of int8 codes (`prepare_training_`) without stochastic rounding.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        states: str = "fp32",
        stochastic_rounding: bool = True,
        min_size: int = 4096,
        seed: int = 0,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "states": states}
        options |= {"stochastic_rounding": stochastic_rounding, "min_size": min_size, "seed": seed}
        super().__init__(params, {**options, "format_version": FORMAT_VERSION})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; see torch.optim.Optimizer. Raises ValueError as the class does."""
        with dropped_if_refused(self):
            super().add_param_group(param_group)
            _check_group(self.param_groups[-1])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step with the gradients that are there; a closure computes them first, its result is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    _check_gradient(p, p.grad, group)
        stream = 0
        for group in self.param_groups:
            calls: dict[tuple[Any, ...], _Call] = {}
            for i, p in enumerate(group["params"], stream):
                if p.grad is not None:
                    self._prepare(p, p.grad, i, group, calls)
            for (kind, step, _), call in calls.items():
                call.run(group, kind, step)
            stream += len(group["params"])
        return loss

    def _prepare(
        self, p: Tensor, g: Tensor, stream: int, group: dict[str, Any], calls: dict[tuple[Any, ...], "_Call"]
    ) -> None:
        """Count the step of a parameter and give it to the call that makes it."""
        state, place, g = self.state[p], place_of(p), sharded_alike(g, p)
        kind = _kind(p, group)
        if not state:
            state.update(_new_state(p, place, kind))
            if float(group["lr"]) == 0 and not _is_nonzero(g):
                return
        state["step"] += 1
        step = int(state["step"])
        if local(p).numel() == 0:
            return
        if isinstance(local(p), CodedWeight):  # alone, so that one weight at a time is in fp32
            call = _Call()
            call.add(p, g, state, place, stream)
            call.run(group, kind, step)
        else:
            calls.setdefault((kind, step, p.device), _Call()).add(p, g, state, place, stream)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of an optimizer of this kind gave; its options replace those of the groups.

        torch would convert states to the dtype of their parameter; here codes and scales stay as they are.

        Raises:
            ValueError: it is of another optimizer or a newer version, or a state does not fit its parameter.
        """
        found: dict[Any, Any] = {}
        numbers: list[Any] = []

        def take_states(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            for group in given["param_groups"]:
                _check_saved(group)
                numbers.extend(group["params"])
            self._check_same_states(given["param_groups"])
            found.update(given["state"])
            return {**given, "state": {}}

        def put_states(_: Optimizer) -> None:
            params = [p for group in self.param_groups for p in group["params"]]
            kinds = [_kind(p, group) for group in self.param_groups for p in group["params"]]
            for number, p, kind in zip(numbers, params, kinds, strict=True):
                if number in found:
                    self.state[p] = _loaded(p, number, kind, found[number])

        # The last of the hooks before, and the first of those after.
        hooks = (
            self.register_load_state_dict_pre_hook(take_states),
            self.register_load_state_dict_post_hook(put_states, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _check_same_states(self, saved: list[dict[str, Any]]) -> None:
        """Raise ValueError if saved groups have other states than the class is named for; here any may be loaded."""


class AdamW8bit(AdamW):
    """`AdamW` with states="int8": 2.03 bytes per parameter."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        stochastic_rounding: bool = True,
        min_size: int = 4096,
        seed: int = 0,
    ) -> None:
        moments = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "states": self._states}
        rounding = {"stochastic_rounding": stochastic_rounding, "min_size": min_size, "seed": seed}
        super().__init__(params, lr, **moments, **rounding)

    def _check_same_states(self, saved: list[dict[str, Any]]) -> None:
        for i, (group, given) in enumerate(zip(self.param_groups, saved)):
            if group["states"] != given["states"]:
                raise ValueError(
                    f"the state dict has {given['states']!r} states in group {i}, this {type(self).__name__} "
                    f"{group['states']!r}: load it into an optimizer of the kind that saved it, or into AdamW"
                )

    _states = "int8"


class AdamW4bit(AdamW8bit):
    """`AdamW` with states="int4": 1.06 bytes per parameter."""

    _states = "int4"


class AdamWFp8(AdamW8bit):
    """`AdamW` with states="fp8" (float8_e4m3fn): 2.03 bytes per parameter."""

    _states = "fp8"


class _Call:
    """Parameters that make one step together."""

    def __init__(self) -> None:
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.moments: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.scales: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.origins: list[tuple[int, int, int]] = []
        self.changed: list[Tensor] = []
        self.copies: list[tuple[Tensor, Tensor]] = []  # (what is not contiguous, what is computed in its place)
        self.coded: list[tuple[CodedWeight, Tensor, int, int]] = []  # (weight, its values in fp32, stream, first row)

    def add(self, p: Tensor, g: Tensor, state: dict[str, Any], place: Place, stream: int) -> None:
        data = local(p)
        if isinstance(data, CodedWeight):
            coded, data = data, data.dequantized(torch.float32)
            self.coded.append((coded, data, stream, place.row * (place.shape[1] // p.shape[-1])))
        parts = [data, local(g), *(local(state[name]) for name in ("exp_avg", "exp_avg_sq"))]
        parts += [local(state[name]) for name in _SCALES if name in state]
        for i, (into, part) in enumerate(zip((self.params, self.grads, *self.moments, *self.scales), parts)):
            matrix = part.contiguous().view(part.shape if i > 3 else _matrix_of(part, place, is_state=i > 1))
            into.append(matrix)
            if i != 1 and not part.is_contiguous():
                self.copies.append((part, matrix))
        self.origins.append((stream, place.row, place.column))
        self.changed.append(p)

    def run(self, group: dict[str, Any], kind: str, step: int) -> None:
        beta1, beta2 = group["betas"]
        adam_step_(
            self.params,
            self.grads,
            *self.moments,
            *self.scales,
            torch.tensor(self.origins, dtype=torch.int64),
            states=kind,
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
            seed=group["seed"] if group["stochastic_rounding"] else None,
        )
        for part, computed in self.copies:
            part.copy_(computed.view(part.shape))
        for coded, values, stream, row in self.coded:
            coded.write_(values, low=group["seed"] + stream, high=step, row=row)
        # The kernels write past autograd: what was kept of the parameters must not be taken for what they are now.
        torch.autograd.graph.increment_version(self.changed)


def _matrix_of(part: Tensor, place: Place, *, is_state: bool) -> tuple[int, int]:
    """The shape of a local tensor as a matrix; packed states have fewer columns than the parameter."""
    rows, columns = place.local_shape
    return rows, part.numel() // rows if is_state else columns


def _kind(p: Tensor, group: dict[str, Any]) -> str:
    """The states of a parameter: those of its group, or "fp32" for vectors and small ones."""
    return group["states"] if p.dim() > 1 and p.numel() >= group["min_size"] else "fp32"


class _Stored(NamedTuple):
    """The shape of a state, that of this process's part, and its dtype."""

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: torch.dtype


def _layout(p: Tensor, place: Place, kind: str) -> dict[str, _Stored]:
    """{name of a state: how it is stored}."""

    def columns_by(size: int, dtype: torch.dtype) -> _Stored:
        (N, K), (rows, columns) = place.shape, place.local_shape
        return _Stored((N, -(-K // size)), (rows, -(-columns // size)), dtype)

    moment = _Stored(tuple(p.shape), tuple(local(p).shape), STATES[kind])
    if kind == "int4":
        moment = columns_by(2, STATES[kind])
    found = dict.fromkeys(("exp_avg", "exp_avg_sq"), moment)
    if kind in CODECS:
        found |= dict.fromkeys(_SCALES, columns_by(BLOCKS[kind], torch.float32))
    return found


def _new_state(p: Tensor, place: Place, kind: str) -> dict[str, Tensor]:
    if kind in CODECS and place.columns != place.shape[1] and place.columns % BLOCKS[kind]:
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} is sharded by {place.columns} columns, which is not a multiple of "
            f'{BLOCKS[kind]}, the block of {kind!r} states; use states="bf16", or shard its rows'
        )
    made = {name: zeros(p, *what) for name, what in _layout(p, place, kind).items()}
    return {"step": torch.zeros((), dtype=torch.float32, device="cpu"), **made}


def _is_nonzero(gradient: Tensor) -> bool:
    """True if any value is not zero, in any process that has a part of it."""
    total = torch.linalg.vector_norm(gradient, 1, dtype=torch.float32)
    return bool((total.full_tensor() if hasattr(total, "full_tensor") else total) != 0)


def _loaded(p: Tensor, number: Any, kind: str, saved: dict[str, Any]) -> dict[str, Any]:
    """A copy of saved states on the device of their parameter. Raises ValueError if they do not fit it."""
    if not saved:
        return {}
    wanted = _layout(p, place_of(p), kind)
    if saved.keys() != {"step", *wanted}:
        raise ValueError(
            f"the state of parameter {number} has {sorted(saved)}; {kind!r} states are {sorted(wanted)} and step. "
            "Load it into an optimizer of the kind that saved it"
        )
    loaded: dict[str, Any] = {"step": torch.tensor(float(saved["step"]), dtype=torch.float32, device="cpu")}
    for name, (shape, local_shape, dtype) in wanted.items():
        value = saved[name]
        fits = (value.shape, local(value).shape, value.dtype) == (shape, local_shape, dtype)
        if not fits or hasattr(value, "placements") != hasattr(p, "placements"):
            raise ValueError(
                f"{name} of parameter {number} is {value.dtype} with shape {tuple(value.shape)} "
                f"({tuple(local(value).shape)} in this process); needs {dtype} with shape {shape} ({local_shape}) for "
                f"a parameter of shape {tuple(p.shape)}. The model must be the one that was trained, sharded as now "
                "by torch.distributed.checkpoint"
            )
        loaded[name] = value.detach().to(p.device, copy=True)
    return loaded


def _check_saved(group: dict[str, Any]) -> None:
    """Raise ValueError unless a saved group is of this kind of optimizer, and of no newer version."""
    if "states" not in group:
        raise ValueError(
            f"the state dict is of another optimizer: its groups have {sorted(group)}, and lack 'states'. Start with "
            "fresh states, or load it into an optimizer of the kind that saved it"
        )
    if group["format_version"] > FORMAT_VERSION:
        raise ValueError(
            f"the state dict has format_version {group['format_version']}; this version of hf-quant reads up to "
            f"{FORMAT_VERSION}: install a newer one"
        )


def _check_group(group: dict[str, Any]) -> None:
    """Raise ValueError unless the options of a group are in range, and its parameters fp32 or bf16."""
    if group["states"] not in STATES:
        raise ValueError(f"states is {group['states']!r}; allowed: {', '.join(map(repr, STATES))}")
    beta1, beta2 = group["betas"]
    checks = {
        "lr": (float(group["lr"]) >= 0, "a number from 0 on"),
        "betas": (0 <= beta1 < 1 and 0 <= beta2 < 1, "two numbers from 0 on, below 1"),
        "eps": (group["eps"] >= 0, "a number from 0 on"),
        "weight_decay": (group["weight_decay"] >= 0, "a number from 0 on"),
        "min_size": (isinstance(group["min_size"], int) and group["min_size"] >= 0, "a whole number from 0 on"),
        "seed": (isinstance(group["seed"], int), "a whole number"),
    }
    for name, (is_right, allowed) in checks.items():
        if not is_right:
            raise ValueError(f"{name} is {group[name]!r}; allowed: {allowed}")
    for p in group["params"]:
        if p.requires_grad and p.dtype not in FLOATS:
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is {p.dtype}; allowed: torch.float32 and torch.bfloat16. Pass "
                "the parameters that are to be trained: [p for p in model.parameters() if p.requires_grad]"
            )


def _check_gradient(p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
    if g.layout != torch.strided or g.dtype not in FLOATS:
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(p.shape)} is {g.dtype}, {g.layout}; allowed: "
            "dense gradients in torch.float32 or torch.bfloat16 (sparse=False for embeddings)"
        )
    if isinstance(local(p), CodedWeight) and not group["stochastic_rounding"]:
        raise ValueError(
            "stochastic_rounding is False, but a weight is stored as int8 codes: rounding to the nearest code "
            "would lose nearly every update. Leave stochastic_rounding=True for the group of such weights"
        )
