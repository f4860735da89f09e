"""Read and write files and text: user files, stored results, the terminal, and the style of charts.

Text, JSON and YAML are read and validated here, with one-line errors. A written file appears only when it is complete.
It imports core only; every package above core may import it.
"""
