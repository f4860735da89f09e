"""One run: simulate a scenario, compute its metrics, and write its files, logs and timeline.

It imports config, costs and engine. study, report, frames, api, commands and calibrate import it.
"""
