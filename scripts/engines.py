"""Exports of the small trained model in a serving engine, compared with hf_quant's own kernels token by token.

    make engines                # installs vLLM's CPU build into build/engines, then runs this
    python scripts/engines.py   # the same where the environment exists: some minutes

The model of the tests is quantized, saved, exported, and loaded by vLLM (16 bit, eager, on CPUs, offline). Both
continue the same prompts greedily. Where the two largest logits are nearly equal, rounding to 16 bit decides between
them, and all that follows is another text; so three things are distinguished:

- all prompts: tokens that are equal, position by position
- steady prompts: those that hf_quant's kernels continue alike in 16 and in 32 bit. The targets are for these
- next tokens: the top token after every token of a given text, where nothing follows from a difference; beside it, how
  far hf_quant's own 16-bit and 32-bit runs agree

One export is also served by `vllm serve` on the loopback interface and asked by HTTP. Exit status 1 if a target is
missed, 2 if something cannot be run.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_quant import QuantizerConfig, export_compressed_tensors
from hf_quant.evaluate import machine
from hf_quant.planning import format_table


ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / "build" / "engines"
MODEL = ROOT / "integration_tests" / "assets" / "tiny-llama-13m"
# {scheme: smallest share of equal tokens}; None: the model as it is, the control.
TARGETS = {None: None, "W4A16": 1.0, "W4A16_ASYM": 0.9, "W8A8": 0.9, "W8A8_FP8": 0.9}
SERVED = "W4A16"
# The model was trained on texts of 256 tokens.
NUM_TEXTS, TEXT_TOKENS, PROMPT_TOKENS, NEW_TOKENS = 16, 256, 32, 64
MIN_STEADY = 4
LOAD_LIMIT_S, START_LIMIT_S, ANSWER_LIMIT_S, STOP_LIMIT_S = 600, 300, 120, 30
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; by default it takes a share of the machine's memory
    "VLLM_CPU_INT4_W4A8": "0",  # on CPUs with AMX it would quantize the inputs of W4A16 to 8 bit
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scripts/engines_vllm.py looks at the loaded model
}
WITHOUT_SGLANG = (
    "SGLang was not run: its packages (0.5.23) need CUDA, and for CPUs there is source code only, for those with AMX."
)


class EngineError(Exception):
    """An engine that is missing, fails or does not answer in time."""


class Tokens(NamedTuple):
    """Tokens of one checkpoint by one implementation.

    greedy: [prompts][NEW_TOKENS], that follow each prompt. top: [texts][TEXT_TOKENS - 1], after every token of each
    text but the last. gaps: as greedy, and top_gaps: as top: between the two largest logits.
    """

    greedy: list[list[int]]
    top: list[list[int]]
    gaps: list[list[float]]
    top_gaps: list[list[float]]


class Comparison(NamedTuple):
    """Tokens of an engine beside those of hf_quant, with `ours` in 16 and `exact` in 32 bit."""

    ours: Tokens
    exact: Tokens
    greedy: list[list[int]]
    top: list[list[int]]

    @property
    def steady(self) -> list[int]:
        """Prompts whose continuation does not depend on rounding to 16 bit."""
        return [i for i in range(len(self.greedy)) if self.ours.greedy[i] == self.exact.greedy[i]]

    def share(self, prompts: list[int]) -> float:
        """The share of tokens that are equal, of those prompts; NaN without prompts."""
        pairs = [pair for i in prompts for pair in zip(self.ours.greedy[i], self.greedy[i])]
        return sum(a == b for a, b in pairs) / len(pairs) if pairs else float("nan")

    @property
    def gaps(self) -> list[float]:
        """Between our two largest logits, wherever the engine takes another token first, or after the same text."""
        firsts = [
            next((gap for a, b, gap in zip(*row) if a != b), None)
            for row in zip(self.ours.greedy, self.greedy, self.ours.gaps)
        ]
        forced = [gap for row in zip(self.ours.top, self.top, self.ours.top_gaps) for a, b, gap in zip(*row) if a != b]
        return [gap for gap in firsts if gap is not None] + forced


def agreement(a: list[list[int]], b: list[list[int]]) -> float:
    """The share of equal tokens in two lists of the same shape."""
    return float(np.mean(np.asarray(a) == np.asarray(b)))


def two_largest(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    """[..., vocabulary] -> (index of the largest, the first of equal ones; its distance to the second)."""
    values = logits.float().topk(2).values
    return logits.argmax(-1).tolist(), (values[..., 0] - values[..., 1]).tolist()


@torch.inference_mode()
def own_tokens(checkpoint: Path, dtype: torch.dtype, texts: list[list[int]]) -> Tokens:
    """By hf_quant's kernels; all prompts at once, and the end of a text does not end it."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
    given = torch.tensor(texts)
    top, top_gaps = two_largest(model(input_ids=given).logits[:, :-1])
    ids, cache, steps = given[:, :PROMPT_TOKENS], None, []
    for _ in range(NEW_TOKENS):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(two_largest(out.logits[:, -1]))
        ids = torch.tensor(steps[-1][0])[:, None]
    greedy, gaps = ([list(column) for column in zip(*part)] for part in zip(*steps))
    return Tokens(greedy, top, gaps, top_gaps)


