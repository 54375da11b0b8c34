"""The probe as a callback of HuggingFace's `Trainer`: `Trainer(..., callbacks=[SeedanceCallback(team="vision")])`.

Attaches when training begins, when the trainer has wrapped and compiled the model, and detaches when training ends; a lone
evaluation is seen from its second batch on, for the first is the first that a callback hears of. Imports torch and transformers.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from seedance.probe.follow import Follower


class SeedanceCallback(TrainerCallback):  # type: ignore[misc]
    """Probes what a `Trainer` trains or evaluates.

    Args:
        settings: settings of the probe, as `seedance.attach` takes them. What the trainer knows (the model's name, the run's
            name) fills in where nothing else is set.
    """

    def __init__(self, **settings: Any) -> None:
        self._follower = Follower(settings)
        self._is_training = False

    @property
    def probe(self) -> Any:
        """The probe while it is attached; None before and after."""
        return self._follower.probe

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        """Training begins. A run before that failed has told nobody that it ended."""
        self._follower.leave("error")
        self._is_training = True
        self._follower.follow(model, **_known(args, model))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Training is over."""
        self._is_training = False
        metric, value = getattr(args, "metric_for_best_model", None), getattr(state, "best_metric", None)
        if metric and value is not None:
            self._follower.state_result(str(metric), value)
        self._follower.leave()

    def on_prediction_step(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        """A batch was evaluated: outside of training, the first one attaches the probe."""
        if not self._is_training:
            self._follower.follow(model, **_known(args, model), kind="serve")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An evaluation is over; one within training changes nothing."""
        if not self._is_training:
            self._follower.leave()

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        """A prediction is over."""
        self.on_evaluate(args, state, control)


def _known(args: Any, model: Any) -> dict[str, Any]:
    """What the trainer can tell of the run."""
    config = getattr(model, "config", None)
    name = getattr(config, "name_or_path", None) or type(model).__name__
    known: dict[str, Any] = {"model": str(name)}
    run = getattr(args, "run_name", None)
    if run and run != getattr(args, "output_dir", None):
        known["name"] = str(run)
    return known
