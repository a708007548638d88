"""The rounds of federated.py with Flower's server and clients, in one simulation.

Flower sends the weights, runs the clients, leaves out those that fail, and averages by the number of images. Here a
client is the same as without Flower, and the server refuses answers that are not numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from federated import TROUBLE, Evaluator
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

EXAMPLES = str(Path(__file__).parent)


class Checked(FedAvg):
    """Averages the answers that are numbers."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """Averages what clients have trained."""
        good = []
        for reply in replies:
            if reply.has_error():
                print(f"round {server_round:2}: a client has failed")
            elif not np.isfinite(reply.content["arrays"].to_numpy_ndarrays()[0]).all():
                print(f"round {server_round:2}: the answer of a client is not a number: refused")
            else:
                good.append(reply)
        return super().aggregate_train(server_round, good)


def train_together(
    artifacts: Path, files: list[Path], counts: list[int], evaluator: Evaluator, rounds: int
) -> list[float]:
    """Returns the accuracy of the averaged weights, before and after every round."""
    client_app, server_app, curve = ClientApp(), ServerApp(), list[float]()

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        sys.path.insert(0, EXAMPLES)  # this runs in a process of Flower's
        from federated_client import Client

        number = int(context.node_config["partition-id"])
        (weights,) = message.content["arrays"].to_numpy_ndarrays()
        client = Client(artifacts, files[number], TROUBLE.get(number, ""))
        try:
            trained = client.train(weights, int(message.content["config"]["server-round"]))
        except SystemExit as error:
            raise RuntimeError(f"client {number}: {error}") from error
        metrics = MetricRecord({"num-examples": counts[number]})
        return Message(RecordDict({"arrays": ArrayRecord([trained]), "metrics": metrics}), reply_to=message)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        curve.append(evaluator.accuracy(arrays.to_numpy_ndarrays()[0]))
        print(f"round {server_round:2}: accuracy {curve[-1]:.1%}")
        return MetricRecord({"accuracy": curve[-1]})

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = Checked(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=len(files))
        arrays = ArrayRecord([evaluator.start])
        strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds, evaluate_fn=evaluate)

    resources = {"client_resources": {"num_cpus": 1}}
    run_simulation(server_app, client_app, num_supernodes=len(files), backend_config=resources)
    return curve
