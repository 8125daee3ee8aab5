"""Runs a function in two processes that are connected by gloo, for the tests of tensor parallelism and FSDP2."""

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor


# fully_shard of torch 2.11 makes a parameter of each shard that asks for a gradient: pytorch/pytorch#177844.
SHARDS_INTEGERS = torch.__version__ >= "2.12"
TIMEOUT = 240  # seconds for everything; one collective gets a quarter


class Failures(list):
    """Failures, one line each; a process records one and continues, so that the other does not wait in vain."""

    @contextmanager
    def of(self, case: str) -> Iterator[None]:
        """Notes what the body raises, under the name of the case."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (a report of every case is the purpose)
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.append(f"{case}: {type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {error}")


def run_in_two_processes(work: Callable[[Path, Failures], None], directory: Path) -> list[str]:
    """Call `work(directory, failures)` in two new processes; returns what they noted as failed."""
    # A server that has imported the hosts once makes the processes of every test: each import takes seconds.
    mp.get_context("forkserver").set_forkserver_preload(["torch", "transformers.modeling_utils", "hf_quant"])
    context = mp.start_processes(_run, (work, directory), nprocs=2, join=False, start_method="forkserver")
    end = time.monotonic() + TIMEOUT
    while not context.join(timeout=max(end - time.monotonic(), 0)):
        if time.monotonic() >= end:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"the two processes took more than {TIMEOUT} s")
    return [line for rank in range(2) for line in torch.load(directory / f"failures-{rank}.pt")]


def _run(rank: int, work: Callable[[Path, Failures], None], directory: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", OMP_NUM_THREADS="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # accelerate asks for them, and uses the group below
    torch.set_num_threads(1)
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    timeout = timedelta(seconds=TIMEOUT / 4)
    dist.init_process_group("gloo", f"file://{directory}/store", rank=rank, world_size=2, timeout=timeout)
    failures = Failures()
    work(directory, failures)
    torch.save([f"process {rank}: {line}" for line in failures], directory / f"failures-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def whole(tensor: Tensor) -> Tensor:
    """A DTensor's full tensor (every process must ask), any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def change(y: Tensor, reference: Tensor) -> float:
    """Relative distance in the 2-norm."""
    return ((y.float() - reference.float()).norm() / reference.float().norm()).item()
