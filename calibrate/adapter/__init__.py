"""Code that runs inside an engine: a servesim policy in MindSpore llm-serving or vLLM V1, the step recorder of vLLM.

Standard library, Python 3.9. It imports core, engine and policies; nothing imports it.
"""
