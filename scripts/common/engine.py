"""`Engine`: what generates tokens outside of transformers, with the interface that `generation_speed` calls."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class Engine:
    """A causal language model in another program.

    Attributes:
        config: of the model in transformers.
        device: where prompts are made, the CPU.
    """

    def __init__(self, config: Any) -> None:
        self.config, self.device = config, torch.device("cpu")

    def can_generate(self) -> bool:
        """Generates."""
        return True

    def modules(self) -> Iterator[torch.nn.Module]:
        """No module of torch."""
        return iter(())

    def steps(self, prompts: list[list[int]], new_tokens: int) -> Iterator[list[int]]:
        """Continue prompts greedily: the next token of each prompt, `new_tokens` times."""
        raise NotImplementedError

    def generate(self, prompt: Tensor, *, streamer: Any = None, max_new_tokens: int, **options: object) -> Tensor:
        """Return the prompts [B, S] with `max_new_tokens` tokens behind each; options are those of greedy decoding."""
        found = [prompt]
        if streamer is not None:
            streamer.put(prompt)
        for tokens in self.steps(prompt.tolist(), max_new_tokens):
            found.append(torch.tensor(tokens).unsqueeze(1))
            if streamer is not None:
                streamer.put(found[-1])
        return torch.cat(found, dim=1)

    def close(self) -> None:
        """Free what the program holds."""
