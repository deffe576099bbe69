"""The paper's idea: compare what clients have learned through kernels on shared images (the RAD).

    factor.py        a client's kernel K_k as a factor A_k, from its representations: K_k = A_k A_k^T
    contribution.py  what a client sends, and whether a received one may be used
    mean.py          the mean kernel of all clients as a factor B, or as a sum of sketches; never an L x L matrix
    consensus.py     the mean kernel between two rounds, updated from the contributions that changed
    coordinates.py   the mean kernel as one target vector per image
    agreement.py     weights that are learned, from how much a client agrees with the others
    cka.py           similarity of two kernels, from matrices and from factors
    distance.py      the distance to the mean kernel that a client's loss contains

Mathematics only: nothing here knows a server, a client's networks or a message.
"""
