"""The paper's four tables, cell by cell, at four scales.

cells.toml, cells.py   the settings of each cell, and the accuracy that the paper reports
running.py             run or resume what is missing, one run folder per cell and seed; repeat a kept cell
scores.py              what a table needs of a finished run; these scores as small files
dry_run.py             what the cells will cost
printing.py            the tables for people
"""
