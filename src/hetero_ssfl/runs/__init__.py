"""The run folder: everything a run leaves on disk, in files that survive a crash.

folder.py       the run folder itself: its files, creating and opening it
states.py       the states of one participant, by round
events.py       what happens in a run, one type per kind; events.jsonl, whose digest the commit point contains
files.py        single files that survive a crash: JSON, text, tensors and locks, with digests
schema.py       what the files must say, checked because a folder may come from others
environment.py  this machine: versions, commit and command of a run; what is installed and what is missing
check.py        check every file of a run folder
"""
