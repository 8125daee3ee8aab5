"""`distillation_loss`: the KL divergence and its gradients, in chunks."""

import pytest
import torch
from torch import Tensor, nn

from hf_quant.training import distillation_loss


def parts(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, nn.Module, nn.Module, Tensor]:
    """Hidden states of student and teacher, their heads, and a mask."""
    torch.manual_seed(0)
    hidden = torch.randn(3, 11, 16, dtype=dtype, requires_grad=True)
    mask = torch.rand(3, 11) > 0.3
    heads = nn.Linear(16, 50, bias=False), nn.Linear(24, 50, bias=False)
    return hidden, torch.randn(3, 11, 24, dtype=dtype), *(head.to(dtype) for head in heads), mask


def expected(hidden: Tensor, teacher_hidden: Tensor, head: nn.Module, teacher_head: nn.Module, mask: Tensor) -> Tensor:
    student = head(hidden[mask]).double().log_softmax(-1)
    teacher = teacher_head(teacher_hidden[mask]).detach().double().log_softmax(-1)
    return nn.functional.kl_div(student, teacher, log_target=True, reduction="sum") / mask.sum()


@pytest.mark.parametrize("chunk", [1, 7, 1024])
def test_value_and_gradients(chunk):
    hidden, teacher_hidden, head, teacher_head, mask = parts()
    wanted = expected(hidden, teacher_hidden, head, teacher_head, mask)
    gradients = torch.autograd.grad(wanted, (hidden, head.weight))
    loss = distillation_loss(hidden, teacher_hidden, head, teacher_head, mask=mask, chunk=chunk)
    assert loss.dtype == torch.float32 and loss.shape == ()
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=0)
    loss.backward()
    torch.testing.assert_close(hidden.grad, gradients[0], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(head.weight.grad, gradients[1], rtol=1e-4, atol=1e-6)
    assert teacher_head.weight.grad is None
    reverse = distillation_loss(hidden[..., :16], hidden[..., :16], head, lambda h: head(-h), mask=mask)
    assert not torch.isclose(reverse, loss)
    with torch.no_grad():
        same = distillation_loss(hidden, teacher_hidden, head, teacher_head, mask=mask, chunk=chunk)
    assert torch.equal(same, loss.detach())


def test_a_student_like_its_teacher_loses_nothing():
    hidden, _, head, _, mask = parts()
    loss = distillation_loss(hidden, hidden.detach(), head, head, mask=mask)
    assert 0 <= abs(loss.item()) < 1e-6
    loss.backward()
    assert hidden.grad.abs().max() < 1e-6


def test_batches_add_up_to_the_loss_of_all():
    """Divided by the number of all tokens, however they are cut; a batch without a token adds nothing."""
    hidden, teacher_hidden, *heads, mask = parts()
    mask[1] = False
    whole = distillation_loss(hidden, teacher_hidden, *heads, mask=mask)
    count = mask.sum()
    each = [
        distillation_loss(hidden[i : i + 1], teacher_hidden[i : i + 1], *heads, mask=mask[i : i + 1], num_items=count)
        for i in range(3)
    ]
    assert each[1] == 0
    torch.testing.assert_close(sum(each), whole)
    sum(each).backward()
    assert hidden.grad[0].any() and not hidden.grad[1].any()


def test_no_more_logits_than_those_of_a_chunk_are_in_memory():
    hidden, teacher_hidden, head, teacher_head, mask = parts(torch.bfloat16)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        distillation_loss(hidden, teacher_hidden, head, teacher_head, mask=mask, chunk=5)
    assert not [size for size in kept if size % 50 == 0 and size > 50]
    assert kept


def test_refusals():
    hidden, teacher_hidden, head, teacher_head, mask = parts()
    with pytest.raises(ValueError, match=r"hidden is \(3, 11, 16\), teacher_hidden \(2, 11, 24\) and mask \(3, 11\)"):
        distillation_loss(hidden, teacher_hidden[:2], head, teacher_head, mask=mask)
    with pytest.raises(ValueError, match="chunk is 0"):
        distillation_loss(hidden, teacher_hidden, head, teacher_head, mask=mask, chunk=0)
    with pytest.raises(ValueError, match="no token counts"):
        distillation_loss(hidden, teacher_hidden, head, teacher_head, mask=mask & False)
    with pytest.raises(ValueError, match="student has 50 logits for each token, its teacher 49"):
        distillation_loss(hidden, teacher_hidden, head, nn.Linear(24, 49), mask=mask)
