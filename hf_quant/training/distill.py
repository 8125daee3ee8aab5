"""`distillation_loss`: the KL divergence of a student from its teacher, without the logits of all tokens at once."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


Head = Callable[[Tensor], Tensor]  # hidden states [T, H] -> logits [T, V]


def distillation_loss(
    hidden: Tensor,
    teacher_hidden: Tensor,
    head: Head,
    teacher_head: Head,
    *,
    mask: Tensor,
    chunk: int = 1024,
    num_items: Tensor | int | None = None,
) -> Tensor:
    """Return the mean over tokens of KL(teacher || student), in nats, at temperature 1; a tensor of one value, fp32.

    Of quantized students: Du et al., https://arxiv.org/abs/2402.10631. Logits are made of `chunk` tokens at a time,
    and again in the backward pass: memory does not grow with the number of tokens times the size of the vocabulary.

    Args:
        hidden, teacher_hidden: the inputs of the heads, [..., H] and [..., H of the teacher], for the same tokens.
        head, teacher_head: modules or functions from [T, H] to logits [T, V], with everything that the model does to
            its logits, such as softcapping. The loss is differentiable in `hidden` and in the parameters of `head`.
        mask: True for the tokens that count, [...].
        chunk: tokens whose logits are in memory at once.
        num_items: the number that the sum over tokens is divided by; None: of the tokens that count. A Trainer that
            accumulates gradients gives that of all its batches.

    Raises:
        ValueError: the shapes differ, no token counts and num_items is None, or the vocabularies differ.
    """
    if not hidden.shape[:-1] == teacher_hidden.shape[:-1] == mask.shape:
        raise ValueError(
            f"hidden is {tuple(hidden.shape)}, teacher_hidden {tuple(teacher_hidden.shape)} and mask "
            f"{tuple(mask.shape)}; they must agree in all but the last dimension of the hidden states"
        )
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; needs at least one token")
    rows, targets = hidden[mask.bool()], teacher_hidden[mask.bool()]
    if num_items is None:
        if not len(rows):
            raise ValueError("no token counts: mask is False everywhere; give num_items, or leave the batch out")
        num_items = len(rows)
    total = rows.new_zeros((), dtype=torch.float32)
    for start in range(0, len(rows), chunk):
        part = rows[start : start + chunk], targets[start : start + chunk]
        if torch.is_grad_enabled():
            total = total + checkpoint(_sum, *part, head, teacher_head, use_reentrant=False)
        else:
            total = total + _sum(*part, head, teacher_head)
    return (total if len(rows) else total + 0.0 * rows.float().sum()) / num_items


def _sum(rows: Tensor, targets: Tensor, head: Head, teacher_head: Head) -> Tensor:
    """The sum over tokens of the KL divergence, for hidden states [T, H]."""
    with torch.no_grad():
        teacher = teacher_head(targets).float().log_softmax(-1)
    logits = head(rows).float()
    if logits.shape != teacher.shape:
        raise ValueError(
            f"the student has {logits.shape[-1]} logits for each token, its teacher {teacher.shape[-1]}: they need "
            "the same vocabulary"
        )
    return (teacher.exp() * (teacher - logits.log_softmax(-1))).sum()
