"""The kbk (kernel by kernel) backend: MindFormers' Llama on MindSpore, on Ascend or the CPU."""
