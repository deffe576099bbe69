"""What hides a client's contribution. Nothing here knows Flower or a method.

sums/          secure sums: keys, shares, masks, and both sides of the protocol as functions without networking
noise.py       Gaussian noise for vectors of bounded norm
accountant.py  the privacy budget that noise costs
"""
