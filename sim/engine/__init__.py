"""The engine: queues, KV block accounting, the loop that calls the policy and carries out its plans, and fast-forward.

Standard library and Python 3.9, because live runs use it too. Exception: `simulated` needs SimPy. It imports `core`
only. The packages `runs`, `testing` and `calibrate` import it.
"""
