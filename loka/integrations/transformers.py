"""`loka.integrations.TransformersCallback`: FP8 in Hugging Face's Trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from loka.integrations.training import BoundTraining

_STATE = "loka_guard"  # in the trainer's state


class TransformersCallback(BoundTraining, TrainerCallback):
    """Trains a model in FP8: `Trainer(model, callbacks=[TransformersCallback(clicks.apply, model="ranker")])`.

    It applies when the Trainer is made, before it wraps the model and makes optimizers; verifies after the first
    optimizer step, on every rank; and with a guard checks after an optimizer step, on the last batch of it, and keeps
    its state in checkpoints. The guard's batch is the dict of arguments that the Trainer gave the model; the Trainer
    has no logger that callbacks may call, so figures go where the guard's `log` says. Arguments and attributes are
    those of `BoundTraining`.
    """

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **_: Any
    ) -> None:
        """Apply."""
        self._bind(model)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **_: Any
    ) -> None:
        """Make the guard: the model is wrapped, and a checkpoint is loaded."""
        self._saved = state.stateful_callbacks.get(_STATE, self._saved)
        self._start()
        self._batch: dict[str, Any] = {}
        self._hook = model.register_forward_pre_hook(self._see, with_kwargs=True) if self.guard is not None else None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Verify after the first step, and let the guard see the batch."""
        self._stepped()
        if self.guard is not None:
            dtype = torch.bfloat16 if args.bf16 else torch.float16
            with torch.autocast(args.device.type, dtype, enabled=args.bf16 or args.fp16):
                self.guard.step(self._batch)
        if control.should_save:
            self.on_epoch_end(args, state, control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Put the guard's state into the trainer's, which a checkpoint may follow."""
        if self.guard is not None:
            state.stateful_callbacks[_STATE] = self.guard.state_dict()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Leave the model as it was bound."""
        if self._hook is not None:
            self._hook.remove()

    def _see(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model.training:
            self._batch = kwargs
