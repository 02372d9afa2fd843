"""MLflow: its files in DIR; look at them with `mlflow ui --backend-store-uri DIR`."""

import os
import time
from pathlib import Path

# MLflow reads these when it is imported: it is to ask no network for anything, and to write plain files.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from plures.runs.callbacks import Callback
from plures.runs.loggers import numbers
from plures.runs.results import Round
from plures.runs.state import RunState

EXPERIMENT = "plures"


class Logger(Callback):
    def __init__(self, folder: Path, name: str) -> None:
        self.client, self.name, self.run_id = MlflowClient(folder.resolve().as_uri()), name, ""

    def started(self, state: RunState) -> None:
        known = self.client.get_experiment_by_name(EXPERIMENT)
        experiment = known.experiment_id if known else self.client.create_experiment(EXPERIMENT)
        self.run_id = self.client.create_run(experiment, run_name=self.name).info.run_id
        config = state.scene.config.model_dump(exclude_none=True)
        options = config | config.pop("settings")
        self.client.log_batch(self.run_id, params=[Param(key, str(value)) for key, value in options.items()])

    def played(self, state: RunState, row: Round) -> None:
        now = int(1000 * time.time())
        found = [Metric(key, value, now, row.round) for key, value in numbers(row).items()]
        self.client.log_batch(self.run_id, metrics=found)

    def ended(self) -> None:
        if self.run_id:
            self.client.set_terminated(self.run_id)
            self.run_id = ""
