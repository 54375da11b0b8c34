"""The probe as a callback of Lightning's `Trainer`: `Trainer(callbacks=[SeedanceCallback(team="vision")])`.

Attaches when the strategy has wrapped the model, and detaches at the end of fit, validate, test or predict, however that
comes. Without a wrapper Lightning calls the steps of the module and never the module: then the calls of its parts are what is
seen. Imports torch and lightning.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback

from seedance.probe.follow import Follower


class SeedanceCallback(Callback):  # type: ignore[misc]
    """Probes what a Lightning `Trainer` fits, validates, tests or predicts with.

    Args:
        settings: settings of the probe, as `seedance.attach` takes them.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._follower = Follower(settings)

    @property
    def probe(self) -> Any:
        """The probe while it is attached; None before and after."""
        return self._follower.probe

    # The strategy has wrapped and sharded the model by the time of these, and not before.

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Fitting begins with a few batches of validation."""
        self._follow(trainer, pl_module, "train")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Fitting begins."""
        self._follow(trainer, pl_module, "train")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """A validation begins, alone or within a fit."""
        self._follow(trainer, pl_module, "serve" if trainer.state.fn == "validate" else "train")

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """A test begins."""
        self._follow(trainer, pl_module, "serve")

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """A prediction begins."""
        self._follow(trainer, pl_module, "serve")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Whatever it was is over."""
        self._follower.leave()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """It ended in an error."""
        self._follower.leave(f"error: {type(exception).__name__}")

    def _follow(self, trainer: Any, module: Any, kind: str) -> None:
        wrapped = getattr(trainer.strategy, "model", None) or module
        self._follower.follow(wrapped, is_called=wrapped is not module, model=type(module).__name__, kind=kind)
