"""The only code that knows the hosts. Each adapter registers itself by `register()` when its host is loaded."""

# Before anything else of this package: see `hf_quant._boot`.
import transformers.quantizers.auto  # noqa: F401
