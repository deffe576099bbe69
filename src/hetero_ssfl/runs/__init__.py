"""The run folder: everything a run leaves on disk, in files that survive a crash.

folder.py       the run folder itself: its files, creating and opening it
states.py       the states of one participant, by round
events.py       what happens in a run, one type per kind; the only reader and writer of their JSON
log.py          events.jsonl with a digest that the commit point contains
files.py        single files that survive a crash: JSON, tensors, logs, locks
sealing.py      digests in JSON, TOML and tensor files
schema.py       what the files must say, checked because a folder may come from others
environment.py  versions, machine, commit and command of a run
check.py        check every file of a run folder
machine.py      check this machine: what is installed, what is missing
"""
