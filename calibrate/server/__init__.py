"""`sim serve`: the live driver behind HTTP, with the API of OpenAI and of llm-serving.

`engine_process` runs in the worker (Python 3.9). It imports live, client, device, config and traces; only commands
imports it.
"""
