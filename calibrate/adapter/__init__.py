"""A servesim policy inside MindSpore llm-serving.

Standard library, Python 3.9. It imports core, engine and policies; nothing imports it.
"""
