"""Secure sums: the server learns the sum of the clients' vectors and no summand.

The protocol is that of Bonawitz et al. (CCS 2017), with the sparse graph of Bell et al. (CCS 2020) for more than 30
participants, and a round in which all clients agree on who takes part. It has five phases:

1. keys     each client advertises two public keys, made for this sum only;
2. shares   each client splits its mask secrets into shares, and encrypts one for each neighbour;
3. masked   each client sends its vector plus a self mask plus or minus one mask per neighbour;
4. confirm  survivors tell each other, authenticated, which lists of senders and survivors the server told them;
5. unmask   a client with which enough others agree reveals shares of the self masks of those that answered, and of the
            pairwise keys of those that did not: never both of one client.

client.py and server.py hold one side each, as plain functions and data without any networking; rules.py the numbers of
participants; keys.py, shamir.py and vectors.py the cryptography and the arithmetic.
"""
