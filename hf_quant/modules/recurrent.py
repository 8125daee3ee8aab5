"""`QuantLSTM`, `QuantGRU`, `QuantRNN`: torch's recurrent layers with packed weights, which each call dequantizes."""

from typing import Any

from torch import Tensor, nn

from hf_quant.modules._base import QuantizedModule
from hf_quant.modules._registry import register_module


class _QuantRecurrent(QuantizedModule):
    """Weight-only, one matrix for each layer, direction and gate set: `qdata_weight_ih_l0`, ...

    torch's forward takes all weights as one list, which is made of dequantized ones at each call.
    """

    kind = "recurrent"

    @classmethod
    def weight_names_of(cls, module: nn.Module) -> tuple[str, ...]:
        return tuple(name for name in module._parameters if name.startswith("weight_"))

    @property
    def _flat_weights(self) -> list[Tensor | None]:
        names = self._flat_weights_names
        return [self.dequantize_weight(n) if n in self.weight_names else self._parameters.get(n) for n in names]

    @_flat_weights.setter
    def _flat_weights(self, value: list[Tensor | None]) -> None:
        """torch keeps its list of the parameters here."""

    def converted(self) -> None:
        self.__dict__.pop("_flat_weights", None)
        self._init_flat_weights()

    def parameters_changed(self) -> None:
        self._init_flat_weights()

    @classmethod
    def restored(cls, module: nn.Module) -> None:
        module._init_flat_weights()

    def _init_flat_weights(self) -> None:
        """Forget torch's weak references to the parameters, which cannot be pickled."""
        self.__dict__["_flat_weight_refs"] = []

    def _update_flat_weights(self) -> None:
        """Do nothing: torch's list is made anew at each call."""

    def flatten_parameters(self) -> None:
        """Do nothing: the weights are no parameters."""

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("weight_names", ()):
            return self._parameters.get(name) if name in self._parameters else self.proxy_class(self, name)
        return super().__getattr__(name)


class QuantLSTM(_QuantRecurrent, nn.LSTM):
    """nn.LSTM, weight-only; differentiable in its inputs and biases."""


class QuantGRU(_QuantRecurrent, nn.GRU):
    """nn.GRU, weight-only; differentiable in its inputs and biases."""


class QuantRNN(_QuantRecurrent, nn.RNN):
    """nn.RNN, weight-only; differentiable in its inputs and biases."""


register_module(nn.LSTM, QuantLSTM)
register_module(nn.GRU, QuantGRU)
register_module(nn.RNN, QuantRNN)
