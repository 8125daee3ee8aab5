"""The comparison of images and videos, end to end on tiny pipelines."""

import json
import math

import numpy as np
import pytest
import torch


pytest.importorskip("diffusers", reason="diffusers is an optional host")

from PIL import Image  # noqa: E402

import eval_pipeline_quality  # noqa: E402
from eval_pipeline_quality import disk_gigabytes, draw, psnr  # noqa: E402
from integration_tests.support.tiny_pipelines import save_cogvideox, save_flux  # noqa: E402


COMMON = ["--device", "cpu", "--steps", "2"]


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    return save_flux(tmp_path_factory.mktemp("flux"))


def test_images_of_two_prompts_and_seeds(flux, tmp_path, capsys):
    prompts, out = tmp_path / "prompts.txt", tmp_path / "grid.png"
    prompts.write_text("a storm\n\n")
    arguments = [str(flux), "--scheme", "int8", "int4:group_size=32", "--prompt", "a lighthouse", "--size", "16x16"]
    arguments += ["--prompts", str(prompts), "--seeds", "0", "1", "--set", "max_sequence_length=32"]
    arguments += [*COMMON, "--save", str(tmp_path / "saved"), "--side", "64", "--out", str(out)]
    assert eval_pipeline_quality.main(arguments) == 0
    output = capsys.readouterr().out
    found = json.loads(out.with_suffix(".json").read_text())["pipelines"]
    assert list(found) == ["16 bit", "int8", "int4:group_size=32"]
    better, worse = (np.mean(found[name]["measures"]["PSNR dB"]) for name in ("int8", "int4:group_size=32"))
    assert 80 > better > worse > 5 and len(found["int8"]["measures"]["PSNR dB"]) == 4
    assert found["16 bit"]["measures"]["PSNR dB"] == ["same"] * 4
    assert found["int4:group_size=32"]["weights_gb"] < found["int8"]["weights_gb"] < found["16 bit"]["weights_gb"]
    assert found["int8"]["disk_gb"] == disk_gigabytes(tmp_path / "saved" / "int8")
    assert found["int8"]["disk_gb"] == pytest.approx(found["int8"]["weights_gb"], rel=0.1)
    assert Image.open(out).size == (3 * (64 + 4), 20 + 4 * (64 + 20))
    assert "SSIM" in output and "16 bit" in output

    arguments = [str(tmp_path / "saved" / "int8"), "--reference", str(flux), "--prompt", "a lighthouse", *COMMON]
    arguments += ["--size", "16x16", "--set", "max_sequence_length=32", "--out", str(out)]
    assert eval_pipeline_quality.main(arguments) == 0
    again = json.loads(out.with_suffix(".json").read_text())["pipelines"]["as saved"]
    assert again["measures"]["PSNR dB"] == found["int8"]["measures"]["PSNR dB"][:1], "the same bits as before saving"


def test_videos(tmp_path):
    video, out = save_cogvideox(tmp_path / "video"), tmp_path / "grid.png"
    arguments = [str(video), "--scheme", "int8-dynamic", "--attention", "int8", "--prompt", "waves", *COMMON]
    arguments += ["--set", "num_frames=9", "--set", "max_sequence_length=16", "--size", "48x32", "--side", "48"]
    assert eval_pipeline_quality.main([*arguments, "--out", str(out)]) == 0
    found = json.loads(out.with_suffix(".json").read_text())["pipelines"]
    assert 10 < found["int8-dynamic"]["measures"]["PSNR dB"][0] < 80
    assert Image.open(out).size == (2 * (3 * 48 + 4), 20 + 32 + 20), "the first, the middle and the last frame"


def test_errors_of_use(flux, capsys):
    with pytest.raises(SystemExit):
        eval_pipeline_quality.main([str(flux), "--prompt", "x"])
    assert "give --scheme, or --reference" in capsys.readouterr().err
    assert eval_pipeline_quality.main([str(flux), "--scheme", "int8"]) == 2
    assert "no prompt" in capsys.readouterr().err


def test_psnr():
    black, grey = np.zeros((2, 4, 4, 3), np.float32), np.full((2, 4, 4, 3), 0.1, np.float32)
    assert psnr(black, black) == math.inf
    assert psnr(grey, black) == pytest.approx(20, abs=1e-4)


def test_the_grid_holds_the_images():
    white = [np.ones((1, 8, 16, 3), np.float32)]
    grid = draw({"16 bit": white, "x": [white[0] * 0]}, {"16 bit": ["a"], "x": ["b"]}, 16)
    pixels = torch.from_numpy(np.asarray(grid).copy())
    assert grid.size == (40, 48) and (pixels[20:28, :16] == 255).all() and (pixels[20:28, 20:36] == 0).all()