def quantize(scheme: str, work: Path) -> tuple[Path, Path]:
    """(checkpoint of hf_quant, export of it) of the small model, in 16 bit."""
    own, exported = work / f"{scheme}-own", work / scheme
    model = AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.bfloat16, quantization_config=QuantizerConfig(scheme, input_transform="none")
    )
    model.save_pretrained(own)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(own)
    export_compressed_tensors(own, exported)
    return own, exported


def stop(process: subprocess.Popen) -> None:
    """End every process of the group that `process` leads, and wait until none is left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + STOP_LIMIT_S
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            while time.monotonic() < end:
                process.poll()  # a child that has ended belongs to the group until it is waited for
                os.killpg(process.pid, 0)
                time.sleep(0.1)
            continue
        return


@contextlib.contextmanager
def running(command: list[str], work: Path) -> Iterator[tuple[subprocess.Popen, Path]]:
    """(A process with a group of its own, the file with what it prints); all of the group has ended afterwards."""
    keep = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    places = {"VLLM_CACHE_ROOT": str(work / "cache"), "VLLM_CONFIG_ROOT": str(work / "config")}
    log = work / "engine.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=work,
            env=keep | VARIABLES | places,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process, log
        finally:
            stop(process)


def failure(what: str, log: Path) -> EngineError:
    """An error with the end of what the engine has printed."""
    return EngineError("\n".join([what, *log.read_text(errors="replace").splitlines()[-30:]]))


def engine_tokens(python: Path, checkpoint: Path, texts: list[list[int]], work: Path) -> dict[str, Any]:
    """By vLLM: what scripts/engines_vllm.py writes."""
    task, result = work / "task.json", work / "result.json"
    prompts = [text[:PROMPT_TOKENS] for text in texts]
    task.write_text(json.dumps({"prompts": prompts, "texts": texts, "new_tokens": NEW_TOKENS}))
    result.unlink(missing_ok=True)
    script = Path(__file__).resolve().with_name("engines_vllm.py")
    with running([str(python), str(script), str(checkpoint), str(task), str(result)], work) as (process, log):
        try:
            status = process.wait(LOAD_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise failure(f"vLLM has not finished {checkpoint.name} in {LOAD_LIMIT_S} s:", log) from None
        if status or not result.is_file():
            raise failure(f"vLLM failed on {checkpoint.name} with exit status {status}:", log)
    return json.loads(result.read_text())


def free_port() -> int:
    """A port of the loopback interface that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def http(url: str, body: dict[str, Any] | None = None, limit: float = 5.0) -> bytes:
    """Return the answer of a server on this machine, whatever proxy is set."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=limit) as answer:
        return answer.read()


def served_tokens(python: Path, checkpoint: Path, texts: list[list[int]], work: Path) -> tuple[list[list[int]], float]:
    """(Greedy tokens of one request to `vllm serve`, seconds until it was ready)."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    options = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--enforce-eager"]
    command = [str(python.with_name("vllm")), "serve", str(checkpoint), "--served-model-name", "served", *options]
    start = time.monotonic()
    with running([*command, "--max-model-len", str(TEXT_TOKENS)], work) as (process, log):
        while True:
            if process.poll() is not None:
                raise failure(f"vllm serve ended with exit status {process.returncode}:", log)
            if time.monotonic() - start > START_LIMIT_S:
                raise failure(f"vllm serve is not ready after {START_LIMIT_S} s:", log)
            with contextlib.suppress(OSError):  # urllib's errors, while nobody listens yet, are among them
                http(f"{url}/health")
                break
            time.sleep(0.5)
        ready = time.monotonic() - start
        prompts = [text[:PROMPT_TOKENS] for text in texts]
        body = {"model": "served", "prompt": prompts, "temperature": 0, "max_tokens": NEW_TOKENS}
        try:
            answer = http(
                f"{url}/v1/completions", body | {"ignore_eos": True, "return_token_ids": True}, ANSWER_LIMIT_S
            )
        except OSError as error:
            raise failure(f"vllm serve did not answer: {error}", log) from error
    choices = sorted(json.loads(answer)["choices"], key=lambda choice: choice["index"])
    return [choice["token_ids"] for choice in choices], ready


