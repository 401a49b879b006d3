"""`loka.integrations.LightningCallback`: FP8 in Lightning's Trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from loka.integrations.training import BoundTraining


class LightningCallback(BoundTraining, Callback):
    """Trains a LightningModule's model in FP8: `Trainer(callbacks=[LightningCallback(clicks.apply, model="model")])`.

    It applies in `setup`, before the strategy wraps the module and optimizers are made; verifies after the first batch,
    on every rank; and with a guard checks between optimizer steps, sends its figures to the trainer's loggers, and
    keeps its state in checkpoints. The model has to be there in `setup`: build it in `__init__`, not in
    `configure_model`. Arguments and attributes are those of `BoundTraining`.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Apply; for validation, tests and predictions, too."""
        self._bind(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the guard: the module is wrapped, and a checkpoint is loaded."""

        def log(step: int, figures: dict[str, float]) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(figures, step)

        self._start(log)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Let the guard see the first batch of each optimizer step."""
        if self.guard is not None and batch_idx % trainer.accumulate_grad_batches == 0:
            with trainer.precision_plugin.train_step_context():
                self.guard.step(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        """Verify after the first batch."""
        self._stepped()
