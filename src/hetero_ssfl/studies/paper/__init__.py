"""The paper's four tables, cell by cell, at four scales.

cells.py       the settings of each cell, and the paper's figure
running.py     run or resume what is missing, one run folder per cell and seed
scores.py      what a table needs of a finished run
kept.py        these figures as small files, and a check that they can be repeated
printing.py    the tables for people
"""
