"""`sim explore`: a local page with the settings of a scenario as controls and its result as charts.

`api` and `commands` may import it.
"""
