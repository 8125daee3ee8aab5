"""Untrusted checkpoints: whatever is in the files, they load or end in a ValueError of one line, soon and small.

Each case breaks a good checkpoint: its header, bytes, config or index. 2,800 cases, the same in every run.
"""

import ast
import copy
import json
import os
import resource
import struct
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_quant
from hf_quant import load_quantized_, quantize_, save_quantized
from hf_quant.checkpoint import CONFIG_NAME, inspect_parts, read_header


pytest.importorskip("hypothesis", reason="the cases are made by hypothesis, of the extra `dev`")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402


WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
MAX_MESSAGE, MAX_GROWTH = 2000, 300e6

# Values where a checkpoint has others: limits of types, names that mean something, and anything.
EDGES = (
    *(0, -1, 1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**18, 10**400, 1.5, float("nan"), float("inf"), True),
    *(
        "",
        "\n",
        "\x00",
        "\ud800",
        "\u2028",
        "..",
        "../../x",
        "/etc/passwd",
        "self",
        "kwargs",
        "re:(",
        "re:a{99999999999}",
    ),
    *("re:" + "(" * 3000, "int4", "int8", "nvfp4", "fp8_e4m3", "row", "block", "float8_e4m3fn", "BF16", "F8_E8M0"),
    *("{0-999999}.{0-999999}", "{5-1}", "{0,0,0}", "{", "layers.{0-3}.x", "x" * 3000, "0", "2", "0.qdata", "C64"),
    *([2**62, 0], [0, 2**62], [2**40, 4, 0], [2**62, 2**62, 0]),
    *([], {}, [[]], [0, 0], [-1, 5], [2**62, 2**62], [0] * 3000, {"weights": "int4"}, [None], None),
)
KEYS = st.sampled_from(
    ["plan", "modules", "scheme", "weight", "self", "weights", "kv_cache", "0.qdata", "", "\n", "x"]
)
JUNK = st.sampled_from(EDGES) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(EDGES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


def cases(count: int) -> Callable:
    """Settings of a test that runs `count` cases, the same each time."""
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=timedelta(seconds=5),
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def edited(draw, document: Any) -> Any:
    """A JSON document in which up to three things are others, gone, or new."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(document))
        holder, key = draw(st.sampled_from(places))
        edit = draw(st.sampled_from(("replace", "replace", "delete", "add", "twice")))
        if edit == "replace":
            holder[key] = copy.deepcopy(draw(JUNK))
        elif edit == "delete":
            del holder[key]
        elif isinstance(holder, dict):
            holder[draw(KEYS | st.text(max_size=4))] = copy.deepcopy(draw(JUNK) if edit == "add" else holder[key])
        else:
            holder.insert(key, copy.deepcopy(draw(JUNK) if edit == "add" else holder[key]))
        if not document:
            break
    return document


def _places(value: Any) -> Any:
    """(dict or list, key) of everything in a document."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def module() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 32, bias=False))


@pytest.fixture(scope="module", params=["int4", "int8", "nvfp4"])
def good(request, tmp_path_factory) -> dict[str, bytes]:
    """The files of a checkpoint."""
    return _saved(tmp_path_factory.mktemp("good"), request.param)


@pytest.fixture(scope="module")
def good_int4(tmp_path_factory) -> dict[str, bytes]:
    return _saved(tmp_path_factory.mktemp("good"), "int4")


@pytest.fixture(scope="module")
def good_shards(tmp_path_factory) -> dict[str, bytes]:
    return _saved(tmp_path_factory.mktemp("good"), "int4", max_shard_size=800)


def _saved(directory: Path, weights: str, max_shard_size: int | str = "5GB") -> dict[str, bytes]:
    torch.manual_seed(0)
    model = quantize_(module().bfloat16(), weights)
    save_quantized(model, directory, max_shard_size=max_shard_size)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(autouse=True)
def small(place):
    """All cases of a test together take little memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    unit = 1 if sys.platform == "darwin" else 1024
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit < MAX_GROWTH


def check(directory: Path, files: dict[str, bytes]) -> list[bool]:
    """Whether each way to read the files did; a way that did not must have ended in a ValueError of one line."""
    for old in directory.iterdir():
        if old.name not in files:
            old.unlink()
    for name, data in files.items():
        (directory / name).write_bytes(data)
    model = module().bfloat16()
    ways = (
        lambda: read_header(directory),
        lambda: str(inspect_parts(directory)[""]),
        lambda: load_quantized_(model, directory),
    )
    return [_reads(way) for way in ways]


def _reads(way: Callable[[], Any]) -> bool:
    try:
        found = way()
    except ValueError as error:
        message = str(error)
        assert type(error) is ValueError, type(error)  # not what json or a codec raises
        assert message.isprintable() and 10 < len(message) < MAX_MESSAGE, (len(message), message[:3000])
        return False
    if isinstance(found, str):
        assert all(line.isprintable() for line in found.split("\n"))
    return True


def taken_apart(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def put_together(header: bytes, tensors: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + tensors


def test_the_good_ones_are_read(good, good_shards, place):
    assert check(place, good) == check(place, good_shards) == [True] * 3


@cases(600)
@given(data=st.data())
def test_headers(data, good_int4, place):
    header, tensors = taken_apart(good_int4[WEIGHTS])
    text = json.dumps(data.draw(edited(header))).encode()
    check(place, {**good_int4, WEIGHTS: put_together(text, tensors)})


@cases(300)
@given(data=st.data())
def test_bytes(data, good, place):
    raw = bytearray(good[WEIGHTS])
    header_size = 8 + struct.unpack("<Q", raw[:8])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        edit = data.draw(st.sampled_from(("flip", "flip in the header", "cut", "append", "length", "insert")))
        at = data.draw(st.integers(0, max(len(raw) - 1, 0)))
        if edit.startswith("flip") and raw:
            raw[at % min(header_size, len(raw)) if edit != "flip" else at] = data.draw(st.integers(0, 255))
        elif edit == "cut":
            raw = raw[: len(raw) - data.draw(st.sampled_from([1, 2, 8, at]))]
        elif edit == "append":
            raw += data.draw(st.binary(min_size=1, max_size=9))
        elif edit == "length":
            size = data.draw(
                st.sampled_from([0, 1, len(raw) - 8, len(raw), 2**31, 10**8, 10**8 + 1, 2**63, 2**64 - 1])
            )
            raw[:8] = struct.pack("<Q", max(size, 0))
        else:
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=9))
    check(place, {**good, WEIGHTS: bytes(raw)})


@cases(200)
@given(text=st.binary(max_size=60) | st.text(max_size=60).map(lambda t: t.encode(errors="surrogatepass")))
def test_any_text_for_a_header_a_config_and_an_index(text, good_int4, place):
    tensors = taken_apart(good_int4[WEIGHTS])[1]
    for name, data in ((WEIGHTS, put_together(text, tensors)), (CONFIG_NAME, text), (INDEX, text)):
        assert not all(check(place, {**good_int4, name: data}))


@cases(600)
@given(data=st.data())
def test_configs(data, good_int4, place):
    fields = data.draw(edited(json.loads(good_int4[CONFIG_NAME])))
    check(place, {**good_int4, CONFIG_NAME: json.dumps(fields).encode()})


@cases(250)
@given(data=st.data())
def test_configs_of_hosts(data, good_int4, place):
    ours = json.loads(good_int4[CONFIG_NAME])
    ours.pop("module")
    host = {"model_type": "llama", "torch_dtype": "bfloat16", "quantization_config": ours}
    fields = data.draw(edited(host))
    check(place, {WEIGHTS: good_int4[WEIGHTS], "config.json": json.dumps(fields).encode()})


@cases(250)
@given(data=st.data())
def test_indexes(data, good_shards, place):
    fields = data.draw(edited(json.loads(good_shards[INDEX])))
    check(place, {**good_shards, INDEX: json.dumps(fields).encode()})


# One by one, what an attacker would try first.

DEEP = b"[" * 100_000 + b"]" * 100_000
ONE = b'{"dtype":"I8","shape":[1],"data_offsets":[0,1]}'


def entry(shape: Any, offsets: Any) -> bytes:
    return json.dumps({"dtype": "I8", "shape": shape, "data_offsets": offsets}).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"1234567", "is truncated or not a safetensors file: 7 bytes"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n",
            "Git LFS, .*: fetch them by `git lfs",
        ),
        (put_together(b"{}", b"", 3), "10 bytes, with a header that claims 3"),
        (put_together(b'{"a":' + DEEP + b"}", b""), "is not JSON: "),
        (put_together(b'{"\xff":1}', b""), "is not JSON: 'utf-8' codec"),
        (put_together('{"a":1}'.encode("utf-16"), b""), "is not JSON"),
        (put_together(b'{"a":' + ONE + b',"a":' + ONE + b"}", b"\0"), "it has the key 'a' twice"),
        (put_together(b'{"a":' + entry([2**62, 4], [0, 1]) + b"}", b"\0"), "takes 18446744073709551616 bytes"),
        (put_together(b'{"a":' + entry([1], [-1, 0]) + b"}", b"\0"), "its header has {'dtype'"),
        (put_together(b'{"a":' + entry([1], [5, 6]) + b"}", b"\0"), "'a' is said to begin at byte 5, not 0"),
        (put_together(b'{"a":' + ONE + b',"b":' + ONE + b"}", b"\0"), "'b' is said to begin at byte 0, not 1"),
        (put_together(b'{"a":' + entry([1] * 9, [0, 1]) + b"}", b"\0"), "its header has {'dtype'"),
        (put_together(b'{"a\\nb":' + ONE + b"}", b"\0"), "names a tensor 'a.+b'; names are printable"),
        (put_together(b'{"' + b"a" * 501 + b'":' + ONE + b"}", b"\0"), "and at most 500 long"),
        (put_together(b'{"a":[' + b"[]," * 2_000_000 + b"[]]}", b""), "has more than 2000000 values"),
    ],
)
def test_broken_files(content, message, tmp_path):
    (tmp_path / WEIGHTS).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_header(tmp_path)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_not_waited_for(good_int4, tmp_path):
    os.mkfifo(tmp_path / WEIGHTS)
    (tmp_path / CONFIG_NAME).write_bytes(good_int4[CONFIG_NAME])
    for way in (lambda: read_header(tmp_path / WEIGHTS), lambda: inspect_parts(tmp_path)):
        with pytest.raises(ValueError, match="is not a file|holds no safetensors file"):
            way()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(good_int4, tmp_path):
    check(tmp_path, good_int4)
    (tmp_path / WEIGHTS).chmod(0)
    with pytest.raises(ValueError, match="model.safetensors cannot be read: Permission denied"):
        read_header(tmp_path)


def test_more_shards_than_any_model_has(good_int4, tmp_path):
    index = {"weight_map": {str(i): f"{i}.safetensors" for i in range(5001)}}
    assert check(tmp_path, {**good_int4, INDEX: json.dumps(index).encode()}) == [False] * 3
    with pytest.raises(ValueError, match="names 5001 shards; at most 5000 can be right"):
        read_header(tmp_path)


@pytest.mark.parametrize("name", [".qdata", "qdata_", "qdata_weight", "0.qdata_", "0.qdata_weight", "..qdata"])
def test_names_almost_of_codes(name, good_int4, tmp_path):
    header, tensors = taken_apart(good_int4[WEIGHTS])
    more = {name: {"dtype": "I32", "shape": [0, 4], "data_offsets": [len(tensors)] * 2}}
    files = {**good_int4, WEIGHTS: put_together(json.dumps({**header, **more}).encode(), tensors)}
    assert check(tmp_path, files)[2] is False
    header[name] = header.pop("0.qdata")
    files = {**good_int4, WEIGHTS: put_together(json.dumps(header).encode(), tensors)}
    assert check(tmp_path, files)[2] is False
    ours = {k: v for k, v in json.loads(good_int4[CONFIG_NAME]).items() if k != "module"}  # as a host stores it
    del files[CONFIG_NAME]
    check(tmp_path, {**files, "config.json": json.dumps({"quantization_config": ours}).encode()})


def test_names_of_many_parts_are_read_soon(good_int4, tmp_path):
    header, tensors = taken_apart(good_int4[WEIGHTS])
    codes = {"dtype": "I8", "shape": [0, 64], "data_offsets": [len(tensors)] * 2}
    scale = {**codes, "dtype": "I32", "shape": [0, 1]}
    many = {f"{i}.{'a.' * 230}x.{part}": e for i in range(5000) for part, e in (("qdata", codes), ("scale", scale))}
    fields = {k: v for k, v in json.loads(good_int4[CONFIG_NAME]).items() if k != "module"}
    int8 = {"weight": {"format": "int8", "granularity": "row", "scale_dtype": "float32"}}
    fields["plan"].append({"scheme": int8, "modules": ["x"]})
    text = json.dumps({"quantization_config": fields}).encode()
    start = time.perf_counter()
    check(tmp_path, {WEIGHTS: put_together(json.dumps({**header, **many}).encode(), tensors), "config.json": text})
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("source", ["x" * 5000, "a\0b", "a\nb/c"], ids=["long", "zero", "line"])
def test_what_is_no_path(source):
    with pytest.raises(ValueError, match="is not a directory, and not a name on the Hub") as caught:
        inspect_parts(source)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "shard",
    ["../../x.safetensors", "/etc/x.safetensors", "a/../b.safetensors", "..\\x.safetensors", "c:x.safetensors"],
)
def test_shards_with_a_path(shard, good_shards, tmp_path):
    index = json.loads(good_shards[INDEX])
    index["weight_map"]["0.qdata"] = shard
    assert check(tmp_path, {**good_shards, INDEX: json.dumps(index).encode()}) == [False] * 3
    with pytest.raises(ValueError, match="a shard is a .safetensors file beside the index"):
        read_header(tmp_path)


def test_a_tensor_in_two_shards(good_shards, tmp_path):
    index = json.loads(good_shards[INDEX])
    shards = list(index["weight_map"].values())
    name = next(n for n, shard in index["weight_map"].items() if shards.count(shard) > 1)
    files = {**good_shards, "copy.safetensors": good_shards[index["weight_map"][name]]}
    index["weight_map"][name] = "copy.safetensors"
    assert check(tmp_path, {**files, INDEX: json.dumps(index).encode()}) == [False] * 3
    with pytest.raises(ValueError, match="copy.safetensors and model-0.* both hold "):
        read_header(tmp_path)


def plans() -> dict[str, Any]:
    """Plans that stand for more than any model has."""
    scheme = {"weight": {"format": "int4", "granularity": "group", "group_size": 128, "scale_dtype": "bfloat16"}}
    many = {
        "a billion names": ["{0-999}.{0-999}.{0-999}"],
        "a million times the same": ["{0-9999}"] * 100_000,
        "long names": ["{0-99999}." + "x" * 400],
        "one long name": ["x" * 21_000_000],
        "a thousand levels": [".".join("x" * 1000)],
        "ranges in ranges": ["{" + "0-999999," * 1000 + "0}"],
    }
    return {name: [{"scheme": scheme, "modules": modules}] for name, modules in many.items()}


@pytest.mark.parametrize("plan", plans().values(), ids=plans())
def test_plans_of_absurd_size(plan, good_int4, tmp_path):
    absurd({"plan": plan}, good_int4, tmp_path)


def test_the_largest_plan_is_read_soon(good_int4, tmp_path):
    """Of as many names as are allowed, each with as many parts."""
    fields = json.loads(good_int4[CONFIG_NAME])
    fields.pop("module")
    fields["plan"][0]["modules"] += ["a." * 30 + "{0-200000}"]
    files = {WEIGHTS: good_int4[WEIGHTS], "config.json": json.dumps({"quantization_config": fields}).encode()}
    start = time.perf_counter()
    assert check(tmp_path, files) == [True, True, False]
    assert time.perf_counter() - start < 15


def absurd(changes: dict[str, Any], good: dict[str, bytes], directory: Path) -> None:
    fields = {**json.loads(good[CONFIG_NAME]), **changes}
    start = time.perf_counter()
    assert check(directory, {**good, CONFIG_NAME: json.dumps(fields).encode()}) == [True, False, False]
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize(
    "changes",
    [
        {"self": 1},
        {"modules": {"re:a{99999999999}": "int4"}},
        {"modules": {"re:" + "(" * 3000 + ")" * 3000: "int4"}},
        {"modules": {f"re:{i}": "int4" for i in range(1001)}},
        {"modules_to_not_convert": ["re:" + "a|" * 6000]},
        {"hf_quant_version": "1\n2"},
        {f"field {i}": 1 for i in range(100_000)},
        {"plan": [{"scheme": "x" * 10_000_000, "modules": []}]},
        {"hf_quant_version": "x" * 21_000_000},
        {"weights": "x" * 10_000_000},
        {"kv_cache": {"format": ["int8"]}},
        {"modules": {"re:" + "[^a-z]{9}" * 1000 + str(i): "int4" for i in range(900)}},
    ],
    ids=[
        *("self", "repeat", "brackets", "expressions", "expression", "version", "fields", "long", "longest"),
        *("format", "cache", "text of expressions"),
    ],
)
def test_configs_of_absurd_content(changes, good_int4, tmp_path):
    absurd(changes, good_int4, tmp_path)


def test_a_pickle_is_not_opened(good_int4, tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    (tmp_path / CONFIG_NAME).write_bytes(good_int4[CONFIG_NAME])
    for way in (lambda: read_header(tmp_path), lambda: load_quantized_(module(), tmp_path)):
        with pytest.raises(ValueError, match="pytorch_model.bin is a pickle, which could run any code"):
            way()


def test_nothing_in_the_package_unpickles():
    """By its source: no module that can, and of the functions that might, only those calls that cannot."""
    forbidden = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    loads = {"torch.load", "numpy.load", "np.load", "yaml.load", "eval", "exec"}
    found = []
    root = Path(hf_quant.__file__).parent
    for path in root.rglob("*.py"):
        if "tests" in path.relative_to(root).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and {alias.name for alias in node.names} != {"UnpicklingError"}:
                names.append(node.module or "")
            found += [(path.name, name) for name in names if name.partition(".")[0] in forbidden]
            if isinstance(node, ast.Call) and ast.unparse(node.func) in loads:
                given = {(k.arg, ast.unparse(k.value)) for k in node.keywords}
                safe = bool(given & {("allow_pickle", "False"), ("weights_only", "True")})
                found += [] if safe else [(path.name, ast.unparse(node.func))]
    # The launcher of compiled kernels runs what it has written itself: parameters are named by their place.
    assert found == [("compiled.py", "exec")]
