"""The report page and the charts of a sweep.

It imports study and runs. frames, api and commands import it.
"""
