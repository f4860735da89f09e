"""`sim serve`: the live driver behind HTTP, with the API of OpenAI and of llm-serving."""
