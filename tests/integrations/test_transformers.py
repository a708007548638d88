"""``HuggingFaceTrainer`` against ``transformers.Trainer``: the same arguments, data and model."""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ..helpers import assert_close
from ..test_docs import ROOT

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from ort_trainer import ORTModule
from ort_trainer.integrations.transformers import _REFUSED, HuggingFaceTrainer

Data = list[dict[str, torch.Tensor]]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
            num_labels=3,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def texts(count: int, classes: bool) -> Data:
    """Returns texts of several lengths, with the class or the text itself as the label."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(count):
        ids = torch.randint(1, 50, (6 + index % 5,), generator=generator)
        made.append({"input_ids": ids, "labels": ids[0] % 3 if classes else ids.clone()})
    return made


def pad(rows: Data) -> dict[str, torch.Tensor]:
    """Pads a batch to its longest text; padding is masked, and has no label."""
    batch = {"input_ids": [row["input_ids"] for row in rows]}
    batch["attention_mask"] = [torch.ones_like(ids) for ids in batch["input_ids"]]
    padded = {name: nn.utils.rnn.pad_sequence(values, batch_first=True) for name, values in batch.items()}
    if "labels" in rows[0]:
        labels = [row["labels"] for row in rows]
        padded["labels"] = (
            nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
            if labels[0].dim()
            else torch.stack(labels)
        )
    return padded


class Tiny(nn.Module):
    """Not a model of the library, and without its loss arguments, so the trainer divides the loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> SequenceClassifierOutput:
        logits = self.fc(self.dropout(torch.tanh(x)))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def points(count: int = 22) -> Data:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, generator=generator), "labels": torch.tensor(index % 3)} for index in range(count)]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        # The gradient of a key's bias is only rounding errors, which Adam would scale up to full steps.
        "adam_epsilon": 1e-5,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        **changes,
    }
    return TrainingArguments(str(folder), **settings)


def assert_same_run(ours: Trainer, theirs: Trainer, relative: float = 1e-4) -> None:
    """Compares the values logged at every update, and the weights."""
    assert len(ours.state.log_history) == len(theirs.state.log_history)
    for mine, other in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        assert mine.keys() == other.keys()
        assert mine.get("learning_rate") == other.get("learning_rate")
        for name in ("loss", "grad_norm", "train_loss", "eval_loss", "eval_accuracy"):
            if name in other:
                assert mine[name] == pytest.approx(other[name], rel=relative), (name, mine["step"])
    for (name, value), expected in zip(
        ours.model.state_dict().items(), theirs.model.state_dict().values(), strict=True
    ):
        assert_close(value, expected, relative, name)


def both(make: Callable[[type[Trainer]], Trainer]) -> tuple[Trainer, Trainer]:
    """Trains with both classes from the same random state."""
    made = []
    for kind in (HuggingFaceTrainer, Trainer):
        torch.manual_seed(0)
        trainer = make(kind)
        trainer.train()
        made.append(trainer)
    return made[0], made[1]


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


