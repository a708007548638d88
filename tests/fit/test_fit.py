"""``ORTTrainer.fit`` against a PyTorch loop; metrics, callbacks, and invalid arguments."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from ort_trainer import ORTTrainer, optim
from ort_trainer.fit import Callback, Checkpoints, EarlyStopping, FitState
from ort_trainer.fit.metrics import Metrics

from ..helpers import MLP, MLP_DESC, assert_same_state, assert_same_weights, mlp_batches, mlp_trainer

Batches = list[tuple[torch.Tensor, torch.Tensor]]


def uneven_batches() -> Batches:
    """Seven batches, the last of them smaller."""
    return [*mlp_batches(6), *mlp_batches(1, size=2, seed=3)]


def accuracy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(-1) == labels).float().mean()


class Counted:
    """A metric with the interface of torchmetrics: the accuracy over all batches."""

    def __init__(self) -> None:
        self.resets, self.right, self.seen = 0, 0, 0

    def reset(self) -> None:
        self.resets, self.right, self.seen = self.resets + 1, 0, 0

    def update(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.right += int((outputs.argmax(-1) == labels).sum())
        self.seen += len(labels)

    def compute(self) -> torch.Tensor:
        return torch.tensor(self.right / self.seen)


class Evaluate:
    """A metric with the interface of ``evaluate``: takes classes and returns a dict."""

    def __init__(self, **more: float) -> None:
        self.predictions: list[int] = []
        self.references: list[int] = []
        self.more = more

    def add_batch(self, *, predictions: torch.Tensor, references: torch.Tensor) -> None:
        self.predictions += predictions.tolist()
        self.references += references.tolist()

    def compute(self) -> dict[str, float]:
        pairs = list(zip(self.predictions, self.references, strict=True))
        self.predictions, self.references = [], []
        return {"accuracy": sum(a == b for a, b in pairs) / len(pairs), **self.more}


def classes(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(-1)


@pytest.mark.engine
@pytest.mark.parametrize("steps", [1, 3])  # with three, the seventh batch is a separate window
def test_against_a_pytorch_loop(steps: int) -> None:
    model, train, evaluation = MLP(), uneven_batches(), mlp_batches(3, size=4, seed=2)
    reference = copy.deepcopy(model)
    config = optim.SGDConfig(lr=0.2)
    trainer = mlp_trainer({"batch": {"gradient_accumulation_steps": steps}}, config, model)
    result = trainer.fit(train, evaluation, 3, metrics=accuracy, progress=False)

    optimizer = torch.optim.SGD(reference.parameters(), lr=0.2)
    for row in result.history:
        losses = []
        for start in range(0, len(train), steps):
            window = train[start : start + steps]
            for x, label in window:
                loss = F.cross_entropy(reference(x), label)
                (loss / len(window)).backward()
                losses.append(loss.item() * len(x))
            norm = torch.nn.utils.get_total_norm(p.grad for p in reference.parameters() if p.grad is not None)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            outputs = reference(torch.cat([x for x, _ in evaluation]))
        labels = torch.cat([label for _, label in evaluation])
        assert row["loss"] == pytest.approx(sum(losses) / 32, rel=1e-5)
        assert row["eval_loss"] == pytest.approx(F.cross_entropy(outputs, labels).item(), rel=1e-5)
        assert row["eval_accuracy"] == pytest.approx(accuracy(outputs, labels).item())
        assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert row["learning_rate"] == 0.2
    updates = -(-7 // steps)
    assert [(row["step"], row["update"]) for row in result.history] == [(7 * n, updates * n) for n in (1, 2, 3)]
    assert_same_weights(trainer, reference, 1e-5)
    assert_same_weights(trainer, model, 0)
    assert result.status == "completed" and repr(result).startswith("completed: 3 of 3 epochs")
    assert "eval_accuracy" in repr(result)


def test_batches_of_every_kind_train_the_same() -> None:
    histories = []
    for kind in (tuple, list, lambda pair: {"label": pair[1], "x": pair[0]}):
        torch.manual_seed(0)
        train = [kind(pair) for pair in uneven_batches()]
        history = mlp_trainer().fit(train, train, metrics=accuracy, progress=False).history
        histories.append([{k: v for k, v in row.items() if k != "samples_per_second"} for row in history])
    assert histories[0] == histories[1] == histories[2]


def test_one_tensor_is_a_batch() -> None:
    desc = {"inputs": [("input", ["batch", 4])], "outputs": [("loss", [], True)]}

    class Squares(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).square().mean()

    trainer = ORTTrainer(Squares(4, 2), desc, optim.SGDConfig(lr=0.1))
    batches = [torch.randn(3, 4), torch.randn(1, 4)]
    with torch.no_grad():
        first, last = (trainer.eval_step(batch).item() for batch in batches)
    history = trainer.fit(batches[:1], batches, progress=False).history
    assert history[0]["loss"] == pytest.approx(first)
    after = [trainer.eval_step(batch).item() for batch in batches]
    assert after[1] != last and history[0]["eval_loss"] == pytest.approx((3 * after[0] + after[1]) / 4)
    with pytest.raises(ValueError, match="metrics need an output besides the loss"):
        trainer.fit(batches, batches, metrics=accuracy, progress=False)


def test_weighted_batches() -> None:
    options = {"batch": {"gradient_accumulation_steps": 2, "gradient_reduction": "weighted"}}
    train = [{"x": x, "label": label, "gradient_weight": len(x)} for x, label in uneven_batches()]
    model = MLP()
    by_hand = mlp_trainer(options, model=copy.deepcopy(model))
    for batch in train:
        by_hand.train_step(**batch)
    by_hand.optimizer_step()
    trainer = mlp_trainer(options, model=model)
    trainer.fit(train, progress=False)
    for name, value in by_hand.state_dict(pytorch_format=True).items():
        assert torch.equal(model.state_dict()[name], value)


def test_metrics_of_every_kind() -> None:
    evaluation = uneven_batches()
    counted = Counted()
    metrics = {
        "mean": accuracy,
        "counted": counted,
        "single": (Evaluate(), classes),
        "several": (Evaluate(other=0.5), classes),
    }
    trainer = mlp_trainer()
    (first, second) = trainer.fit(uneven_batches(), evaluation, 2, metrics=metrics, progress=False).history
    for row in (first, second):
        assert row["eval_mean"] == pytest.approx(row["eval_counted"])
        assert row["eval_single"] == row["eval_several_accuracy"] == pytest.approx(row["eval_counted"])
        assert row["eval_several_other"] == 0.5
    outputs = trainer.predict(torch.cat([x for x, _ in evaluation]))
    assert second["eval_mean"] == pytest.approx(float(accuracy(outputs, torch.cat([y for _, y in evaluation]))))
    assert counted.resets >= 2 and counted.seen == 32
    history = trainer.fit(evaluation, evaluation, metrics=[Counted(), (Evaluate(), classes)], progress=False).history
    assert history[0]["eval_Counted"] == pytest.approx(history[0]["eval_accuracy"])


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        (lambda outputs, labels: 0, "metric"),
        ((lambda outputs, labels: 0, classes), "metric"),
        (functools.partial(accuracy), "accuracy"),
    ],
)
def test_the_name_of_a_metric(metric: Any, name: str) -> None:
    assert Metrics(metric).compute().keys() == {f"eval_{name}"}


def test_empty_batches_do_not_count() -> None:
    batches, model = uneven_batches(), MLP()
    empty = (batches[0][0][:0], batches[0][1][:0])
    plain, mixed = (
        mlp_trainer(model=copy.deepcopy(model)).fit(data, data, metrics=accuracy, progress=False).history[0]
        for data in (batches, [*batches, empty])
    )
    assert mixed["loss"] == plain["loss"]
    assert not math.isnan(mixed["eval_loss"]) and not math.isnan(mixed["eval_accuracy"])


class Moments(Callback):
    """Records its calls."""

    def __init__(self) -> None:
        self.seen: list[str] = []


def _note(moment: str) -> Any:
    def method(self: Moments, state: FitState, trainer: ORTTrainer, *more: Any) -> None:
        assert isinstance(trainer, ORTTrainer)
        self.seen.append(moment)

    return method


for _moment in [name for name in vars(Callback) if name.startswith("on_")]:
    setattr(Moments, _moment, _note(_moment))


def test_the_order_of_moments(tmp_path: Any) -> None:
    moments = Moments()
    trainer = mlp_trainer()
    trainer.fit(
        mlp_batches(2), mlp_batches(1), 2, callbacks=[moments], checkpoints=Checkpoints(tmp_path), progress=False
    )
    batch = ["on_train_batch_start", "on_train_batch_end"]
    epoch = ["on_train_epoch_start", *batch, *batch, "on_validation_start", "on_validation_end"]
    epoch += ["on_train_epoch_end", "on_row"]
    # Twice, because both epochs are also the best so far.
    saves = ["on_save_checkpoint"]
    found = [moment for moment in moments.seen if moment not in saves]
    assert found == ["on_fit_start", *epoch, *epoch, "on_fit_end"]
    first_save = moments.seen.index("on_save_checkpoint")
    assert moments.seen[first_save - 1] == "on_row" and moments.seen.count("on_save_checkpoint") >= 3
    moments.seen.clear()
    trainer.fit(
        mlp_batches(2), mlp_batches(1), 2, callbacks=[moments], checkpoints=tmp_path, resume=True, progress=False
    )
    assert moments.seen == ["on_load_checkpoint", "on_fit_start", "on_fit_end"]


def test_a_callback_may_stop_and_add_numbers() -> None:
    class Own(Callback):
        def on_validation_end(self, state: FitState, trainer: ORTTrainer) -> None:
            state.metrics["eval_own"] = float(state.epoch)

        def on_train_batch_end(self, state: FitState, trainer: ORTTrainer) -> None:
            assert isinstance(state.loss, float) and len(state.outputs) == 2
            if state.epoch == 3 and state.batch == 2:
                state.stop("enough")

    stopping = EarlyStopping("eval_own", mode="max")
    result = mlp_trainer().fit(mlp_batches(4), mlp_batches(1), 5, callbacks=[Own(), stopping], progress=False)
    assert (result.status, result.reason, result.steps) == ("stopped", "enough", 10)
    assert [row["eval_own"] for row in result.history] == [1.0, 2.0]
    assert stopping.best == 2.0
    assert repr(result).startswith("stopped (enough): 2 of 5 epochs")


def test_the_first_step_of_each_epoch_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """If time allows: a callback or a data set may have changed what the model reads."""
    trainer, asked = mlp_trainer(), list[int]()
    monkeypatch.setattr("ort_trainer.core.epochs.begin", lambda: asked.append(trainer.train_step_info.step))
    trainer.fit(mlp_batches(5), epochs=3)
    assert asked == [0, 5, 10]


def test_an_error_is_told_and_raised() -> None:
    moments = Moments()

    def broken() -> Iterator[Any]:
        yield mlp_batches(1)[0]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        mlp_trainer().fit(broken(), callbacks=[moments], progress=False)
    assert moments.seen[-2:] == ["on_exception", "on_fit_end"]


@pytest.mark.parametrize(
    ("mode", "values", "epochs"),
    [("min", [3.0, 2.0, 2.5, 1.99, 9.0], 4), ("max", [1.0, 0.5, 1.0, 2.0], 3), ("max", [1.0, 2.0, 3.0], 3)],
)
def test_early_stopping(mode: str, values: list[float], epochs: int) -> None:
    told = iter(values)
    stopping = EarlyStopping("eval_value", patience=2, mode=mode, min_delta=0.1)
    train = mlp_batches(1)
    result = mlp_trainer().fit(
        train, train, len(values), metrics={"value": lambda *_: next(told)}, callbacks=[stopping], progress=False
    )
    assert len(result.history) == epochs
    assert result.status == ("stopped" if epochs < len(values) else "completed")
    if result.reason:
        assert result.reason == "eval_value has not improved for 2 epochs"


def test_early_stopping_at_nan() -> None:
    train = mlp_batches(1)
    result = mlp_trainer().fit(
        train, train, 4, metrics={"value": lambda *_: float("nan")}, callbacks=[EarlyStopping("eval_value")]
    )
    assert result.status == "stopped" and result.reason == "eval_value is nan" and len(result.history) == 1


class Interrupt(Callback):
    """Sends SIGINT at the end of a batch, or within one, as Ctrl-C does."""

    def __init__(self, epoch: int, batch: int) -> None:
        self.at = epoch, batch

    def on_train_batch_end(self, state: FitState, trainer: ORTTrainer) -> None:
        if (state.epoch, state.batch) == self.at:
            signal.raise_signal(signal.SIGINT)


def test_an_interrupt_ends_it_cleanly() -> None:
    result = mlp_trainer().fit(mlp_batches(4), epochs=3, callbacks=[Interrupt(2, 3)], progress=False)
    assert result.status == "interrupted" and len(result.history) == 1 and result.steps == 7


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"epochs": 0}, ValueError, "epochs must be at least 1, or None, but 0 was given"),
        ({"epochs": 2.0}, TypeError, "epochs must be an int, or None, but 2.0"),
        ({"epochs": True}, TypeError, "epochs must be an int"),
        ({"train_loader": None}, TypeError, "train_loader must yield batches"),
        ({"train_loader": {"x": 1}}, TypeError, "train_loader must yield batches"),
        ({"train_loader": (torch.ones(2), torch.ones(2))}, TypeError, "for tensors, DataLoader\\(TensorDataset"),
        ({"max_steps": 0}, ValueError, "max_steps must be at least 1"),
        ({"eval_every": 2}, ValueError, "eval_every=2 needs an eval_loader"),
        ({"eval_loader": iter([]), "eval_every": 2}, TypeError, "eval_loader is an iterator"),
        ({"train_loader": iter([]), "epochs": 2}, TypeError, "train_loader is an iterator"),
        ({"train_loader": []}, ValueError, "train_loader yielded no batch in epoch 1"),
        ({"eval_loader": 3}, TypeError, "eval_loader must yield batches"),
        ({"eval_loader": []}, ValueError, "eval_loader yielded no batch in epoch 1"),
        ({"metrics": accuracy}, ValueError, "metrics need an eval_loader"),
        ({"metrics": 3, "eval_loader": [1]}, TypeError, "a metric must be a function"),
        ({"metrics": Counted, "eval_loader": [1]}, TypeError, "but the class Counted was given: pass an object"),
        ({"callbacks": [EarlyStopping]}, TypeError, "but the class EarlyStopping was given: pass an object"),
        ({"metrics": [accuracy, accuracy], "eval_loader": [1]}, ValueError, r"unique names.*\['accuracy'\]"),
        ({"metrics": {"loss": accuracy}, "eval_loader": [1]}, ValueError, "unique names other than 'loss'"),
        ({"metrics": {1: accuracy}, "eval_loader": [1]}, TypeError, "names of metrics must be str"),
        ({"metrics": lambda *_: "much", "eval_loader": ...}, TypeError, "must return a number, but it returned 'much'"),
        ({"labels": "label"}, ValueError, "no metrics were given"),
        ({"labels": "z", "metrics": accuracy, "eval_loader": ...}, ValueError, "labels='z' is not an input"),
        ({"callbacks": ["bar"]}, TypeError, "a callback must be .*'bar'"),
        ({"progress": "bar"}, TypeError, "a callback must be .*'bar'"),
        ({"checkpoints": "run.ortckpt"}, ValueError, "must be a folder, not a file such as 'run.ortckpt'"),
        ({"checkpoints": __file__}, NotADirectoryError, "must be a folder, but .*test_fit.py' is a file"),
        ({"train_loader": TensorDataset(torch.ones(2, 2))}, TypeError, r"wrap it, DataLoader\(dataset, batch_size=32"),
        ({"resume": True}, ValueError, "but checkpoints was not given"),
        ({"resume": 3}, TypeError, "resume must be True, False or the path"),
        ({"resume": "nowhere.ortckpt"}, FileNotFoundError, "nowhere.ortckpt"),
        ({"callbacks": [EarlyStopping("eval_loss")]}, ValueError, "monitors 'eval_loss'.*need an eval_loader"),
        (
            {"callbacks": [EarlyStopping("eval_f1")], "eval_loader": ..., "metrics": accuracy},
            ValueError,
            "EarlyStopping monitors 'eval_f1', .*'eval_accuracy'",
        ),
    ],
)
def test_refused_arguments(
    arguments: dict[str, Any], error: type[Exception], message: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train = mlp_batches(1)
    given = {"train_loader": train, "progress": False, **arguments}
    given = {name: train if value is ... else value for name, value in given.items()}
    with pytest.raises(error, match=message):
        mlp_trainer().fit(**given)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: EarlyStopping(mode="best"), ValueError, "mode must be 'min' or 'max', but 'best'"),
        (lambda: EarlyStopping(patience=0), ValueError, "patience must be at least 1"),
        (lambda: EarlyStopping(min_delta=-1.0), ValueError, "min_delta must be a finite number"),
        (lambda: Checkpoints(".", every_n_batches=0), ValueError, "every_n_batches must be at least 1"),
        (lambda: type("Typo", (Callback,), {"on_batch_end": None}), TypeError, r"Typo has \['on_batch_end'\]"),
    ],
)
def test_refused_callbacks(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_number_that_no_epoch_gives_is_found_at_its_end() -> None:
    train = mlp_batches(1)
    with pytest.raises(ValueError, match="monitors 'eval_f1'.*'eval_accuracy'"):
        mlp_trainer().fit(
            train, train, metrics=(Evaluate(), classes), callbacks=[EarlyStopping("eval_f1")], progress=False
        )


def test_fetches_without_the_loss_are_refused() -> None:
    trainer = mlp_trainer()
    trainer.train_step_info.fetches = ["logits"]
    with pytest.raises(ValueError, match="fetches lacks the loss, 'loss'"):
        trainer.fit(mlp_batches(1), progress=False)
    assert trainer.train_step_info.step == 0
    trainer.train_step_info.fetches = ["logits", "loss"]
    assert MLP_DESC["outputs"][0][0] == "loss"  # so the order differs here
    history = trainer.fit(mlp_batches(1), mlp_batches(1), metrics=accuracy, progress=False).history
    assert 0 < history[0]["loss"] < 3 and 0 <= history[0]["eval_accuracy"] <= 1


class _Stateful(torch.nn.Module):
    """Takes a state of two parts before the input to classify."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, state: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + state[0] * state[1])


