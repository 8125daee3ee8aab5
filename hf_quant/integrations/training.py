"""Optimizers for transformers' Trainer."""

from typing import Any, Protocol

from hf_quant.kernels.adam_step.op import STATES
from hf_quant.optim import AdamW


class Arguments(Protocol):
    """The fields of TrainingArguments that `trainer_optimizer` reads."""

    learning_rate: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    weight_decay: float
    optim_args: str | None


def trainer_optimizer(states: str, args: Arguments) -> tuple[type[AdamW], dict[str, Any]]:
    """Return `optimizer_cls_and_kwargs` of transformers' Trainer: `AdamW` with states in `states`, options from args.

        trainer = Trainer(model, args, train_dataset=data, optimizer_cls_and_kwargs=trainer_optimizer("int8", args))

    args are TrainingArguments: its learning_rate, adam_beta1, adam_beta2, adam_epsilon and weight_decay hold; the
    schedule, clipping and checkpoints are Trainer's. `args.optim` has no meaning then.

    Raises:
        ValueError: states is none of AdamW's, or args has optim_args, which would have no effect.
    """
    if states not in STATES:
        raise ValueError(f"states is {states!r}; allowed: {', '.join(map(repr, STATES))}")
    if args.optim_args:
        raise ValueError(
            f"args.optim_args is {args.optim_args!r}, which has no effect beside trainer_optimizer; leave it out, or "
            "give Trainer optimizer_cls_and_kwargs=(hf_quant.optim.AdamW, {...}) with all options"
        )
    betas = (args.adam_beta1, args.adam_beta2)
    options = {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon, "weight_decay": args.weight_decay}
    return AdamW, {**options, "states": states}
