"""The client of Flower's simulation; in a module of its own, which Ray's actors import by name."""

from functools import lru_cache

import torch
import work
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn


@lru_cache(maxsize=1)
def actor_model(path: str, threads: int) -> nn.Module:
    """The model of this actor, which all clients that it plays load their weights into."""
    torch.set_num_threads(threads)
    return work.make_model(work.read_case(path))


def make_client(path: str, threads: int) -> ClientApp:
    """The app of the clients; an actor reads the rows when it plays its first client, and keeps them."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        case, model = work.read_case(path), actor_model(path, threads)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = case.train[int(context.node_config["partition-id"])]
        before = work.CountedSgd.steps
        optimizer = work.CountedSgd(model.parameters(), lr=case.lr)
        for _ in range(case.epochs):
            for index in torch.randperm(len(y)).split(case.batch):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[index]), y[index]).backward()
                optimizer.step()
        metrics = MetricRecord({"num-examples": len(y), "steps": work.CountedSgd.steps - before})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        case, model = work.read_case(path), actor_model(path, threads)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        rows = case.test[int(context.node_config["partition-id"])]
        metrics = MetricRecord({"num-examples": len(rows[1]), "right": work.count_right(model, rows)})
        return Message(content=RecordDict({"metrics": metrics}), reply_to=message)

    return app
