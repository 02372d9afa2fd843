"""What the tests of methods compare with: plain modules, torch.optim and a loop over batches, one client at a time.

Numbers are of double precision, so that what differs in more than the last digits is wrong.
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plures import tree
from plures.data.batches import batches_per_epoch, plan_batches
from plures.data.shard import Shard
from plures.learn.solver import Solver
from plures.learn.task import Task, build
from tests.small import shard_of

N_CLASSES = 3
BATCH = 5
LR = 0.125  # exact in any precision


class Dense(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 6)
        self.head = nn.Linear(6, N_CLASSES)

    def body(self, x: Tensor) -> Tensor:
        return torch.relu(self.hidden(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Normed(nn.Module):
    """The same with BatchNorm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, N_CLASSES)

    def body(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.hidden(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Bowl:
    """A task whose loss is half the squared distance to the mean of the rows, so that steps can be worked by hand."""

    n_classes = 1
    smallest_batch = 1

    def loss(self, params, batch):
        return (params["w"] - batch.x.mean(0)).square().sum() / 2


def bowl_at(*centre: float) -> Shard:
    """The shard of a client with two rows, both at the centre of its bowl."""
    return shard_of(Bowl(), torch.tensor([centre, centre]), torch.zeros(2, dtype=torch.long))


def solver_of(**values) -> Solver:
    return Solver(**{"batch": BATCH, "lr": LR, **values})


def task_of(make: type[nn.Module], dtype: torch.dtype = torch.float64) -> Task:
    return build(lambda: make().to(dtype), torch.zeros(4, dtype=dtype), N_CLASSES, seed=0)


def shard_for(task: Task, n: int = 17, classes: tuple[int, ...] = (0, 1, 2), round: int = 0, seed: int = 0) -> Shard:
    """A client with n rows of some classes."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.tensor(classes)[torch.randint(len(classes), (n,), generator=rng)]
    x = torch.randn(n, 4, generator=rng, dtype=task.example.dtype) + y.unsqueeze(1)
    return shard_of(task, x, y, key=seed, round=round)


def moved(params: dict[str, Tensor], seed: int, by: float = 0.5) -> dict[str, Tensor]:
    """A model some way off in every tensor; variances stay positive."""
    rng = torch.Generator().manual_seed(seed)
    noise = {name: by * torch.randn(x.shape, generator=rng, dtype=x.dtype) for name, x in params.items()}
    return {name: x * noise[name].exp() if "running_var" in name else x + noise[name] for name, x in params.items()}


def batches(shard: Shard, epochs: int = 1, steps: int | None = None, batch: int = BATCH):
    """x and y of every step, in the order in which the client meets them."""
    sizes, smallest = shard.size.reshape(1).numpy(), int(shard.smallest)
    n_steps = np.array([steps]) if steps is not None else epochs * batches_per_epoch(sizes, batch, smallest, "keep")
    made = plan_batches(
        shard.rows[None].numpy(), sizes, shard.key[None].numpy(), n_steps, batch, smallest, True, "keep"
    )
    for rows, mask in zip(made.rows, made.mask, strict=True):
        here = rows[mask.bool()]
        yield shard.x[here], shard.y[here]


def module_of(make: type[nn.Module], params: dict[str, Tensor]) -> nn.Module:
    """A module in training mode with copies of these tensors."""
    module = make().to(next(iter(params.values())).dtype)
    missing, unexpected = module.load_state_dict(params, strict=False)
    assert not unexpected and all(name.endswith("num_batches_tracked") for name in missing)
    return module.train()


def params_of(module: nn.Module) -> dict[str, Tensor]:
    state = module.state_dict().items()
    return {name: x.detach().clone() for name, x in state if not name.endswith("num_batches_tracked")}


def trained(make: type[nn.Module], params: dict[str, Tensor], steps, penalty=None, **options) -> dict[str, Tensor]:
    """The model after SGD over the given batches; `penalty(module)` is added to the loss."""
    module = module_of(make, params)
    solver = torch.optim.SGD(module.parameters(), **{"lr": LR, **options})
    for x, y in steps:
        solver.zero_grad()
        loss = F.cross_entropy(module(x), y)
        if penalty is not None:
            loss = loss + penalty(module)
        loss.backward()
        solver.step()
    return params_of(module)


def assert_same(one: tree.Tree, other: tree.Tree) -> None:
    """Every bit of two trees is the same."""
    assert tree.names(one) == tree.names(other)
    for name, a, b in zip(tree.names(one), tree.leaves(one), tree.leaves(other), strict=True):
        assert torch.equal(a, b), name


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """The same up to rounding, for the precision at hand."""
    precise = all(x.dtype == torch.float64 for x in one.values())
    rtol, atol = (1e-7, 1e-9) if precise else (1e-5, 2e-6)
    torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def differs(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether every tensor of two models is far from the other's."""
    return all(float((one[name] - other[name]).abs().max()) > 1e-4 for name in one)


def statistics(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return tree.keep(params, tree.is_statistic)
