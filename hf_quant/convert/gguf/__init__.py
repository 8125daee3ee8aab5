"""GGUF, the files of llama.cpp and Ollama: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""
