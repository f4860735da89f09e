"""The engine: queues, KV block accounting, the loop that asks the policy and carries out its plans, and fast-forward.

Standard library and Python 3.9, because it also runs next to a device; only `simulated` imports SimPy. It imports core
only; runs, testing and calibrate import it.
"""
