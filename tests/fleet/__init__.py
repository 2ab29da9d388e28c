"""Thousands of agents against the whole product: `make fleet N=5000 SCENARIO=power-return`, `python -m tests.fleet -h`.

`hosts` are the agents, in a process of their own; `installation` is the product and what is seen of it; `scenarios` say
what happens to both; `verdict` compares at the end; `view` shows it while it runs.
"""
