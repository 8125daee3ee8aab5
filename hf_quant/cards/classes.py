"""Classes of models of diffusers by their names, as configs and cards have them."""

from importlib import import_module
from pkgutil import iter_modules

from torch import nn


def diffusers_class(name: object) -> tuple[str, type[nn.Module]] | None:
    """Return (the module to import it from, the class) of a model of diffusers; None if diffusers has no such model.

    A model of one pipeline alone, such as `LTX2TextConnectors`, is a name of the package of that pipeline only. Some
    of these are models in the form of transformers: Kolors's `ChatGLMModel`.
    """
    from transformers import PreTrainedModel

    host = import_module("diffusers")
    packages = (f"diffusers.pipelines.{found.name}" for found in iter_modules(host.pipelines.__path__) if found.ispkg)
    for module in ("diffusers", *packages) if isinstance(name, str) else ():
        package = import_module(module)
        # The packages are lazy: to ask for an attribute imports files, and fails for some names that no file has.
        cls = getattr(package, name) if name in dir(package) else None
        if isinstance(cls, type) and issubclass(cls, (host.ModelMixin, PreTrainedModel)):
            return module, cls
    return None
