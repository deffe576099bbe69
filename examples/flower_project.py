"""Hetero-SSFL in your own Flower project: the ServerApp uses another Strategy, the ClientApp adds one loss term.

Two nodes with different networks classify digits, five classes each. Besides its own loss, each node minimises 1 - CKA
between its kernel on 64 shared images and the mean kernel; in the end both have similar kernels.

    python examples/flower_project.py --mu 1      (and 0, to compare)

It needs Flower's Simulation Engine: `pip install 'hetero-ssfl[simulation]'`. The same two apps can be started with
`flwr run` on SuperNodes.
"""

import argparse

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from sklearn.datasets import load_digits
from torch import Tensor, nn

from hetero_ssfl import AlignmentConfig, HeteroSSFLStrategy, alignment_distance, contribution, mutual_cka

ALIGNMENT = AlignmentConfig(distance="cka")
NODES, SHARED, ROUNDS, EPOCHS = 2, 64, 4, 5


def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)


def encoder(node: int) -> nn.Sequential:
    """Return the network of a node. Each node has its own architecture, which is never sent."""
    torch.manual_seed(node)
    if node == 0:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 24))
    return nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 36, 32))


client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    node, mu = int(context.node_config["partition-id"]), float(str(message.content.config_records["config"]["mu"]))
    images, labels = digits()
    shared, own = images[:SHARED], torch.isin(labels[SHARED:], torch.arange(5) + 5 * node)
    images, labels = images[SHARED:][own], labels[SHARED:][own]
    network = encoder(node)
    head = nn.Linear(network(shared[:1]).shape[1], 10)
    model = nn.ModuleList([network, head])
    if "model" in context.state:  # Flower keeps the state on the node
        model.load_state_dict(context.state.array_records["model"].to_torch_state_dict())
    received = message.content.array_records["arrays"].to_torch_state_dict()  # empty in the first round
    wanted = received.get("factor")
    optimiser = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(images)).split(64):
            loss = F.cross_entropy(head(network(images[rows])), labels[rows])
            if wanted is not None and mu:
                loss = loss + mu * alignment_distance(network(shared), wanted, ALIGNMENT)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    context.state["model"] = ArrayRecord(model.state_dict())
    with torch.no_grad():
        factor = contribution(network(shared), ALIGNMENT).arrays["factor"]
    figures = MetricRecord({"num-examples": len(images), "loss": float(loss.detach())})
    return Message(RecordDict({"arrays": ArrayRecord({"factor": factor}), "metrics": figures}), reply_to=message)


def server_app(mu: float) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = HeteroSSFLStrategy(SHARED, ALIGNMENT, fraction_evaluate=0.0)
        strategy.start(grid, ArrayRecord(), ROUNDS, train_config=ConfigRecord({"mu": mu}))
        kernels = [sent["factor"] for sent in strategy.state.clients.values()]
        print(f"mutual CKA after {ROUNDS} rounds with mu = {mu:g}: {float(mutual_cka(kernels)[0, 1]):.3f}")

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mu", type=float, default=1.0)
    run_simulation(
        server_app(parser.parse_args().mu), client_app, NODES, backend_config={"client_resources": {"num_cpus": 1}}
    )
