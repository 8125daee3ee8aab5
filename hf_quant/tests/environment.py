"""The environment of every test process: one thread, no network, and nothing of the user's or of an earlier run.

Import it before torch, triton and huggingface_hub, which read these variables once; subprocesses inherit them.
"""

import atexit
import os
import shutil
import tempfile


# Settings of the user's that would decide what a test meets: a token that is sent along, a cache that holds an answer.
for name in [name for name in os.environ if name.startswith(("HF_HUB_", "HUGGING", "TRANSFORMERS_"))]:
    del os.environ[name]
for name in ("HF_ENDPOINT", "HF_TOKEN", "HF_TOKEN_PATH"):
    os.environ.pop(name, None)
# huggingface_hub keeps its token, its cache and notes of what it has asked the Hub in here.
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="hf-quant-tests-")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