@pytest.mark.engine
def test_a_bert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs of ten updates, the last with one micro-batch, and an evaluation after each epoch."""
    calls = {Trainer: 0, HuggingFaceTrainer: 0}
    forward = BertForSequenceClassification.forward
    running: list[type[Trainer]] = []

    @functools.wraps(forward)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[running[-1]] += 1
        return forward(*args, **kwargs)

    monkeypatch.setattr(BertForSequenceClassification, "forward", counted)
    settings = {
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 5,
        "num_train_epochs": 2,
        "eval_strategy": "epoch",
    }

    def make(kind: type[Trainer]) -> Trainer:
        running.append(kind)
        return kind(
            bert(),
            arguments(tmp_path, **settings),
            train_dataset=texts(74, True),
            eval_dataset=texts(10, True),
            data_collator=pad,
            compute_metrics=accuracy,
        )

    ours, theirs = both(make)
    assert ours.state.global_step == 20
    assert_same_run(ours, theirs)
    norms = [entry["grad_norm"] for entry in theirs.state.log_history if "grad_norm" in entry]
    assert min(norms) < 0.5 < max(norms)  # some gradients were clipped, and some not
    assert calls[Trainer] == calls[HuggingFaceTrainer] == 38 + 6, (
        "what forward() counts is counted in each run of a graph"
    )

    assert "forward with its backward pass: 3" in str(ours.report())
    ours.save_model(str(tmp_path / "model"))
    saved = BertForSequenceClassification.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(saved[name], value) for name, value in ours.model.state_dict().items())


@pytest.mark.engine
def test_a_gpt2(tmp_path: Path) -> None:
    """Its loss is a sum over the labels of the whole accumulation window, divided by their number."""
    settings = {"gradient_accumulation_steps": 3, "max_steps": 20, "lr_scheduler_type": "polynomial"}
    ours, theirs = both(
        lambda kind: kind(gpt2(), arguments(tmp_path, **settings), train_dataset=texts(64, False), data_collator=pad)
    )
    assert ours.state.global_step == 20
    assert_same_run(ours, theirs)
    data = texts(7, False)
    assert ours.evaluate(data)["eval_loss"] == pytest.approx(theirs.evaluate(data)["eval_loss"], rel=1e-4)


def test_bf16(tmp_path: Path) -> None:
    """The rounding of bfloat16 is PyTorch's."""
    losses = {}
    for kind, bf16 in ((HuggingFaceTrainer, True), (Trainer, True), (Trainer, False)):
        settings = arguments(tmp_path, max_steps=5, bf16=bf16)
        torch.manual_seed(0)
        trainer = kind(Tiny(), settings, train_dataset=points())
        trainer.train()
        losses[kind, bf16] = torch.tensor([entry["loss"] for entry in trainer.state.log_history[:-1]])
    assert_close(losses[HuggingFaceTrainer, True], losses[Trainer, True], 1e-4, "loss")
    assert (losses[Trainer, False] - losses[Trainer, True]).norm() > 2e-4 * losses[Trainer, False].norm()


class Moments(TrainerCallback):
    """Records its calls, and what it sees of the gradients and the model."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.norms.append(sum(float(p.grad.square().sum()) for p in kwargs["model"].parameters()))

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            self.seen.append(name)
        return super().__getattribute__(name)


def test_checkpoints_and_callbacks(tmp_path: Path) -> None:
    """Uses dropout: its masks can be PyTorch's, and a resumed run gets the same masks as an uninterrupted one."""
    moments: dict[type[Trainer], Moments] = {}

    def make(kind: type[Trainer]) -> Trainer:
        moments[kind] = Moments()
        own = {"ort_options": {"utils": {"random_numbers": "pytorch"}}} if kind is HuggingFaceTrainer else {}
        settings = arguments(
            tmp_path / kind.__name__,
            num_train_epochs=2,
            save_strategy="steps",
            save_steps=3,
            eval_strategy="steps",
            eval_steps=3,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
        )
        torch.manual_seed(0)
        data = points(18)
        return kind(
            Tiny(dropout=0.2), settings, train_dataset=data, eval_dataset=data[:4], callbacks=[moments[kind]], **own
        )

    ours, theirs = both(make)
    assert_same_run(ours, theirs)
    assert moments[HuggingFaceTrainer].seen == moments[Trainer].seen and len(moments[Trainer].norms) == 10
    assert moments[HuggingFaceTrainer].norms == pytest.approx(moments[Trainer].norms, rel=1e-4)
    assert Path(ours.state.best_model_checkpoint).name == Path(theirs.state.best_model_checkpoint).name

    resumed = make(HuggingFaceTrainer)
    resumed.train(resume_from_checkpoint=str(tmp_path / "HuggingFaceTrainer" / "checkpoint-6"))
    assert resumed.state.global_step == 10 and len(moments[HuggingFaceTrainer].norms) == 4
    assert [entry.get("loss") for entry in resumed.state.log_history] == [
        entry.get("loss") for entry in ours.state.log_history
    ]
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name], value), name


