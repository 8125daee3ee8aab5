"""The format of compressed-tensors, which vLLM and SGLang load: https://github.com/vllm-project/compressed-tensors."""
