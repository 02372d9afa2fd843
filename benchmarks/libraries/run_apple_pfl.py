"""Time of a round of FedAvg in pfl (Apple's pfl-research), with its simulated backend.

    python benchmarks/libraries/run_apple_pfl.py CASE.npz --rounds 5

With more than one worker it starts itself again under torchrun, which is how pfl spreads users over processes.
"""

import os
import sys
from dataclasses import replace
from importlib.metadata import version

import torch
import work
from torch import Tensor, nn


class UserModel(nn.Module):
    """The plain model with the two functions that pfl asks for."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.plain = plain
        self.evaluated = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.plain(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, object]:
        from pfl.metrics import Weighted

        self.evaluated += len(y)
        return {"accuracy": Weighted(int((self.plain(x).argmax(1) == y).sum()), len(y))}


def start_workers(workers: int) -> None:
    """Becomes torchrun with that many processes of this program."""
    launch = ["-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    os.execv(sys.executable, [sys.executable, *launch, *sys.argv])


def play(given, case: work.Case) -> None:
    """Trains; every process plays its share of the users, and the first one reports."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.common_types import Population
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    module, clock = UserModel(work.make_model(case)), work.Clock()

    class LeanFederatedAveraging(FederatedAveraging):
        """Without pfl's evaluation of the training rows, before and after, which the others do not make."""

        def get_next_central_contexts(self, *args, **more):
            contexts, model, metrics = super().get_next_central_contexts(*args, **more)
            lean = contexts and tuple(
                replace(context, do_evaluation=False) if context.population == Population.TRAIN else context
                for context in contexts
            )
            return lean, model, metrics

    class Timer(TrainingProcessCallback):
        """Notes when a round ends, and what this process did until then."""

        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            clock.end_round(work.CountedSgd.steps, module.evaluated)
            return False, Metrics()

    def federated(parts: list[work.Rows]) -> FederatedDataset:
        users = {str(user): rows for user, rows in enumerate(parts) if len(rows[1])}
        datasets = {user: PyTorchTensorDataset(rows, user_id=user) for user, rows in users.items()}
        sampler = get_user_sampler("minimize_reuse", list(users))
        return FederatedDataset(datasets.__getitem__, sampler, {user: len(data) for user, data in datasets.items()})

    by_clients = case.evaluate and not given.central
    callbacks: list[TrainingProcessCallback] = []
    evaluation = NNEvalHyperParams(local_batch_size=work.EVALUATION_BATCH)
    if case.evaluate and given.central:
        callbacks.append(CentralEvaluationCallback(PyTorchTensorDataset(work.all_test(case)), evaluation))
    model = PyTorchModel(module, work.CountedSgd, torch.optim.SGD(module.parameters(), lr=1.0))
    LeanFederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=given.rounds + 1,
            evaluation_frequency=1,
            train_cohort_size=len(case.train),
            val_cohort_size=sum(len(y) > 0 for _, y in case.test) if by_clients else 0,
        ),
        SimulatedBackend(federated(case.train), federated(case.test), postprocessors=[WeightByDatapoints()]),
        model,
        NNTrainHyperParams(local_batch_size=case.batch, local_num_epochs=case.epochs, local_learning_rate=case.lr),
        evaluation,
        [*callbacks, Timer()],
        send_metrics_to_platform=False,
    )
    if given.workers > 1:
        done = torch.tensor([clock.steps, clock.evaluated])
        torch.distributed.all_reduce(done)
        clock.steps, clock.evaluated = done.tolist()
    if given.workers == 1 or torch.distributed.get_rank() == 0:
        work.report("pfl", version("pfl"), given, case, clock, module.plain, given.workers)
    if given.workers > 1:
        torch.distributed.destroy_process_group()


def main() -> None:
    given = work.arguments(__doc__.splitlines()[0], workers=2)
    if given.workers > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        start_workers(given.workers)
    torch.set_num_threads(given.threads)
    play(given, work.read_case(given.case))


if __name__ == "__main__":
    main()