class Weighted:
    """A user's own loss, as an override of ``compute_loss``; mixed into both classes."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs["logits"], labels, weight=torch.tensor([1.0, 2.0, 3.0]))
        return (loss, outputs) if return_outputs else loss


class OrtWeighted(Weighted, HuggingFaceTrainer):
    pass


class PlainWeighted(Weighted, Trainer):
    pass


def summed(outputs: dict[str, torch.Tensor], labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("case", ["model", "override", "function", "smoothing"])
def test_losses(case: str, tmp_path: Path) -> None:
    """All ways to define a loss, with an incomplete last window."""
    settings = {"gradient_accumulation_steps": 4, "num_train_epochs": 4, "lr_scheduler_type": "constant"}
    if case == "smoothing":
        settings["label_smoothing_factor"] = 0.1
    own = {"compute_loss_func": summed} if case == "function" else {}
    weighted = {HuggingFaceTrainer: OrtWeighted, Trainer: PlainWeighted} if case == "override" else {}

    def make(kind: type[Trainer]) -> Trainer:
        torch.manual_seed(0)
        model = Tiny()
        model.config = BertConfig()
        trainer: Callable[..., Trainer] = weighted.get(kind, kind)
        return trainer(model, arguments(tmp_path, **settings), train_dataset=points(), **own)

    ours, theirs = both(make)
    assert_same_run(ours, theirs)
    data = points(5)
    assert ours.evaluate(data)["eval_loss"] == pytest.approx(theirs.evaluate(data)["eval_loss"], rel=1e-4)
    if case == "model":
        unlabelled = [{"x": point["x"]} for point in points(8)]
        mine, other = ours.predict(unlabelled), theirs.predict(unlabelled)
        assert mine.label_ids is None and mine.predictions.shape == (8, 3)
        assert_close(torch.tensor(mine.predictions), torch.tensor(other.predictions), 1e-4, "predictions")


def test_a_new_model_for_every_training(tmp_path: Path) -> None:
    trainer = HuggingFaceTrainer(
        model_init=lambda: Tiny(), args=arguments(tmp_path, max_steps=3), train_dataset=points()
    )
    first = trainer.train()
    kept = trainer.model
    second = trainer.train()
    assert trainer.model is not kept and first.training_loss == second.training_loss
    assert isinstance(trainer.model, ORTModule) and isinstance(trainer.model, Tiny)
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), trainer.model.parameters(), strict=True))


def test_options_reach_the_computation(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\['batch'.*have no effect on an ORTModule"):
        HuggingFaceTrainer(Tiny(), arguments(tmp_path), ort_options={"batch": {"gradient_accumulation_steps": 2}})


@pytest.mark.parametrize("name", _REFUSED)
def test_what_does_not_go_with_graphs_is_refused(name: str, tmp_path: Path) -> None:
    args = arguments(tmp_path)
    setattr(args, name, True)
    with pytest.raises(ValueError, match=rf"TrainingArguments\({name}="):
        HuggingFaceTrainer(Tiny(), args)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"version": 1}, "fsdp_config has version 1"),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP"}, "'SIZE_BASED_WRAP' and xla=False"),
        ({"transformer_layer_cls_to_wrap": ["Block"]}, r"Tiny has no layers of the classes \['Block'\]: name them"),
    ],
)
def test_what_can_not_be_sharded_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        HuggingFaceTrainer(Tiny(), arguments(tmp_path, fsdp=True, fsdp_config=config))


def test_refused_arguments_exist(tmp_path: Path) -> None:
    """A renamed argument would no longer be refused."""
    args = arguments(tmp_path)
    assert not [name for name in _REFUSED if not hasattr(args, name)]


def test_both_sides_of_the_diffs_of_the_page_train_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "huggingface.md").read_text()
    page = re.sub(r"<!-- diff: .*?<!-- /diff -->", "", page, flags=re.DOTALL)  # tests/test_recipes.py runs these
    diffs = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    assert len(diffs) == 2
    for diff in diffs:
        states = {}
        for side in "-+":
            lines = [line[1:] for line in diff.splitlines() if line[:1] in ("", " ", side)]
            torch.manual_seed(0)
            data = points(16)
            scope: dict[str, Any] = {"model": Tiny(), "train_set": data, "test_set": data[:4]}
            scope["loader"] = [default_data_collator(data[start : start + 4]) for start in range(0, 16, 4)]
            exec(compile("\n".join(lines), f"huggingface.md ({side})", "exec"), scope)
            states[side] = scope["model"].state_dict()
        for name, value in states["-"].items():
            assert_close(states["+"][name], value, 1e-4, name)


def test_python_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "huggingface.md").read_text(), re.DOTALL):
        exec(compile(block, "huggingface.md", "exec"), scope)
    assert torch.isfinite(scope["loss"]) and (tmp_path / "trained" / "config.json").exists()


@pytest.mark.parametrize("library", ["transformers", "accelerate"])
def test_a_missing_library(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, "ort_trainer.integrations.transformers")
    with pytest.raises(ImportError, match=r"pip install 'ort_trainer\[transformers\]'"):
        importlib.import_module("ort_trainer.integrations.transformers")
