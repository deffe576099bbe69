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

from .client import ClientState as ClientState
from .client import advertise as advertise
from .client import check_senders as check_senders
from .client import mask as mask
from .client import reveal as reveal
from .client import share as share
from .fixed_point import SIGNED as SIGNED
from .fixed_point import UNSIGNED as UNSIGNED
from .fixed_point import decode as decode
from .fixed_point import encode as encode
from .fixed_point import fraction_bits as fraction_bits
from .keys import PublicKeys as PublicKeys
from .keys import Sign as Sign
from .keys import Verify as Verify
from .keys import fingerprint as fingerprint
from .masks import Layout as Layout
from .masks import Vector as Vector
from .rules import MIN_PARTICIPANTS as MIN_PARTICIPANTS
from .rules import Rules as Rules
from .rules import Session as Session
from .rules import SumFailedError as SumFailedError
from .server import MaskedSum as MaskedSum
