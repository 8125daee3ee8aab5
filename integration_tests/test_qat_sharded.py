"""Quantization-aware training in two processes: FSDP2 with uneven shards, and DistributedDataParallel."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_quant import convert_qat_, prepare_qat_
from hf_quant.optim import AdamW
from integration_tests.support.two_processes import SHARDS_INTEGERS, Failures, change, run_in_two_processes, whole


SCHEMES = {"int4": "int4", "int2": "int2", "W4A8": "W4A8", "mxfp4": "mxfp4", "fp8": "fp8"}
STEPS = 3


def network(fields: str) -> nn.Module:
    """Rows that two processes cannot halve; prepared."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 301), nn.GELU(), nn.Linear(301, 97))
    prepare_qat_(model, fields)
    return model


def train(model: nn.Module, rows: slice) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each step, and the whole parameters after the last."""
    optimizer = AdamW(model.parameters(), lr=1e-3, states="fp32")
    losses = []
    for step in range(STEPS):
        x = torch.randn(8, 128, generator=torch.Generator().manual_seed(step))[rows]
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name.removeprefix("module."): whole(p.detach()) for name, p in model.named_parameters()}


def test_two_processes_train_as_one(tmp_path):
    failures = run_in_two_processes(in_each_process, tmp_path)
    assert not failures, "\n".join(failures)


def in_each_process(directory: Path, failures: Failures) -> None:
    rank = dist.get_rank()
    for name, fields in SCHEMES.items():
        alone = network(fields)
        losses, expected = train(alone, slice(None))
        if SHARDS_INTEGERS:
            with failures.of(f"{name}, fully_shard"):
                check_sharded(fields, losses, expected, convert_qat_(alone).state_dict())
        with failures.of(f"{name}, DistributedDataParallel, half of the rows each"):
            halves, found = train(DistributedDataParallel(network(fields)), slice(4 * rank, 4 * rank + 4))
            both = torch.tensor(halves)
            dist.all_reduce(both)
            assert torch.allclose(both / 2, torch.tensor(losses), rtol=1e-5, atol=0)
            # Adam divides gradients by their size: those near 0 have other signs by another order of summing up.
            near = [torch.isclose(found[key].float(), expected[key].float(), atol=1e-4) for key in expected]
            assert sum(int(part.sum()) for part in near) > 0.99 * sum(part.numel() for part in near)
    if SHARDS_INTEGERS:
        with failures.of("fully_shard, fp32 weights that compute in bf16"):
            check_mixed_precision()


def check_sharded(fields: str, losses: list[float], expected: dict[str, Tensor], codes: dict[str, Tensor]) -> None:
    model = network(fields)
    fully_shard(model[0])
    own_losses, found = train(fully_shard(model), slice(None))
    assert own_losses == losses and found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    with pytest.raises(ValueError, match="0.weight is sharded: gather the model in one process"):
        convert_qat_(model)
    gathered = network(fields)
    gathered.load_state_dict(found)
    own = convert_qat_(gathered).state_dict()
    assert own.keys() == codes.keys() and all(torch.equal(own[key], codes[key]) for key in codes)


def check_mixed_precision() -> None:
    model, policy = network("int4"), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model[0], mp_policy=policy)
    _, found = train(fully_shard(model, mp_policy=policy), slice(None))
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(STEPS))
    with torch.no_grad():
        trained, errors = model(x), {}
        for dtype in (torch.float32, torch.bfloat16):
            gathered = network("int4")
            gathered.load_state_dict(found)
            errors[dtype] = change(convert_qat_(gathered.to(dtype))(x.to(dtype)), trained)
    # Codes are chosen for the bf16 copies of the weights, of which convert_qat_ must know.
    assert errors[torch.bfloat16] < 0.008 and errors[torch.float32] > 0.015, errors
