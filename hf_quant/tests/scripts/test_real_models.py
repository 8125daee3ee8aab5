"""The script that measures trained models, without them."""

from xml.etree import ElementTree

import pytest

import readme_section
import real_models
from common import scatter
from common.schemes import parse_spec


@pytest.fixture
def made(monkeypatch):
    """Names of what was made, by stand-ins for pip and for the conversion; that of "broken" is interrupted."""
    names = []

    def convert_apart(gguf, out, packages):
        out.mkdir()
        (out / "config.json").write_text(gguf.read_text())
        names.append(gguf.stem)
        if gguf.stem == "broken":
            raise KeyboardInterrupt

    def install(packages, target):
        target.mkdir()
        (target / "one").write_text("ab")
        (target / "two").write_text("c")

    monkeypatch.setattr(real_models, "install", install)
    monkeypatch.setattr(real_models, "convert_apart", convert_apart)
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    model = real_models.MODELS["gemma3"]._replace(parts=("one", "two"), sha256=abc)
    for name in ("whole", "broken"):
        monkeypatch.setitem(real_models.MODELS, name, model)
    monkeypatch.setitem(real_models.MODELS, "changed", model._replace(parts=("two", "one")))
    return names


def test_a_checkpoint_is_made_once_and_only_a_finished_one_stays(made, tmp_path):
    path = real_models.prepare("whole", tmp_path)
    assert (path / "config.json").read_text() == "abc" and "license: gemma" in (path / "README.md").read_text()
    assert real_models.prepare("whole", tmp_path) == path
    with pytest.raises(KeyboardInterrupt):
        real_models.prepare("broken", tmp_path)
    with pytest.raises(ValueError, match="two, one: the SHA-256 is .*; needs ba78"):
        real_models.prepare("changed", tmp_path)
    assert made == ["whole", "broken"] and list(tmp_path.iterdir()) == [path]


def test_the_plot_has_every_point_where_it_belongs(tmp_path):
    points = {"a<b": (4.25, 0.1), "c": (8.0, 0.001), "d": (4.25, 0.1001)}
    scatter.draw([scatter.Panel("one", points), scatter.Panel("two", {"e": (2.5, 9.0)})], "x", "y", tmp_path / "p.svg")
    root = ElementTree.parse(tmp_path / "p.svg").getroot()
    panels = root.findall("{*}g")
    circles = [[float(c.get("cx")), float(c.get("cy"))] for c in panels[0].findall("{*}circle")]
    (c, a, d), lines = circles, [float(t.get("y")) for t in panels[0].findall("{*}text")[-3:]]
    assert a[0] == d[0] < c[0] and c[1] > a[1] >= d[1]  # the y axis of SVG goes down
    assert all(low - high >= scatter.LINE for low, high in zip(lines, lines[1:]))  # no label lies on another
    texts = [t.text for t in panels[0].findall("{*}text")]
    assert texts[0] == "one" and texts[-3:] == ["c", "a<b", "d"] and {"0.001", "10", "2", "8"} <= set(texts)
    assert len(panels) == 2 and len(panels[1].findall("{*}circle")) == 1


def test_the_table_in_the_readme_is_made_of_what_the_script_writes():
    def row(weights, bits, perplexity):
        change = {"perplexity_change": perplexity / 10 - 1, "kl": 0.5, "same_top_token": 0.75}
        return {"weights": weights, "bits_per_weight": bits, "nbytes": 1, "perplexity": perplexity, **change}

    small = {"title": "A", "predictions": 2044, "rows": [row("bf16", 16.0, 10.0), row("int2", 2.375, 40000.0)]}
    large = {"title": "B", "predictions": 511, "rows": [row("bf16", 16.0, 10.0), row("int2", 2.411, 15.0)]}
    record = {"command": "python x", "machine": "here", "clock": "wall time", "models": {"a": small, "b": large}}
    header, _, base, int2, _, footer = readme_section.real_models_table(record).splitlines()
    assert header.count("|") == base.count("|") == int2.count("|") == 9
    assert base == "| bf16 | 16.000 | 10.00 |  |  | 10.00 |  |  |"
    assert int2 == "| int2 | 2.375, 2.411 | 4.0e+04 (x 4e+03) | 0.5000 | 75.0% | 15.00 (+50.0%) | 0.5000 | 75.0% |"
    assert footer == "`python x`: 2,044 and 511 predictions; here."
    for one in small["rows"] + large["rows"]:
        one |= {"decode": 30.0, "decode_speedup": 1.5}
    lines = readme_section.real_models_table(record).splitlines()
    assert lines[0].endswith("same top token | decode x bf16 |") and lines[3].endswith("75.0% | 1.50 |")
    assert lines[-1] == "`python x`: 2,044 and 511 predictions, decoding at batch 1 in wall time; here."
    large["rows"].pop()
    with pytest.raises(ValueError, match="other schemes"):
        readme_section.real_models_table(record)


def test_schemes_with_modules_of_their_own():
    assert parse_spec("W8A8:group_size=64:algorithm=mse") == {"weights": "W8A8", "group_size": 64, "algorithm": "mse"}
    spec = 'W8A8:activation_scale=static:modules={"*.down_proj": "int8", "lm_head": null}'
    modules = {"*.down_proj": "int8", "lm_head": None}
    assert parse_spec(spec) == {"weights": "W8A8", "activation_scale": "static", "modules": modules}