def row(scheme: str | None, found: Comparison, plain: Tokens, kernels: dict[str, int]) -> tuple[tuple[str, ...], bool]:
    """(cells of the table, whether the target is met, by layers that are quantized, in enough prompts to tell).

    plain: of the model that is not quantized. kernels: as scripts/engines_vllm.py has them.
    """
    steady, target = found.steady, TARGETS[scheme]
    share = found.share(steady)
    met = target is None or (share >= target and len(steady) >= MIN_STEADY and bool(kernels))
    verdict = (
        "" if target is None else f"{'equal' if target == 1 else f'>= {target:.0%}'}: {'met' if met else 'MISSED'}"
    )
    cells = (
        scheme or "bf16, not quantized",
        ", ".join(f"{count} {name}" for name, count in kernels.items()) or "16 bit",
        f"{found.share(list(range(len(found.greedy)))):.1%}",
        f"{share:.1%} of {len(steady)}",
        verdict,
        f"{agreement(found.ours.top, found.top):.1%}",
        f"{agreement(found.ours.top, found.exact.top):.1%}",
        "" if target is None else f"{agreement(found.ours.top, plain.top):.1%}",
        f"{max(found.gaps, default=0.0):.3g}",
    )
    return cells, met


HEADER = ("scheme", "layers in vLLM", "all", "steady", "target", "next", "own", "16 bit", "largest gap")
LEGEND = """\
all, steady: equal greedy tokens, of all prompts and of those that our kernels continue alike in bf16 and fp32
next: equal top tokens after the same text; own: of ours in bf16 and in fp32; 16 bit: of ours and the 16-bit model's
largest gap: between our two largest logits, wherever vLLM takes another token"""


def compare(python: Path, work: Path, texts: list[list[int]]) -> tuple[bool, list[int], list[list[int]]]:
    """Print the table; (all targets are met, steady prompts of SERVED, the engine's tokens of SERVED)."""
    rows, all_met, plain, kept, versions = [HEADER], True, None, None, {}
    for scheme in TARGETS:
        print(f"{scheme or 'bf16'} ...", file=sys.stderr)
        own, exported = (MODEL, MODEL) if scheme is None else quantize(scheme, work)
        theirs = engine_tokens(python, exported, texts, work)
        ours, exact = (own_tokens(own, dtype, texts) for dtype in (torch.bfloat16, torch.float32))
        found = Comparison(ours, exact, theirs["greedy"], theirs["top"])
        plain = plain or ours
        cells, met = row(scheme, found, plain, theirs["kernels"])
        rows.append(cells)
        all_met, versions = all_met and met, theirs["versions"]
        if scheme == SERVED:
            kept = found
    print("python scripts/engines.py")
    print(f"hf_quant: {machine()}")
    print(f"vLLM: {', '.join(f'{name} {number}' for name, number in versions.items())}; eager, bf16")
    print(f"{MODEL.name}: {NEW_TOKENS} greedy tokens after each of {NUM_TEXTS} prompts of {PROMPT_TOKENS} tokens;")
    print(f"next tokens after {NUM_TEXTS * (TEXT_TOKENS - 1):,} given ones\n")
    print(format_table(rows), end="\n\n")
    print(LEGEND)
    return all_met, kept.steady, kept.greedy


def serve(python: Path, work: Path, texts: list[list[int]], steady: list[int], offline: list[list[int]]) -> bool:
    """Print how many answers of a server equal the tokens without one; True if those of steady prompts do."""
    print(f"vllm serve {SERVED} ...", file=sys.stderr)
    answered, ready = served_tokens(python, work / SERVED, texts, work)
    equal = [answered[i] == offline[i] for i in range(NUM_TEXTS)]
    print(f"vllm serve, {SERVED}: ready after {ready:.0f} s; {sum(equal)} of {NUM_TEXTS} answers equal to the above")
    return all(equal[i] for i in steady)


def main() -> int:
    """Read the arguments; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, default=ENVIRONMENT, help="where vLLM is installed")
    args = parser.parse_args()
    python = args.environment.absolute() / "bin" / "python"
    if not python.with_name("vllm").is_file():
        print(f"There is no vLLM in {args.environment}: make engines installs it", file=sys.stderr)
        return 2
    ids = np.load(MODEL / "val_ids.npy")[: NUM_TEXTS * TEXT_TOKENS].astype(int)
    texts = ids.reshape(NUM_TEXTS, TEXT_TOKENS).tolist()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the engine is stopped, too
    try:
        with tempfile.TemporaryDirectory() as directory:
            work = Path(directory)
            met, steady, offline = compare(python, work, texts)
            print(WITHOUT_SGLANG)
            return 0 if serve(python, work, texts, steady, offline) and met else 1
    except EngineError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
