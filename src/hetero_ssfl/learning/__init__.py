"""One client without a network: its encoder, its losses, its training and the probes of what it learned.

encoders/       encoders of any architecture, by name
learner.py      the three networks of a client: online, predictor, target
losses/         the local self-supervised losses, one file each
optimisers.py   optimisers by name
training.py     the one training loop
features.py     features of a frozen encoder, and nearest neighbours
probes.py       linear and nearest-neighbour probes on frozen features
floors.py       features that nobody trained, which an encoder should beat
alignment.py    the alignment term of a client's loss
finetune.py     fine-tuning with few labels
forward_cost.py what a forward pass costs, counted without computing it
"""
