"""What could a curious server learn? Attacks on the clients of a finished run, from what its server has.

views.py        what the attacker sees of a client
class_mix.py    which classes does a client hold?
stealing.py     an encoder whose kernel on the RAD is the client's
membership.py   was an image in a client's training data?
scene.py        the run under attack
victim.py       how close the attacker comes to a client's own encoder
measure.py      all attacks on a run, and what the attacker knows
tables.py       the section of a report

These are attacks, not bounds: a better attack may find more.
"""
