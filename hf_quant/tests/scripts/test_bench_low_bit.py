"""The benchmark of training in 8 bits, at sizes that take seconds."""

import xml.etree.ElementTree as ElementTree

import torch

import bench_low_bit
from common import curves


TEXT = torch.frombuffer(bytearray(b"abcdefgh " * 8000), dtype=torch.uint8)


def test_times_of_layers_and_of_steps():
    found = bench_low_bit.linear_times(1, ((64, 96, 64),)) | bench_low_bit.step_times(
        1, ((1, 16),), bench_low_bit.llama(256, 1)
    )
    found |= bench_low_bit.experts_times(1, 16, 256, 256)
    assert list(found) == ["64 tokens, 96 -> 64", "1 x 16 tokens", "16 tokens, 256 -> 256 -> 256"]
    assert all(seconds > 0 for of in found.values() for seconds in of.values())


def test_a_recipe_learns_what_bf16_learns_and_not_to_the_bit():
    plain, int8 = (bench_low_bit.from_scratch(recipe, 0, TEXT, steps=12) for recipe in ("bf16", "int8"))
    assert len(plain[1]) == 12 and plain[1][-1] < plain[1][0] - 0.5
    assert plain[0] != int8[0] and abs(plain[0] / int8[0] - 1) < 0.05


def test_curves(tmp_path):
    lines = {"a & b": [(0.0, 3.0), (5.0, 1.5)], "c": [(0.0, 2.5), (5.0, 1.4)]}
    curves.draw(lines, "step", "loss", tmp_path / "plot.svg")
    root = ElementTree.parse(tmp_path / "plot.svg").getroot()
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a & b", "c", "step", "loss"} <= set(texts)
