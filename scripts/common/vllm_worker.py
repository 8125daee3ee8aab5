"""vLLM for `common.vllm_engine`: run in the environment that `make engines` makes.

    build/engines/bin/python scripts/common/vllm_worker.py CHECKPOINT BATCH_SIZE CONTEXT

Reads tasks line by line, {"prompts": [[id, ...], ...], "new_tokens": n}, and writes a line with the next token of
every prompt as soon as all of them are known. The first line, "ready", comes once the model is loaded.
"""

import json
import os
import sys

from vllm import LLM, SamplingParams


def main() -> None:
    """Serve tasks until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints, too
    checkpoint, batch_size, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    llm = LLM(
        model=checkpoint,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=context,
        max_num_seqs=batch_size,
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
    )
    print("ready", file=answers, flush=True)
    engine = llm.llm_engine
    for number, line in enumerate(sys.stdin):
        task = json.loads(line)
        count = task["new_tokens"]
        options = SamplingParams(temperature=0, min_tokens=count, max_tokens=count, ignore_eos=True, detokenize=False)
        names = [f"{number}-{row}" for row in range(len(task["prompts"]))]
        for name, ids in zip(names, task["prompts"]):
            engine.add_request(name, {"prompt_token_ids": ids}, options)
        found: dict[str, list[int]] = {name: [] for name in names}
        written = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                found[output.request_id] = list(output.outputs[0].token_ids)
            while written < min(map(len, found.values())):
                print(json.dumps([found[name][written] for name in names]), file=answers, flush=True)
                written += 1


if __name__ == "__main__":
    main()
