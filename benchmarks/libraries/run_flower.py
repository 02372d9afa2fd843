"""Time of a round of FedAvg in Flower, simulated with its Ray backend.

    python benchmarks/libraries/run_flower.py CASE.npz --rounds 5

The clients are in flower_client.py, which the actors import.
"""

import os

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}  # nothing is sent while time is taken

from collections.abc import Iterable

import flower_client
import flwr
import torch
import work
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation


def summed(replies: list[RecordDict], _weight: str) -> MetricRecord:
    """Sums of the clients' numbers, where the strategy would average them."""
    records = [reply["metrics"] for reply in replies]
    return MetricRecord({key: sum(record[key] for record in records) for key in records[0]})


class TimedFedAvg(FedAvg):
    """FedAvg that notes when a round ends, and what its clients did."""

    def __init__(self, clock: work.Clock, central: bool, n_clients: int, evaluated_by_clients: bool) -> None:
        super().__init__(
            fraction_evaluate=float(evaluated_by_clients),
            min_train_nodes=n_clients,
            min_evaluate_nodes=n_clients if evaluated_by_clients else 0,
            min_available_nodes=n_clients,
            train_metrics_aggr_fn=summed,
            evaluate_metrics_aggr_fn=summed,
        )
        self.clock, self.central = clock, central
        self.steps = self.evaluated = 0

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrays, metrics = super().aggregate_train(server_round, replies)
        self.steps += int(metrics["steps"])
        return arrays, metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        metrics = super().aggregate_evaluate(server_round, replies)
        self.evaluated += int(metrics["num-examples"]) if metrics else 0
        if not self.central:
            self.clock.end_round(self.steps, self.evaluated)
        return metrics


def main() -> None:
    given = work.arguments(__doc__.splitlines()[0], workers=2)
    torch.set_num_threads(given.threads)
    case = work.read_case(given.case)
    model, clock, central = work.make_model(case), work.Clock(), given.central and case.evaluate
    strategy = TimedFedAvg(clock, central, len(case.train), case.evaluate and not central)
    test = work.all_test(case)
    server = ServerApp()

    def evaluate_all(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        metrics = MetricRecord({"right": work.count_right(model, test)})
        if server_round:  # the first call is for the weights before any round
            strategy.evaluated += len(test[1])
            clock.end_round(strategy.steps, strategy.evaluated)
        return metrics

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        result = strategy.start(
            grid,
            initial_arrays=ArrayRecord(model.state_dict()),
            num_rounds=given.rounds + 1,
            evaluate_fn=evaluate_all if central else None,
        )
        model.load_state_dict(result.arrays.to_torch_state_dict())

    run_simulation(
        server_app=server,
        client_app=flower_client.make_client(given.case, given.threads),
        num_supernodes=len(case.train),
        backend_config={
            "init_args": {"num_cpus": given.workers},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    work.report("flwr", flwr.__version__, given, case, clock, model, given.workers)


if __name__ == "__main__":
    main()
