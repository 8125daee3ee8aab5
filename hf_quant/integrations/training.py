"""Parts for transformers' Trainer: optimizers, quantization-aware training, and distillation."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_quant.kernels.adam_step.op import STATES
from hf_quant.modules import check_model
from hf_quant.optim import AdamW
from hf_quant.training import QatModule, distillation_loss


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


class QATCallback(TrainerCallback):
    """Callback of Trainer for a model that `prepare_qat_` has prepared: checks, and a start in 16 bit.

        Trainer(model, args, train_dataset=data, callbacks=[QATCallback(start_step=100)])

    Before `start_step` the prepared layers compute in 16 bit. At that step codes and scales are chosen for the weights
    as they are then, by the algorithm without data, and training goes on from these. With 0 it goes on from the codes
    of `prepare_qat_`. A run that ends with weights of an earlier step, as `load_best_model_at_end` may choose them,
    ends with codes that are chosen for these.

    Raises:
        ValueError: start_step is negative; when training begins: no layer is prepared, or the optimizer lacks the
            scales, as one does that was made before `prepare_qat_`.
    """

    def __init__(self, start_step: int = 0) -> None:
        if start_step < 0:
            raise ValueError(f"start_step is {start_step}; needs 0 or more")
        self.start_step = start_step

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        layers = _prepared(kwargs["model"])
        if not layers:
            raise ValueError("no layer of the model is prepared: call prepare_qat_ before you make the Trainer")
        optimizer = kwargs.get("optimizer")
        if optimizer is not None:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            scales = [p for layer in layers for n, p in layer.named_parameters(recurse=False) if "log_scale" in n]
            if any(p.requires_grad and id(p) not in held for p in scales):
                raise ValueError("the optimizer lacks the learned scales: make it after prepare_qat_")
        for layer in layers:
            # A run that resumes at start_step has yet to choose the codes, in `on_step_begin`.
            layer.qat.is_on = self.start_step == 0 or state.global_step > self.start_step

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for layer in _prepared(kwargs["model"]) if state.global_step == self.start_step else []:
            if not layer.qat.is_on:
                _choose_codes_(layer)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        best = state.best_model_checkpoint if args.load_best_model_at_end else None  # what Trainer has just loaded
        is_early = best is not None and 0 < int(best.rpartition("-")[2]) <= self.start_step  # "out/checkpoint-100"
        for layer in _prepared(kwargs["model"]):
            if is_early or not layer.qat.is_on:
                _choose_codes_(layer)


def _choose_codes_(layer: QatModule) -> None:
    layer.restart_()
    layer.qat.is_on = True


def _prepared(model: nn.Module) -> list[QatModule]:
    return [module for module in model.modules() if isinstance(module, QatModule)]


class DistillTrainer(Trainer):
    """Trainer whose loss is the KL divergence from a teacher, see `distillation_loss`.

        trainer = DistillTrainer(model, args, teacher=teacher, train_dataset=data, callbacks=[QATCallback()])

    Language models only. The labels of a batch say which tokens count, and not what they should be: -100 leaves one
    out. Without labels those of the attention mask count, in training and in evaluation. The sum over tokens is
    divided by the number of all tokens of a step, however many batches it has. The logits of both models are made of
    `chunk` tokens at a time.

    Args:
        teacher: a model with the same vocabulary, in 16 bit as a rule; it is not trained.
        chunk: tokens whose logits are in memory at once.
        others: as Trainer takes them.

    Raises:
        ValueError: the teacher is no model or the model itself, the model has an encoder beside its decoder, a loss of
            its own or label smoothing is asked for, or one of both does something to its logits that is not known; the
            latter is found in the first step.
    """

    def __init__(self, *args: Any, teacher: nn.Module, chunk: int = 1024, **options: Any) -> None:
        check_model(teacher, "teacher")
        super().__init__(*args, **options)
        if teacher is self.model:
            raise ValueError("the teacher is the model that is trained: load another copy of it")
        if getattr(getattr(self.model, "config", None), "is_encoder_decoder", False):
            raise ValueError(
                f"a {type(self.model).__name__} has an encoder beside its decoder: DistillTrainer takes language "
                "models of one sequence; hf_quant.training.distillation_loss serves a loop of your own"
            )
        if self.compute_loss_func is not None or self.label_smoother is not None:
            given = "compute_loss_func" if self.compute_loss_func is not None else "label_smoothing_factor"
            raise ValueError(f"{given} has no effect on the loss from a teacher: leave it out, or take Trainer")
        self.teacher, self.chunk = teacher.to(self.args.device).eval(), chunk
        self.model_accepts_loss_kwargs = True  # the number of items is used here, whatever the model takes
        self._loss_shifts_labels = True  # of the labels it counts; Trainer knows it of classes named ...ForCausalLM
        self._heads_are_checked = False

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the loss of a batch, and with `return_outputs` a dict with all logits of the model, too."""
        mask = _counted(inputs)
        inputs = {name: value for name, value in inputs.items() if name not in ("labels", "shift_labels")}
        options = {"output_hidden_states": True, "use_cache": False, "logits_to_keep": 0 if return_outputs else 1}
        outputs = model(**inputs, **options)
        with torch.no_grad():
            of_teacher = self.teacher(**inputs, **{**options, "logits_to_keep": 1})
        student = self.accelerator.unwrap_model(model)
        heads = output_head(student), output_head(self.teacher)
        states = outputs.hidden_states[-1], of_teacher.hidden_states[-1]
        if not self._heads_are_checked:
            for part, found, hidden, of in zip((student, self.teacher), heads, states, (outputs, of_teacher)):
                _check_head(part, found(hidden[:, -1:]), of.logits[:, -1:])
            self._heads_are_checked = True
        # Learned prompts of PEFT are positions before those of the batch.
        hidden, teacher_hidden = (part[:, -mask.shape[1] : -1] for part in states)
        counted = {"mask": mask[:, 1:], "chunk": self.chunk, "num_items": num_items_in_batch}
        loss = distillation_loss(hidden, teacher_hidden, *heads, **counted)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # whose gradients are averaged
        return (loss, {"loss": loss, "logits": outputs.logits}) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Return loss, logits and labels of a batch; without labels, which Trainer needs for a loss, None for them."""
        if "labels" in inputs:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        marked = {**inputs, "labels": torch.where(_counted(inputs), 0, -100)}
        loss, logits, _ = super().prediction_step(model, marked, prediction_loss_only, ignore_keys)
        return loss, logits, None


def _counted(inputs: dict[str, Any]) -> Tensor:
    """True for the tokens [B, S] that a batch wants to be predicted."""
    if "labels" in inputs:
        return inputs["labels"] != -100
    if inputs.get("attention_mask") is not None:
        return inputs["attention_mask"] != 0
    tokens = inputs["inputs_embeds"][..., 0] if inputs.get("input_ids") is None else inputs["input_ids"]
    return torch.ones_like(tokens, dtype=torch.bool)


def output_head(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the function from the last hidden states [..., H] of a language model to its logits [..., V].

    It knows the factors and the softcapping of the models of transformers. Raises ValueError if there is no head.
    """
    module = getattr(model, "get_output_embeddings", lambda: None)()
    if module is None:
        raise ValueError(f"a {type(model).__name__} has no output embeddings: distillation needs a language model")
    whole: Any = model.config
    config = whole.get_text_config()
    factor = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0
    factor /= getattr(config, "logits_scaling", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None)

    def head(hidden: Tensor) -> Tensor:
        logits = module(hidden)
        logits = logits if factor == 1.0 else logits * factor
        return logits if cap is None else torch.tanh(logits / cap) * cap

    return head


def _check_head(model: nn.Module, found: Tensor, expected: Tensor) -> None:
    """Raise ValueError if a head gives other logits than its model."""
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    if not error < 0.02:
        raise ValueError(
            f"the logits of a {type(model).__name__} are not those of its output embeddings on its last hidden "
            f"states (they differ by {error.item():.2g} of their norm): what it does to them is not known here"
        )
