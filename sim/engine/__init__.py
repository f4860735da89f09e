"""The engine: queues, KV block accounting, the loop that calls the policy and carries out its plans, and fleets.

Standard library and Python 3.9, because live runs use it too. Exceptions: `world` and `presence` need SimPy, and so do
`simulated`, `fleet` and `lock_step`, which import them. It imports `core` and `routers` only. The packages `runs`,
`testing` and `calibrate` import it.
"""
