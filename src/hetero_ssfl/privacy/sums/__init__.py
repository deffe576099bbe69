"""Secure sums: the server learns the sum of the clients' vectors and no summand.

The protocol is that of Bonawitz et al. (CCS 2017), with the sparse graph of Bell et al. (CCS 2020) for more than 30
participants. It has four phases:

1. keys     each client advertises two public keys, made for this sum only;
2. shares   each client splits its mask secrets into shares, and encrypts one for each neighbour;
3. masked   each client sends its vector plus a self mask plus or minus one mask per neighbour;
4. unmask   survivors reveal shares of the self masks of those that answered, and of the pairwise keys of those that did
            not: never both of one client.

client.py and server.py hold one side each, as plain functions and data without any networking.
"""

from .client import ClientState, advertise, check_senders, mask, reveal, share
from .fixed_point import SIGNED, UNSIGNED, decode, encode, fraction_bits
from .keys import PublicKeys, Sign, Verify, fingerprint
from .masks import Layout, Vector
from .rules import MIN_PARTICIPANTS, Rules, Session, SumFailedError
from .server import MaskedSum

__all__ = [
    "MIN_PARTICIPANTS",
    "SIGNED",
    "UNSIGNED",
    "ClientState",
    "Layout",
    "MaskedSum",
    "PublicKeys",
    "Rules",
    "Session",
    "Sign",
    "SumFailedError",
    "Vector",
    "Verify",
    "advertise",
    "check_senders",
    "decode",
    "encode",
    "fingerprint",
    "fraction_bits",
    "mask",
    "reveal",
    "share",
]
