"""What could a curious server learn? Attacks on the clients of a finished run, from what its server has.

views.py    what the attacker sees of a client
attacks.py  which classes does a client hold? an encoder like the client's; was an image in its training data?
scene.py    the run under attack, and how close the attacker comes to a client's own encoder
measure.py  all attacks on a run, and what the attacker knows
tables.py   the section of a report

These are attacks, not bounds: a better attack may find more.
"""
