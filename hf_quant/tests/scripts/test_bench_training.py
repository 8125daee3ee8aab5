"""The benchmark of training, at sizes that take seconds: its figures have the order that they must have."""

import argparse
import copy
import inspect
import shutil
import subprocess
import sysconfig
import tarfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import bench_training
from cpulab import qat
from cpulab.text import library_text
from hf_quant import prepare_qat_
from hf_quant.calibration.fp32 import fast_products
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


def test_steps_of_quantization_aware_training_are_timed():
    found = qat.step_times(1, 16, ("int4", "W4A8"), width=64)
    assert found.keys() == {qat.BASE, "int4", "W4A8"} and all(seconds > 0 for seconds in found.values())


def test_training_recovers_what_plain_rounding_lost(monkeypatch, tmp_path):
    AutoModelForCausalLM.from_pretrained(qat.ASSET, num_hidden_layers=2).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(qat.ASSET).save_pretrained(tmp_path)
    texts = [Path(module.__file__).read_text() for module in (argparse, inspect, shutil, subprocess, tarfile)]
    monkeypatch.setattr(qat, "library_text", lambda held_out: texts)  # to read all of it takes 10 s
    run = qat.Run(steps=8, tokens=256, length=64, learning_rate=1e-3)
    with fast_products():  # training in bf16 takes minutes on a CPU with AVX2 alone
        found = qat.recovered(tmp_path, "int2:group_size=64", run, tokens=512, window=64, gptq=False, log=False)
    assert list(found) == [qat.BASE, "RTN", "PTQ", "QAT"]
    assert found["QAT"].kl < found["PTQ"].kl < found["RTN"].kl


def test_the_teacher_writes_the_text():
    model, tokenizer = AutoModelForCausalLM.from_pretrained(qat.ASSET).eval(), AutoTokenizer.from_pretrained(qat.ASSET)
    run = qat.Run(steps=3, tokens=32, length=16, learning_rate=1e-3, text="own")
    ids = qat.training_ids(model, tokenizer, run)
    assert ids.shape == (6, 16) and len(ids.unique()) > 20
    student, seen = copy.deepcopy(model), []
    prepare_qat_(student, "int4")
    model.model.register_forward_pre_hook(lambda *call: seen.append(call[2]["input_ids"]), with_kwargs=True)
    qat.train(student, model, ids, run, log=False)
    windows = {tuple(row) for row in ids.tolist()}
    rows = [tuple(row) for call in seen for row in call.tolist()]
    assert len(rows) == 6 and set(rows) <= windows


def test_no_file_that_is_judged_on_is_trained_on(monkeypatch, tmp_path):
    files = {module.__name__: Path(module.__file__).read_text() for module in (argparse, inspect, shutil)}
    for name, text in files.items():
        (tmp_path / "part").mkdir(exist_ok=True)
        (tmp_path / "part" / f"{name}.py").write_text(text)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    held_out = (qat.ASSET / "eval.txt").read_text()
    assert library_text(held_out) == [files[name] for name in sorted(files)]
    assert library_text(held_out + files["inspect"]) == [files["argparse"], files["shutil"]]
