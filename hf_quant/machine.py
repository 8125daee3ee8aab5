"""The machine as its operating system describes it: the model of the CPU, its features, and the user's cache."""

import os
import platform
from pathlib import Path


# Of /proc/cpuinfo; the last line is of Arm, the others of x86.
FEATURES = (
    *("avx2", "fma", "f16c", "avx512f", "avx512vbmi", "avx512_vnni", "avx512_bf16"),
    *("avx_vnni", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)


def cpu() -> tuple[str, list[str]]:
    """Return (model, its features that select kernels)."""
    model = platform.processor() or platform.machine()
    flags: list[str] = []
    info = Path("/proc/cpuinfo")
    if info.is_file():  # Linux leaves platform.processor() empty; elsewhere nothing is known but the architecture
        lines = [line.partition(":") for line in info.read_text().splitlines()]
        model = next((value.strip() for key, _, value in lines if key.strip() == "model name"), model)
        flags = next((value.split() for key, _, value in lines if key.strip() in ("flags", "Features")), flags)
    return model, [name for name in FEATURES if name in flags]


def cache_directory() -> Path | None:
    """The directory for what is measured on this machine; None if the user has no home directory."""
    directory = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return None if directory.startswith("~") else Path(directory) / "hf_quant"
