"""The paper's bound on the change of the loss in a round (bound.py), measured on a run (measure.py)."""