def test_metrics_find_the_label_behind_an_argument_of_several_parts() -> None:
    label = torch.arange(6) % 3
    batches = [(((torch.randn(6, 4), torch.randn(6, 4))), torch.randn(6, 4), label)]
    seen = []

    def metric(outputs: torch.Tensor, labels: torch.Tensor) -> float:
        seen.append(labels)
        return 0.0

    trainer = ORTTrainer(_Stateful(), "auto", optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy)
    trainer.fit(batches, batches, metrics=metric, progress=False)
    torch.testing.assert_close(seen, [label])


def stream(start: int = 0) -> Iterator[Any]:
    """Batches without end."""
    for seed in itertools.count(start):
        yield from mlp_batches(1, seed=seed)


def test_steps_of_an_endless_stream_are_those_of_a_loop() -> None:
    model, moments = MLP(), Moments()
    trainer, other = mlp_trainer(model=model), mlp_trainer(model=copy.deepcopy(model))
    result = trainer.fit(
        stream(), mlp_batches(2), max_steps=7, eval_every=3, callbacks=[moments, EarlyStopping()], progress=False
    )
    losses = [float(other.train_step(*batch)[0]) for batch in itertools.islice(stream(), 7)]
    assert_same_state(trainer.state_dict(pytorch_format=True), other.state_dict(pytorch_format=True))
    assert [row["step"] for row in result.history] == [3, 6, 7] and [row["epoch"] for row in result.history] == [1] * 3
    means = [sum(losses[:3]) / 3, sum(losses[3:6]) / 3, losses[6]]
    assert [row["loss"] for row in result.history] == pytest.approx(means)
    assert result.status == "completed" and "completed: 7 of 7 steps, " in repr(result)
    assert moments.seen.count("on_validation_end") == moments.seen.count("on_row") == 3
    assert "on_train_epoch_end" not in moments.seen


@pytest.mark.parametrize(
    ("steps", "every", "rows"),
    [
        (7, None, [(1, 3), (2, 6), (3, 7)]),
        (6, 2, [(1, 2), (1, 3), (2, 5), (2, 6)]),
        (None, 3, [(1, 3)]),  # an epoch's end, where an evaluation is due, is one row
    ],
)
def test_steps_over_epochs(steps: int | None, every: int | None, rows: list[tuple[int, int]]) -> None:
    moments = Moments()
    result = mlp_trainer().fit(
        mlp_batches(3), mlp_batches(1), max_steps=steps, eval_every=every, callbacks=[moments], progress=False
    )
    assert [(row["epoch"], row["step"]) for row in result.history] == rows and result.status == "completed"
    assert moments.seen.count("on_train_epoch_end") == result.completed == rows[-1][1] // 3
