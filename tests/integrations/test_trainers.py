"""Lightning, Accelerate and Hugging Face's Trainer themselves, where they are installed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import loka
from loka import integrations
from tests.support import dispatch_sample as sample
from tests.support.models import dispatch_models as models

pytestmark = pytest.mark.slow

SITES = ("layers.0.up.0", "layers.0.down", "layers.1.up.0", "layers.1.down", "head")
WIDTH = 32


def apply(model):
    return sample.apply(model, sample.BLOCKS)


def batches(number):
    return [torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)) for step in range(number)]


def loader(number):
    return torch.utils.data.DataLoader(batches(number), batch_size=None)


def loss(model, x):
    return model(x.clone().requires_grad_()).square().mean()  # the sample plans gradients of its input, too


def checked(guard):
    """The steps that a guard has seen."""
    return guard.state_dict()["step"]


class TestLightning:
    @pytest.fixture(autouse=True)
    def library(self):
        pytest.importorskip("lightning", reason="lightning is not installed")

    @staticmethod
    def task(model, trained=None):
        from lightning import LightningModule

        class Task(LightningModule):
            """Trains its model, or a part of it; `bound` says what was bound when optimizers were made."""

            def __init__(self):
                super().__init__()
                self.model = model
                self.bound = ()

            def configure_optimizers(self):
                self.bound = [name for name, module in self.model.named_modules() if hasattr(module, "loka")]
                return torch.optim.SGD(self.model.parameters(), lr=0.01)

            def training_step(self, x, step):
                return loss(trained or self.model, x)

        return Task()

    @staticmethod
    def trainer(folder, callback, **options):
        from lightning import Trainer
        from lightning.pytorch.loggers import CSVLogger

        return Trainer(
            accelerator="cpu",
            callbacks=[callback],
            default_root_dir=folder,
            logger=CSVLogger(folder),
            precision="bf16-mixed",
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )

    def test_it_binds_before_optimizers_and_stays_bound(self, tmp_path):
        task, callback = self.task(models.Blocks()), integrations.LightningCallback(apply, model="model")
        self.trainer(tmp_path, callback, max_steps=2).fit(task, loader(4))
        assert task.bound == ["layers.0", "layers.1", "head"]
        assert callback.patch.sites == SITES
        patch = callback.patch
        self.trainer(tmp_path, callback, max_steps=4).fit(task, loader(4))  # bound already
        assert callback.patch is patch
        patch.remove()

    def test_what_did_not_run_ends_the_training(self, tmp_path):
        model = models.Blocks()
        task = self.task(model, model.layers[0])
        with pytest.raises(loka.VerifyError, match="9 of 15 planned FP8 GEMMs did not run"):
            self.trainer(tmp_path, integrations.LightningCallback(apply, "model"), max_steps=2).fit(task, loader(2))

    def test_a_name_that_the_task_does_not_have(self, tmp_path):
        callback = integrations.LightningCallback(apply, "net")
        with pytest.raises(loka.InputError, match=r"a Task has no module 'net': .* \(it has model\)"):
            self.trainer(tmp_path, callback, max_steps=1).fit(self.task(models.Blocks()), loader(1))

    def test_a_guard_counts_optimizer_steps_logs_and_goes_on(self, tmp_path):
        options = {"loss": loss, "every": 1}
        callback = integrations.LightningCallback(apply, "model", options)
        trainer = self.trainer(tmp_path, callback, max_steps=2, accumulate_grad_batches=2)
        trainer.fit(self.task(models.Blocks()), loader(4))
        assert checked(callback.guard) == 2
        trainer.logger.save()
        assert "guard/layers.0/output" in trainer.logger.experiment.metrics_keys
        trainer.save_checkpoint(tmp_path / "two.ckpt")

        resumed = integrations.LightningCallback(apply, "model", options)
        trainer = self.trainer(tmp_path, resumed, max_steps=3, accumulate_grad_batches=2)
        trainer.fit(self.task(models.Blocks()), loader(4), ckpt_path=tmp_path / "two.ckpt", weights_only=True)
        assert checked(resumed.guard) == 3
        plain = self.task(models.Blocks())
        plain.load_state_dict(torch.load(tmp_path / "two.ckpt", weights_only=True)["state_dict"])


class TestAccelerate:
    def test_save_state_and_load_state_have_the_guard(self, tmp_path):
        accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
        hooks = []
        for _ in range(2):
            accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
            model = models.Blocks()
            hook = integrations.AccelerateHook(accelerator, apply, model, guard={"loss": loss, "every": 1})
            prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
            if hooks:
                accelerator.load_state(tmp_path / "state")
            for x in batches(4):
                hook.step(x)
                with accelerator.accumulate(prepared):
                    accelerator.backward(loss(prepared, x))
                    optimizer.step()
                    optimizer.zero_grad()
            if not hooks:
                accelerator.save_state(tmp_path / "state")
            hooks.append(hook)
        assert [checked(hook.guard) for hook in hooks] == [2, 4]


class Task(nn.Module):
    """Returns its loss, as the Trainer expects."""

    def __init__(self, reached=True):
        super().__init__()
        self.model = models.Blocks()
        self.reached = reached

    def forward(self, x):
        return {"loss": loss(self.model if self.reached else self.model.layers[0], x)}


class TestTransformers:
    @staticmethod
    def trainer(folder, callback, task=None, **options):
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        samples = [{"x": row} for batch in batches(8) for row in batch]
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            use_cpu=True,
            bf16=True,
            disable_tqdm=True,
            report_to="none",
            **options,
        )
        return transformers.Trainer(task or Task(), arguments, train_dataset=samples, callbacks=callback)

    @pytest.fixture(autouse=True)
    def library(self):
        pytest.importorskip("transformers", reason="transformers is not installed")

    def test_what_did_not_run_ends_the_training(self, tmp_path):
        callback = integrations.TransformersCallback(apply, "model")
        trainer = self.trainer(tmp_path, [callback], Task(reached=False), max_steps=1)
        assert callback.patch.sites == SITES
        with pytest.raises(loka.VerifyError, match="9 of 15 planned FP8 GEMMs did not run"):
            trainer.train()

    def test_a_callback_that_is_added_too_late(self, tmp_path):
        trainer = self.trainer(tmp_path, [], max_steps=1)
        trainer.add_callback(integrations.TransformersCallback(apply, "model"))
        with pytest.raises(loka.InputError, match="TransformersCallback: the trainer was made without it"):
            trainer.train()

    @pytest.mark.parametrize("strategy", [{"save_strategy": "steps", "save_steps": 2}, {"save_strategy": "epoch"}])
    def test_a_guard_counts_optimizer_steps_and_goes_on(self, tmp_path, strategy):
        figures = []
        options = {
            "loss": lambda model, batch: loss(model, batch["x"]),
            "every": 1,
            "log": lambda step, found: figures.append(SimpleNamespace(step=step, found=found)),
        }
        callback = integrations.TransformersCallback(apply, "model", options)
        self.trainer(tmp_path, [callback], num_train_epochs=1, **strategy).train()
        assert checked(callback.guard) == 4
        assert [each.step for each in figures] == [0, 1, 2, 3]
        resumed = integrations.TransformersCallback(apply, "model", options)
        self.trainer(tmp_path, [resumed], num_train_epochs=2, **strategy).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-4")
        )
        assert checked(resumed.guard) == 8
        assert [each.step for each in figures] == list(range(8))
