"""The torch backend: a paged Llama on CUDA or the CPU.

Only this folder imports torch and triton. It imports device and core; the worker loads it by name.
"""
