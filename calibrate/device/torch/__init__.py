"""The torch backend: a paged Llama on CUDA or the CPU."""
