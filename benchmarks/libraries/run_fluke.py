"""Time of a round in fluke, of FedAvg or another of its methods.

    python benchmarks/libraries/run_fluke.py CASE.npz --rounds 5 [--method ditto]

Its name is not that of the package, so that it does not hide it.
"""

# ruff: noqa: E402

from copy import deepcopy
from importlib.metadata import version

import torch
import work
from torch.optim.optimizer import register_optimizer_step_post_hook


def allow_torchvision() -> None:
    """Declares the operators that torchvision wants to find, where its build does not fit that of torch.

    PyPI's torchvision is built for torch with CUDA: with the CPU build its own operators do not load, and
    its import stops. fluke takes only datasets and nets from it, which need none of them.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        operators = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        kept.append(operators)


kept: list[torch.library.Library] = []  # an operator goes away with its library
allow_torchvision()

from fluke import FlukeENV
from fluke.algorithms import CentralizedFL
from fluke.algorithms.ditto import Ditto, DittoClient
from fluke.algorithms.fedala import FedALA, FedALAClient
from fluke.algorithms.fedavg import FedAVG
from fluke.algorithms.fedrod import FedROD, FedRODClient
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.evaluation import ClassificationEval
from fluke.nets import EncoderHeadNet
from fluke.server import Server
from fluke.utils import FederationObserver
from torchmetrics.classification import MulticlassAccuracy

METHODS: dict[str, tuple[type[CentralizedFL], type[Client], int]] = {  # and how many optimizers step on a batch
    "fedavg": (FedAVG, Client, 1),
    "fedala": (FedALA, FedALAClient, 1),
    "ditto": (Ditto, DittoClient, 2),
    "fedrod": (FedROD, FedRODClient, 2),
}


class CountingEval(ClassificationEval):
    """fluke's evaluator with accuracy alone (it has seven metrics), that counts the rows it is given."""

    evaluated = 0

    def evaluate(self, round, model, eval_data_loader, **more) -> dict[str, float]:
        found = super().evaluate(round, model, eval_data_loader, **more)
        self.evaluated += eval_data_loader.size if found else 0
        return found


class Timer(FederationObserver):
    """Notes when a round ends, and what was done until then."""

    def __init__(self, clock: work.Clock, evaluator: CountingEval) -> None:
        self.clock, self.evaluator = clock, evaluator

    def end_round(self, round: int) -> None:
        self.clock.end_round(Steps.made, self.evaluator.evaluated)


class Steps:
    """The steps that optimizers made in this process, also those of fluke's own."""

    made = 0


def count_step(*_: object) -> None:
    Steps.made += 1


def loader(rows: work.Rows, case: work.Case, batch: int, shuffle: bool) -> FastDataLoader | None:
    """fluke's own loader of tensors in memory; a batch of one row is trained on, too."""
    if not len(rows[1]):
        return None
    return FastDataLoader(*rows, num_labels=case.n_classes, batch_size=batch, shuffle=shuffle, skip_singleton=False)


def in_two_parts(model: work.Mlp | work.Cnn4) -> EncoderHeadNet:
    """The model as fluke wants it where a method treats the last layer apart."""
    head, body = model.head, deepcopy(model)
    body.head = torch.nn.Identity()
    return EncoderHeadNet(body, head)


def main() -> None:
    given = work.arguments(__doc__.splitlines()[0], workers=1, methods=list(METHODS))
    torch.set_num_threads(given.threads)
    case, clock = work.read_case(given.case), work.Clock()
    federation_of, client_of, n_optimizers = METHODS[given.method]
    model = in_two_parts(work.make_model(case)) if given.method in ("fedala", "fedrod") else work.make_model(case)
    accuracy = MulticlassAccuracy(case.n_classes, average="micro", validate_args=False)
    evaluator = CountingEval(eval_every=1, n_classes=case.n_classes, accuracy=accuracy)
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device("cpu")
    environment.set_evaluator(evaluator)
    central = given.central and case.evaluate
    environment.set_eval_cfg(pre_fit=case.evaluate and not central, post_fit=False, locals=False, server=central)
    optimizer = OptimizerConfigurator({"name": torch.optim.SGD, "lr": case.lr})
    register_optimizer_step_post_hook(count_step)
    clients = [
        client_of(
            index=index,
            train_set=loader(train, case, case.batch, shuffle=True),
            test_set=loader(test, case, work.EVALUATION_BATCH, shuffle=False),
            optimizer_cfg=optimizer,
            loss_fn=torch.nn.CrossEntropyLoss(),
            local_epochs=case.epochs,
            **({"model": deepcopy(model), "tau": case.epochs} if client_of is DittoClient else {}),
        )
        for index, (train, test) in enumerate(zip(case.train, case.test, strict=True))
    ]
    all_test = loader(work.all_test(case), case, work.EVALUATION_BATCH, shuffle=False)
    server = Server(model=model, test_set=all_test, clients=clients, weighted=True)
    federation = federation_of(len(clients), None, {}, clients=clients, server=server)
    federation.set_callbacks([Timer(clock, evaluator)])
    federation.run(n_rounds=given.rounds + 1, eligible_perc=1.0)
    work.report("fluke-fl", version("fluke-fl"), given, case, clock, server.model, workers=1, n_optimizers=n_optimizers)


if __name__ == "__main__":
    main()
