"""The kbk (kernel by kernel) backend: MindFormers' Llama on MindSpore, on Ascend or the CPU.

Only this folder imports mindspore and mindformers. It imports device and core; the worker loads it by name.
"""
