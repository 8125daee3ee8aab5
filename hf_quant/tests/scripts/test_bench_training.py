"""The benchmark of training, at sizes that take seconds: its figures have the order that they must have."""

import torch

import bench_training
from hf_quant.optim import AdamW


TEXT = torch.frombuffer(bytearray(b"abcdefgh " * 8000), dtype=torch.uint8)


def test_times_and_bytes_of_every_optimizer():
    found = bench_training.measure(1, ((64, 256), (16,)))
    assert found.keys() == bench_training.TIMED.keys() and all(ns > 0 for ns, _ in found.values())
    nbytes = {name: size for name, (_, size) in found.items()}
    assert 2.03 < nbytes["int8 states"] < 2.05 < 4 <= nbytes["bf16 states"] < 4.05 < 8 <= nbytes["fp32 states"] < 8.05
    assert 1.06 < nbytes["int4 states"] < 1.08


def test_the_byte_model_learns_and_the_optimizer_is_the_one_that_is_named():
    made = bench_training.TRAINED["int4 states, bf16"]
    optimizer = made[0]([torch.nn.Parameter(torch.zeros(64, 64))], 3)
    assert isinstance(optimizer, AdamW) and optimizer.param_groups[0]["states"] == "int4"
    assert optimizer.param_groups[0]["seed"] == 3
    losses = [bench_training.trained_loss(*made, seed=0, text=TEXT, steps=steps) for steps in (1, 12)]
    assert losses[1] < losses[0] - 0.5
