"""`loka.integrations.AccelerateHook`: FP8 in a loop with Hugging Face's Accelerate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from loka.dispatch.patch import Patch
from loka.integrations.training import BoundTraining

if TYPE_CHECKING:
    from accelerate import Accelerator


class AccelerateHook(BoundTraining):
    """Trains a model in FP8 in a loop with an Accelerator. It applies at once: make it before `prepare`.

        hook = AccelerateHook(accelerator, clicks.apply, model)
        prepared, optimizer = accelerator.prepare(model, optimizer)
        for batch in data:
            hook.step(batch)
            accelerator.backward(loss(prepared, batch))
            optimizer.step()
            optimizer.zero_grad()

    With a guard it sends its figures to the accelerator's trackers, and its state goes into `save_state` and comes from
    `load_state`. `guard` and the attributes are those of `BoundTraining`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        apply: Callable[[nn.Module], Patch],
        model: nn.Module,
        guard: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(apply, "", guard)
        self._accelerator = accelerator
        self._started = False
        self._bind(model)
        if guard is not None:
            accelerator.register_for_checkpointing(self)

    def step(self, batch: Any) -> None:
        """Report a batch, on the model's device, before it is trained on; on every rank, before each batch.

        The second call verifies what ran since the first. The guard checks between optimizer steps.
        """
        if self._started:
            self._stepped()
        else:
            self._started = True
            self._start(lambda step, figures: self._accelerator.log(figures, step))
        if self.guard is not None and self._accelerator.sync_gradients:
            with self._accelerator.autocast():
                self.guard.step(batch)
