"""Code that runs inside an engine (Python 3.9): a policy in llm-serving or vLLM V1, the step recorder of vLLM."""
