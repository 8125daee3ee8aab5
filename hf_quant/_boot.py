"""Register hf_quant with a host library as soon as that library's list of quantizers is loaded.

A quantized checkpoint must load where hf_quant is installed but not imported. Neither transformers nor diffusers
looks for plugins; torch does: `import torch` calls the entry points of the group `torch.backends`, here `boot`. That
happens while torch is only half imported, in processes that may never touch a quantized model, so `boot` does nothing
but put a finder into `sys.meta_path`. When `transformers.quantizers.auto` or `diffusers.quantizers.auto` has been
executed, the finder imports the adapter of that host and calls its `register()`. torch's own switch for such entry
points, TORCH_DEVICE_BACKEND_AUTOLOAD=0, keeps torch from calling `boot`.

What this asks of the package:

- `hf_quant/__init__.py` runs inside `import torch`, too (Python imports a package before its submodules). It imports
  nothing but the standard library, `_boot` and `_version`, resolves the public names by `__getattr__` (PEP 562) and
  ends with `boot()`.
- Each adapter in `_ADAPTERS` has an idempotent `register() -> None` and ends by calling it: when somebody imports the
  adapter first, the host is loaded in the middle of the adapter, and only that last line can register. `kernels`,
  which registers its ops when it is imported, needs none.
- `hf_quant/integrations/__init__.py` imports `transformers.quantizers.auto` before anything else, so that no other
  module in there can be half imported at the moment of registration.
- The modules that adapters import must not import, at their top, a module of transformers that loads
  `transformers.quantizers.auto` or may be loading it (`modeling_utils`, `from transformers import PreTrainedModel`,
  `from transformers.quantizers import`); `quantizers.base`, `utils.quantization_config`, `cache_utils`,
  `core_model_loading`, `pytorch_utils` are fine.
"""

import sys
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType


_ADAPTERS = {
    "transformers.quantizers.auto": "hf_quant.integrations.transformers.quantizer",
    "transformers.modeling_utils": "hf_quant.integrations.transformers.saving",
    "diffusers.quantizers.auto": "hf_quant.integrations.diffusers.quantizer",
    "diffusers.hooks.faster_cache": "hf_quant.integrations.diffusers.faster_cache",
    "diffusers.quantizers.pipe_quant_config": "hf_quant.integrations.diffusers.parts",
    "diffusers.models.modeling_utils": "hf_quant.integrations.diffusers.saving",
    "diffusers.hooks._helpers": "hf_quant.integrations.diffusers.skipping",
    "diffusers.loaders.lora_pipeline": "hf_quant.integrations.diffusers.lora",
    "diffusers.models.attention_dispatch": "hf_quant.integrations.diffusers.attention",
    "diffusers.training_utils": "hf_quant.integrations.diffusers.averages",
    "diffusers.pipelines.free_noise_utils": "hf_quant.integrations.diffusers.free_noise",
    "diffusers.pipelines.pipeline_utils": "hf_quant.integrations.diffusers.pipelines",
    "peft.tuners.tuners_utils": "hf_quant.integrations.peft",
    "peft.peft_model": "hf_quant.integrations.peft",
    "peft.mixed_model": "hf_quant.integrations.peft",
    # torch's readers of saved programs (torch.export, AOTInductor), whose graphs call our ops.
    "torch._export.serde.serialize": "hf_quant._lazy_ops",
    "torch._inductor.package.package": "hf_quant.kernels",
}
# {old name of a module: its name}: pickles of whole models name the classes of these modules.
_MOVED = {
    "hf_quant.graphs": "hf_quant.integrations.transformers.graphs.capture",
    "hf_quant.integrations.conv1d": "hf_quant.integrations.transformers.conv1d",
    "hf_quant.integrations.diffusers_attention": "hf_quant.integrations.diffusers.attention",
    "hf_quant.integrations.diffusers_fused": "hf_quant.integrations.diffusers.fused_norms",
    "hf_quant.integrations.generation": "hf_quant.integrations.transformers.generation",
    "hf_quant.modules._rows": "hf_quant.modules.inputs.shared_rows",
    "hf_quant.modules.fused": "hf_quant.modules.inputs.shared_product",
}


def boot() -> None:
    """Register with the hosts that are loaded, and watch for those that are not. Never raises; may be called again."""
    if not any(isinstance(finder, _HostFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _HostFinder())
    for host in _ADAPTERS:
        module = sys.modules.get(host)
        if module is None:
            continue
        if _is_loading(host) or _is_loading("torch"):
            module.__class__ = _AwaitedModule
        else:
            _register(host)


def submodule(package: str, name: str) -> ModuleType:
    """Import a public submodule at its first use as an attribute of its package.

    Raises:
        AttributeError: there is none of this name.
    """
    from importlib.util import find_spec

    if name.startswith("_") or "." in name or find_spec(f"{package}.{name}") is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return import_module(f"{package}.{name}")


class _HostFinder:
    """A finder that registers an adapter after the other finders' loader has executed the host's module."""

    def find_spec(self, name: str, path=None, target=None):
        """Return the other finders' spec of a module in `_ADAPTERS`, a spec for `_MOVED`, None for other modules."""
        if name in _MOVED:
            return ModuleSpec(name, _MovedLoader())
        if name not in _ADAPTERS:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                _call_after_exec(spec.loader, name)
                return spec
        return None


class _MovedLoader:
    """Load a stand-in for a module in `_MOVED`: its attributes are looked up in the renamed module."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Let the import system make an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        """Set the module-level `__getattr__` of PEP 562."""
        module.__getattr__ = partial(getattr, import_module(_MOVED[module.__name__]))


def _call_after_exec(loader, host: str) -> None:
    """Make `loader.exec_module` register once, and restore it (inspect and pickle need the host's own loader)."""
    exec_module = loader.exec_module

    def exec_and_register(module: ModuleType) -> None:
        del loader.exec_module  # the instance attribute set below
        exec_module(module)
        if _is_loading("torch"):  # another plugin of torch imports the host while torch starts
            module.__class__ = _AwaitedModule
        else:
            _register(host)

    loader.exec_module = exec_and_register


class _AwaitedModule(ModuleType):
    """A host's quantizer list that was half executed when `boot` ran, because it imported torch itself.

    No finder sees the end of that import; but whoever wants the list must read an attribute of the module, and the
    first read after the end registers.
    """

    def __getattribute__(self, name: str):
        if not name.startswith("__") and not (_is_loading(self.__name__) or _is_loading("torch")):
            self.__class__ = ModuleType
            _register(self.__name__)
        return ModuleType.__getattribute__(self, name)


def _is_loading(name: str) -> bool:
    """Return True while the module is being executed (the import system's own flag)."""
    return getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False)


def _register(host: str) -> None:
    """Import the host's adapter and call its `register`; a failure is one warning and never breaks the host."""
    try:
        adapter = import_module(_ADAPTERS[host])
        if not _is_loading(adapter.__name__) and hasattr(adapter, "register"):
            adapter.register()
    # A broken or half removed installation can raise anything, and this runs inside somebody else's import.
    except Exception as error:  # noqa: BLE001
        # logging, not warnings: under `python -W error` a warning would be raised here.
        import logging

        logging.getLogger("hf_quant").warning(
            "hf_quant could not register with %s, so checkpoints quantized by it will not load in this process: "
            "%s: %s. Reinstall hf-quant, or uninstall it.",
            host.partition(".")[0],
            type(error).__name__,
            error,
        )
