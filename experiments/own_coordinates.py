"""A control of training together: each client is taught by the coordinates of its own kernel, without the others."""

from dataclasses import replace

from hetero_ssfl.methods import Broadcast, HeteroSSFL, ServerState


class OwnCoordinates(HeteroSSFL):
    """Hetero-SSFL in which the mean kernel that a client gets is its own of the last round."""

    name = "own-coordinates"

    def broadcast(self, state: ServerState, client: str) -> Broadcast:
        if client not in state.clients:  # at the opening
            return super().broadcast(state, client)
        own = replace(state, clients={client: state.clients[client]})
        mean = self.mean_kernel(state, own, [client])
        assert mean.coordinates is not None
        return Broadcast(state.round + 1, {"coordinates": mean.coordinates})
