"""`hf-quant doctor`: parts that are active on this machine, reasons for those that are not, and remedies.

It imports no host and opens no connection. torch, and what needs it, is imported only once its version is known to do:
the command has to answer where an installation is broken.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import sysconfig
from pathlib import Path
from typing import Any

from hf_quant._version import __version__
from hf_quant.machine import cpu


PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "triton", "diffusers", "peft")
HOOK = "hf_quant._boot:boot"
_VARIABLE, _AUTOLOAD = "HF_QUANT_NATIVE", "TORCH_DEVICE_BACKEND_AUTOLOAD"
_REQUIREMENT = re.compile(r"([\w-]+)>=([\d.]+)(?:; *(.*))?")
_UNUSABLE = "not examined without a supported torch"
_TOO_MANY = ", more than there are cores: set OMP_NUM_THREADS"


def doctor(args: argparse.Namespace) -> None:
    """Print the findings, as text or as JSON."""
    found = examine()
    print(json.dumps(found, indent=2) if args.json else as_text(found))


def examine() -> dict[str, Any]:
    """Find the installed and active parts; without a usable torch, those that need it are None."""
    packages = _packages()
    model, features = cpu()
    hooked = any(point.value == HOOK for point in importlib.metadata.entry_points(group="torch.backends"))
    found: dict[str, Any] = {
        "hf_quant": {"version": __version__, "path": str(Path(__file__).parents[1])},
        "packages": packages,
        "machine": {
            "python": platform.python_version(),
            "os": platform.platform(),
            "cpu": model,
            "features": features,
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "threads": None,
        },
        "hook": {"installed": hooked, "active": hooked and os.environ.get(_AUTOLOAD, "1") == "1"},
        **dict.fromkeys(("native", "gpu", "settings")),
    }
    if packages["torch"]["problem"] is None:
        import torch

        found["machine"]["threads"] = torch.get_num_threads()
        found["native"], found["gpu"], found["settings"] = _native(), _gpu(), _settings()
    return found


def _packages() -> dict[str, dict[str, Any]]:
    """Return {package: its version or None, the oldest supported one, whether it is required, a problem or None}."""
    try:
        requirements = importlib.metadata.requires("hf-quant") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path: nothing says what it needs
        requirements = []
    minimum, required = {}, set()
    for requirement in requirements:
        match = _REQUIREMENT.fullmatch(requirement)
        if match is not None:
            name, minimum[match[1]], marker = match.groups()
            if marker is None or ("extra" not in marker and platform.system() in marker):
                required.add(name)
    found = {}
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        least, problem = minimum.get(name), None
        if version is None and (name in required or name == "torch"):
            problem = "not installed, but required"
        elif version is not None and least is not None and _release(version) < _release(least):
            problem = f"older than {least}, the oldest that is supported"
        found[name] = {"version": version, "minimum": least, "required": name in required, "problem": problem}
    return found


def _release(version: str) -> tuple[int, ...]:
    """Parse a version: "2.13.0+cpu" -> (2, 13), without zeros at the end."""
    numbers = [int(part) for part in re.match(r"\d*(?:\.\d+)*", version)[0].split(".") if part]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _native() -> dict[str, Any]:
    from hf_quant.kernels import native

    active, reason = native.active(), native.unavailable_reason()
    todo = None
    if active is None:
        todo = f"unset {_VARIABLE}" if native.instruction_sets() else _how_to_build()
    return {
        "active": active,
        "available": list(native.instruction_sets()),
        **native.features(),
        "huge_pages": native.page_size(),
        "environment": os.environ.get(_VARIABLE),
        "why_not": reason,
        "to_do": todo,
    }


def _how_to_build() -> str:
    """Say what is missing for the extension to be built from source."""
    again = "install hf-quant from source again: in a checkout, `pip install -v --force-reinstall --no-deps .`"
    compiler = (os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()[0]
    header = Path(sysconfig.get_path("include")) / "Python.h"
    steps = []
    if shutil.which(compiler) is None:
        steps.append(f"install a C++ compiler ({compiler} is not on the PATH; on Debian and Ubuntu the package g++)")
    if not header.is_file():
        steps.append(f"install Python's headers ({header} is missing; on Debian and Ubuntu the package python3-dev)")
    if not steps:
        again += f", and see what the compiler says; {shutil.which(compiler)} and Python's headers are there"
    return ", ".join([*steps, again])


def _gpu() -> dict[str, Any]:
    """List the devices, each with its config table of the Triton kernels, or the reason why there are none."""
    import torch

    from hf_quant.kernels.gpu import launch

    devices = []
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        for i in range(module.device_count() if module.is_available() else 0):
            properties, target = module.get_device_properties(i), launch.target_of(torch.device(kind, i))
            devices.append(
                {
                    "device": f"{kind}:{i}",
                    "name": properties.name,
                    "memory": properties.total_memory,
                    "compute_capability": f"{properties.major}.{properties.minor}" if target.is_nvidia else None,
                    "target": target.name,
                    "table": None if launch.unavailable_reason(kind) else target.table,
                    "why_not": launch.unavailable_reason(kind),
                }
            )
    built = torch.version.cuda or torch.version.hip or getattr(torch.version, "xpu", None)
    why_none = "torch finds no device" if built else "this build of torch is for CPUs only"
    return {"devices": devices, "why_none": None if devices else why_none}


def _settings() -> dict[str, Any]:
    from hf_quant.kernels import prepack
    from hf_quant.kernels.gpu import launch

    path, tables, problem = None, {}, None
    try:
        path = str(launch.tuned_path())
        tables = {target: list(found) for target, found in launch.tuned_tables().items()}
    except ValueError as error:  # no home directory, or a damaged file
        problem = str(error)
    return {"prepack_limit": prepack.limit(), "tuned_path": path, "tuned_tables": tables, "tuned_problem": problem}


# Text.


def as_text(found: dict[str, Any]) -> str:
    """Format the result of `examine` as aligned lines, with the remedies last."""
    own, machine, threads = found["hf_quant"], found["machine"], found["machine"]["threads"]
    too_many = threads is not None and threads > (machine["cores"] or threads)
    packages = {name: _package_line(package) for name, package in found["packages"].items()}
    sections = {
        "packages": {"hf_quant": f"{own['version']}, in {own['path']}", "Python": machine["python"], **packages},
        "machine": {
            "OS": machine["os"],
            "CPU": f"{machine['cpu']}, {machine['cores']} core{'' if machine['cores'] == 1 else 's'}",
            "features": " ".join(machine["features"]) or "unknown",
            "threads of torch": _UNUSABLE if threads is None else f"{threads}{_TOO_MANY if too_many else ''}",
        },
        "native CPU kernels": _native_lines(found["native"]),
        "GPUs": _gpu_lines(found["gpu"]),
        "settings": {"start-up hook": _hook_line(found["hook"]), **_settings_lines(found)},
    }
    width = max(len(label) for lines in sections.values() for label in lines)
    blocks = []
    for title, lines in sections.items():
        blocks.append("\n".join([title, *(f"  {label.ljust(width)}  {line}" for label, line in lines.items())]))
    return "\n\n".join(blocks)


def _package_line(package: dict[str, Any]) -> str:
    if package["problem"] is not None:
        return f"{package['version']}: {package['problem']}" if package["version"] else package["problem"]
    return package["version"] or "not installed (optional)"


def _native_lines(native: dict[str, Any] | None) -> dict[str, str]:
    if native is None:
        return {"in use": _UNUSABLE}
    others = ", ".join(name for name in native["available"] if name != native["active"]) or "none"
    if native["active"] is None:
        return {"in use": f"none: {native['why_not']}", "available": others, "to do": native["to_do"]}
    chosen = f", chosen by {_VARIABLE}" if native["environment"] else ""
    shared, pages = native["shares_threads_of_torch"], native["huge_pages"]
    return {
        "in use": native["active"] + (", with bf16 dot products" if native["has_bf16_dot"] else "") + chosen,
        "others": others,
        "huge pages": f"{pages >> 20} MiB, for weights" if pages else "none: turned off, or not on this system",
        "threads": "those of torch's OpenMP pool" if shared else "their own: no OpenMP runtime of torch was found",
    }


def _gpu_lines(gpu: dict[str, Any] | None) -> dict[str, str]:
    if gpu is None:
        return {"devices": _UNUSABLE}
    if not gpu["devices"]:
        return {"devices": f"none: {gpu['why_none']}"}
    lines = {}
    for device in gpu["devices"]:
        capability = device["compute_capability"]
        kind = device["target"] if capability is None else f"compute capability {capability}"
        kernels = f"no Triton kernels: {device['why_not']}" if device["why_not"] else f"table {device['table']}"
        lines[device["device"]] = f"{device['name']}, {device['memory'] / 1e9:.1f} GB, {kind}; {kernels}"
    return lines


def _hook_line(hook: dict[str, bool]) -> str:
    if hook["active"]:
        return "installed: checkpoints load without `import hf_quant`"
    why = f"turned off by {_AUTOLOAD}={os.environ.get(_AUTOLOAD)}" if hook["installed"] else "not installed"
    return f"{why}: checkpoints load after `import hf_quant` only"


def _settings_lines(found: dict[str, Any]) -> dict[str, str]:
    settings = found["settings"]
    if settings is None:
        return {}
    limit, path, tables = settings["prepack_limit"], settings["tuned_path"], settings["tuned_tables"]
    size = "no limit" if limit is None else f"{limit / 1e9:.2f} GB"
    kind = "on the CPU" if found["native"]["active"] is None else "that the native kernels do not take"
    tuned = "; ".join(f"{target}: {', '.join(names)}" for target, names in tables.items())
    return {
        "prepack limit": f"{size}, for copies of weights {kind}",
        "tuned table": settings["tuned_problem"] or (f"{path} ({tuned})" if tuned else f"none at {path}"),
    }
