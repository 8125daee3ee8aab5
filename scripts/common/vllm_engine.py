"""vLLM's CPU build as an `Engine`, in a process of the environment that `make engines` makes."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from common.engine import Engine
from hf_quant import QuantizerConfig, export_compressed_tensors, quantize_


PYTHON = Path(__file__).resolve().parents[2] / "build" / "engines" / "bin" / "python"
_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


class Vllm(Engine):
    """A model in vLLM, in 16 bit or exported in a scheme of compressed-tensors, with the threads of torch."""

    def __init__(self, model: nn.Module, scheme: str | None, *, batch_size: int, context: int) -> None:
        """Quantizes `model` in place where `scheme` is one. Raises RuntimeError if vLLM does not load it."""
        super().__init__(model.config)
        self._work = tempfile.TemporaryDirectory()
        path = Path(self._work.name)
        if scheme is None:
            model.save_pretrained(path / "model")
        else:
            # Groups of W4A16 that divide the widths of small models.
            sizes = {} if scheme != "W4A16" or model.config.hidden_size % 128 == 0 else {"group_size": 64}
            quantize_(model, QuantizerConfig(scheme, input_transform="none", **sizes))
            model.save_pretrained(path / "own")
            export_compressed_tensors(path / "own", path / "model")
        self._log = path / "vllm.log"
        keep = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
        cache = PYTHON.parents[1] / "cache"  # of compiled graphs: without it each start takes minutes
        places = {"VLLM_CACHE_ROOT": str(cache), "VLLM_CONFIG_ROOT": str(path / "config")}
        script = Path(__file__).with_name("vllm_worker.py")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(PYTHON), str(script), str(path / "model"), str(batch_size), str(context)],
                cwd=path,
                env=keep | _VARIABLES | places | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._line()

    def _line(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            end = self._log.read_text(errors="replace").splitlines()[-15:]
            self.close()
            raise RuntimeError("\n".join(["vLLM has ended:", *end]))
        return line

    def steps(self, prompts: list[list[int]], new_tokens: int) -> Iterator[list[int]]:
        """Continue prompts greedily: the next token of each prompt, `new_tokens` times."""
        self._process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
        self._process.stdin.flush()
        for _ in range(new_tokens):
            yield json.loads(self._line())

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.terminate()
        self._process.wait()
        self._work.cleanup()
