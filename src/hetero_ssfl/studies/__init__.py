"""Studies of many runs, or of one run under a magnifying glass. Each leaves tables, and needs nothing below it.

grid.py         the one runner of many runs
demo.py         `make demo`: five encoders, alone and together
sweep.py        one config over a grid of settings
paper/          the paper's tables
theory/         the paper's convergence bound, and its constants measured on a run
audit/          attacks on the clients of a run, from what their server has
kernel_runs.py  what theory and audit need of a run
describe.py     a data source and how it is split
"""
