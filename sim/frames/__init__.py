"""Results of the Python API as pandas frames, with charts and HTML for notebooks.

It imports report and the packages below it, and parts of calibrate. Only api imports it.
"""
