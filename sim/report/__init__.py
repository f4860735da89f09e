"""Pictures and the report page of a sweep.

It imports study and runs. frames, api and commands import it.
"""
