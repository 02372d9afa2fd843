"""LoRA as a folder of `peft`, which loads it and predicts the same."""

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import plures
from plures.cli.main import app
from plures.errors import UsageError
from plures.learn.frozen import Chosen
from plures.learn.task import Task
from plures.models.names import tokenizer_of
from plures.runs.peft import HEAD, write_adapter
from plures.runs.simulation import open_simulation
from tests.models.test_pretrained import TABLE, make_folder, transformers, write_table

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft calls it
peft = pytest.importorskip("peft", reason="needs the extra `pretrained`")


class Net(nn.Module):
    """Two convolutions and two linear layers, of which one has a name that ends like the other's."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.parts = nn.ModuleDict({"hidden": nn.Linear(64, 6)})
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 10)

    def forward(self, x):
        x = torch.tanh(self.conv(x)).flatten(1)
        return self.head(torch.tanh(self.hidden(torch.tanh(self.parts["hidden"](x)))))


@pytest.mark.parametrize(
    "adapter",
    ["lora:rank=2,alpha=6", "lora:rank=full,start=identity,layers=hidden", "lora:rank=2,fixed=a,layers=hidden"],
)
def test_a_plain_module_predicts_the_same_with_the_adapter_of_the_folder(adapter, tmp_path):
    torch.manual_seed(0)
    module, x = Net(), torch.randn(5, 1, 8, 8)
    task = Task(module, x[0], 10, chosen=Chosen(adapter=adapter))
    model = {name: value + 0.3 * torch.randn_like(value) for name, value in task.initial.items()}
    write_adapter(tmp_path, task, model, None)
    loaded = peft.PeftModel.from_pretrained(module, tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), task.logits(model, x), rtol=1e-4, atol=1e-5)
    n_layers = 1 if "layers=hidden" in adapter else 3
    assert sum(isinstance(layer, peft.tuners.lora.LoraLayer) for layer in loaded.modules()) == n_layers
    assert not (tmp_path / HEAD).exists()


def test_a_classifier_of_a_folder_predicts_the_same(tmp_path):
    folder = make_folder(tmp_path / "bert", True, n_classes=2)
    run = {"data": write_table(tmp_path / "t.csv"), "model": f"hf:{folder}:8", "rounds": 2, "lr": 0.2, **TABLE}
    plures.run("ditto", adapter="lora:rank=2,layers=*query/*value", out=tmp_path / "run", **run)
    said = CliRunner().invoke(
        app, ["export", str(tmp_path / "run"), "--client", "0", "--format", "peft", "-o", str(tmp_path / "adapter")]
    )
    assert said.exit_code == 0, said.output
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        folder
    )
    base = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    x = torch.from_numpy(tokenizer_of(f"hf:{folder}:8").encode(["the cat sat", "stocks fell"]))
    with open_simulation(tmp_path / "run") as opened, torch.no_grad():
        expected = opened.state.scene.task.logits(opened.personal_model(0), x)
        torch.testing.assert_close(
            loaded(input_ids=x, attention_mask=(x != 0).long()).logits, expected, atol=1e-5, rtol=1e-4
        )


def test_the_head_of_an_encoder_is_beside_the_adapter(tmp_path):
    folder = make_folder(tmp_path / "bert", False)
    from plures.models.pretrained import HfFolder

    torch.manual_seed(1)
    module = HfFolder(str(folder), (8,), 3, 20)
    x = torch.from_numpy(tokenizer_of(f"hf:{folder}:8").encode(["the cat sat", "stocks fell"]))
    task = Task(module, x[0], 3, chosen=Chosen(adapter="lora:rank=2,layers=*layer.1*"))
    model = {name: value + 0.3 * torch.randn_like(value) for name, value in task.initial.items()}
    write_adapter(tmp_path / "adapter", task, model, str(folder))
    base = transformers.AutoModel.from_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    from safetensors.torch import load_file

    head = load_file(tmp_path / "adapter" / HEAD)
    with torch.no_grad():
        vectors, mask = loaded(input_ids=x, attention_mask=(x != 0).long()).last_hidden_state, (x != 0).unsqueeze(-1)
        mean = (vectors * mask).sum(1) / mask.sum(1)
        torch.testing.assert_close(mean @ head["weight"].T + head["bias"], task.logits(model, x), rtol=1e-4, atol=1e-5)


def test_what_peft_does_not_know_is_refused(tmp_path):
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(2, 4, 3, groups=2), nn.Linear(144, 3)

        def forward(self, x):
            return self.head(self.conv(x).flatten(1))

    task = Task(Grouped(), torch.randn(2, 8, 8), 3, chosen=Chosen(adapter="lora"))
    with pytest.raises(UsageError, match="peft knows no LoRA like the one beside 'conv'"):
        write_adapter(tmp_path, task, task.initial, None)
    task = Task(Net(), torch.randn(1, 8, 8), 10, chosen=Chosen(adapter="bias"))
    with pytest.raises(UsageError, match="a folder of peft holds LoRA"):
        write_adapter(tmp_path, task, task.initial, None)
