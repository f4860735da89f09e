"""All reading of user files and all writing.

Text, JSON and YAML are read here and their sections checked, with one-line errors; files are written whole or not at
all. It imports core only; every package above core may import it.
"""
