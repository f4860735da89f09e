"""The kbk backend: MindFormers' Llama on MindSpore, kernel by kernel, on Ascend or the CPU.

Only this folder imports mindspore and mindformers. It imports device and core; the worker loads it by name.
"""
