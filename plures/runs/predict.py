"""Personal models in use: as plain modules, for predictions of new rows, and as files for other programs."""

import contextlib
import copy
import io
import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from plures.data import schema as schemas
from plures.data.dataset import Target
from plures.data.objects import is_frame
from plures.data.tables import encode_rows, from_frame
from plures.errors import DataError, UsageError, unknown
from plures.files import parse_toml
from plures.learn.metrics import predictions
from plures.models.names import tokenizer_of
from plures.runs.scene import Scene
from plures.tree import Params

Format = Literal["safetensors", "torchscript", "onnx"]
ENDINGS: dict[str, Format] = {".safetensors": "safetensors", ".pt": "torchscript", ".onnx": "onnx"}
ROWS = 256  # predicted at a time


class InUnits(nn.Module):
    """A model whose output is in the units of what is predicted: a number, or an expected count."""

    def __init__(self, module: nn.Module, target: Target) -> None:
        super().__init__()
        self.module, self.is_count = module, target.kind == "count"
        self.shift, self.scale = target.shift, target.scale

    def forward(self, x: Tensor) -> Tensor:
        """The prediction of each row."""
        out = self.module(x)
        return (out.exp() if self.is_count else out) * self.scale + self.shift


def module_of(scene: Scene, model: Params) -> nn.Module:
    """A personal model as a plain module, in inference mode."""
    return scene.task.as_module(model).eval()


def client_number(scene: Scene, client: int | str) -> int:
    """A client by its number or its name."""
    if isinstance(client, str):
        if client in scene.names:
            return scene.names.index(client)
        if not client.isdigit():
            raise unknown("client", client, scene.names or [str(k) for k in range(len(scene.population.train))])
    return int(client)


def as_inputs(scene: Scene, rows: Any) -> Tensor:
    """Rows as the model takes them: those of a data frame are read by the schema of the run, texts by its tokenizer."""
    if is_frame(rows):
        if not scene.schema:
            raise UsageError("a data frame can be read by runs on a table alone; give an array of the model's inputs")
        if len(scene.task.example.shape) != 1:
            raise UsageError("windows of a time series are given as an array [row, channel, position]")
        schema = schemas.from_toml("schema.toml", parse_toml(scene.schema))
        table = from_frame("rows", rows)
        missing = [column.name for column in schema.columns if column.name not in table.columns]
        if missing:
            raise DataError(
                f"the rows have no column {missing[0]!r}; the model reads "
                f"{', '.join(column.name for column in schema.columns)}."
            )
        rows, _ = encode_rows(schema.columns, table)
    elif isinstance(rows, list) and rows and all(isinstance(row, str) for row in rows):
        tokenizer = tokenizer_of(scene.config.model)
        if tokenizer is None:
            raise UsageError("texts can be read by models with a tokenizer of their own alone; give rows of tokens")
        rows = tokenizer.encode(rows)
    x = torch.as_tensor(np.asarray(rows)).to(scene.task.example.dtype)
    if x.shape[1:] != scene.task.example.shape:
        raise DataError(f"rows have the shape {tuple(x.shape[1:])}, the model reads {tuple(scene.task.example.shape)}.")
    return x


def outputs(scene: Scene, model: Params, rows: Any) -> np.ndarray:
    """What a personal model gives for rows: logits, or one number that is not in units yet."""
    x, method, task = as_inputs(scene, rows), scene.method, scene.task
    with torch.no_grad():
        parts = [method.predict(task, model, part) for part in x.split(ROWS)]
    return torch.cat(parts).numpy()


def predict(scene: Scene, model: Params, rows: Any) -> np.ndarray:
    """What a personal model predicts: classes by their names, if they have any, labels, or numbers in their units."""
    found = predictions(outputs(scene, model, rows), scene.population.target)
    if scene.population.target.is_classes and scene.class_names:
        return np.array(scene.class_names)[found]
    return found


# Files


def format_of(path: Path, wanted: str | None) -> Format:
    """The format of a file, by its ending or as asked for."""
    if wanted is not None:
        if wanted not in ENDINGS.values():
            raise unknown("format", wanted, [*ENDINGS.values(), "peft"])
        return wanted  # type: ignore[return-value]
    if path.suffix not in ENDINGS:
        raise UsageError(f"models are written as {', '.join(ENDINGS)}; got {path.name}. Or name it with --format")
    return ENDINGS[path.suffix]


def as_file(scene: Scene, model: Params, form: Format) -> bytes:
    """A personal model for other programs; its output is a logit for each class or label, or a number in its units."""
    module: nn.Module = copy.deepcopy(module_of(scene, model))
    if scene.population.target.is_real:
        module = InUnits(module, scene.population.target)
    module = module.eval().requires_grad_(False)
    example = torch.stack([scene.task.example, scene.task.example])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # that tracing fixes what depends on numbers: the models have no such branches
        if form == "torchscript":
            buffer = io.BytesIO()
            torch.jit.save(torch.jit.trace(module, (example,), check_trace=False), buffer)
            return buffer.getvalue()
        return _as_onnx(module, example)


def _as_onnx(module: nn.Module, example: Tensor) -> bytes:
    try:
        import onnx  # here, because it is an extra  # noqa: F401
    except ImportError:
        raise UsageError("ONNX files need the package onnx: pip install 'plures[export]'") from None
    buffer = io.BytesIO()
    names = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": {"x": {0: "row"}, "y": {0: "row"}}}
    with contextlib.redirect_stdout(io.StringIO()):  # the exporter prints
        torch.onnx.export(module, (example,), buffer, dynamo=False, opset_version=17, **names)  # type: ignore[arg-type]
    return buffer.getvalue()
