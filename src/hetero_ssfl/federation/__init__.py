"""A federation: who takes part, what travels, and both sides of a round. The only room that imports Flower.

start.py        the one way to start or continue a run, also with more rounds or other settings
server/         the server's side of a round: the loop, messages, who is connected, evaluation, the saved state
client/         the participant's side of a round: a ClientApp and what its process keeps
participants/   who takes part, where their images and models are, and what a node accepts
wire.py         what travels in Flower's messages, and how it is checked
engines/        worker processes and Ray, which carry messages on one machine
superlink.py    the server's side on Flower's deployment engine
strategy.py     Hetero-SSFL as a strategy for other Flower apps
logs.py         JSON lines for unattended processes
"""
