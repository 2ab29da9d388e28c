"""Run thousands of agents against the product: `make fleet N=5000 SCENARIO=power-return`, `python -m tests.fleet -h`.

`hosts` are the agents, in a separate process; `installation` runs the product and takes snapshots of it; `scenarios`
define what happens to both; `verdict` judges the end; `view` shows the snapshots while a scenario runs.
"""
