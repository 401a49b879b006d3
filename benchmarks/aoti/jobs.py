"""What one process does: export and compile a model, load the package and run it, or time it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

PACKAGE = "loka_aoti_package"  # the generated package, in the folder

POLICY = """\
version: 1
name: {package}
model: {{factory: "{factory}", inputs: "{inputs}", batch_size: {batch}}}
target: {target}
defaults: {{compute: fp8, format: e4m3, scaling: rowwise, power_of_two: true, requantize_transpose: true,
           fuse: always, kernel: torch.scaled_mm}}
rules:
  - {{match: {{max_n: {smallest}}}, compute: keep, optional: true}}
  - {{match: {{max_k: {smallest}}}, compute: keep, optional: true}}
mods: [{{use: fuse_interaction, optional: true}}]
"""


@dataclass(frozen=True, slots=True)
class AotiModel:
    """A model, by "module:function" of it and of its inputs, and the folder for all files."""

    factory: str
    inputs: str
    batch: int
    device: str  # cuda or cpu
    folder: str

    def path(self, name: str) -> Path:
        """A file of the folder."""
        return Path(self.folder) / name


@dataclass(frozen=True, slots=True)
class ModelForm:
    """How a model is exported. `options`: Inductor's."""

    name: str
    fp8: bool = False
    autocast: bool = False  # float32 parameters under autocast, not all in bfloat16
    dynamic: bool = False  # the batch
    bags: bool = False  # the first input's rows come from an embedding bag in the model
    linear: bool = False  # a single nn.Linear in the model's place: does AOTInductor run on this machine at all?
    options: dict[str, Any] = field(default_factory=dict)


class Action(StrEnum):
    """What a process does with a form."""

    COMPILE = "compile"
    COMPILE_AND_RUN = "compile and run"  # loads its own package
    RUN = "run"  # a package that another process compiled, without LoKA
    TIME_PACKAGE = "time package"
    TIME_COMPILED = "time compiled"  # torch.compile
    TIME_GRAPH = "time graph"  # the same in a CUDA graph


@dataclass(frozen=True, slots=True)
class Job:
    """One process. `rounds`: timed runs, 0 to compile only."""

    name: str
    subject: AotiModel
    form: ModelForm
    action: Action
    inference_mode: bool = False
    rounds: int = 0
    environment: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """As text, for a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The job of such a text."""
        read = json.loads(text)
        parts = {
            "subject": AotiModel(**read["subject"]),
            "form": ModelForm(**read["form"]),
            "action": Action(read["action"]),
        }
        return cls(**read | parts)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a process found. `failure`: how it ended and its last lines on stderr, or ""."""

    name: str
    seconds: float
    ms: float | None = None  # median of a run
    largest_error: float | None = None  # against the model in the same form, eager
    scale: float | None = None  # the largest absolute value of that
    failure: str = ""


LINEAR, BF16, FP8 = ModelForm("linear", linear=True), ModelForm("bf16"), ModelForm("fp8", fp8=True)
FORMS = (
    *(LINEAR, BF16, FP8),
    ModelForm("bf16-autocast", autocast=True),
    ModelForm("bf16-dynamic", dynamic=True),
    ModelForm("bf16-bags", bags=True),
    ModelForm("bf16-mmap", options={"aot_inductor.force_mmap_weights": True}),
)


def compiling(subject: AotiModel) -> tuple[Job, ...]:
    """One process for each form, one that runs its own package, and what fills torch.compile's caches."""
    forms = tuple(Job(f"compile {form.name}", subject, form, Action.COMPILE) for form in FORMS)
    same = ModelForm("bf16-same")
    alone = Job("bf16: loaded by the process that compiled it", subject, same, Action.COMPILE_AND_RUN)
    warm = tuple(Job(f"warm {form.name}", subject, form, Action.TIME_COMPILED) for form in (BF16, FP8))
    return (*forms, alone, *warm)


def running(subject: AotiModel) -> tuple[Job, ...]:
    """Each package in a fresh process, that of BF16 in several ways."""
    blocking = {"CUDA_LAUNCH_BLOCKING": "1"}
    return (
        *(Job(f"{form.name}: fresh process", subject, form, Action.RUN) for form in FORMS),
        Job("bf16: fresh process, inference_mode", subject, BF16, Action.RUN, inference_mode=True),
        Job("bf16: fresh process, CUDA_LAUNCH_BLOCKING=1", subject, BF16, Action.RUN, environment=blocking),
    )


def timing(subject: AotiModel, rounds: int) -> tuple[Job, ...]:
    """The figures, one process after the other; a CUDA graph on a GPU alone."""
    graph = (Job("FP8 CUDA graph", subject, FP8, Action.TIME_GRAPH, rounds=rounds),)
    return (
        Job("BF16 torch.compile", subject, BF16, Action.TIME_COMPILED, rounds=rounds),
        Job("BF16 AOTInductor", subject, BF16, Action.TIME_PACKAGE, rounds=rounds),
        Job("FP8 torch.compile", subject, FP8, Action.TIME_COMPILED, rounds=rounds),
        Job("FP8 AOTInductor", subject, FP8, Action.TIME_PACKAGE, rounds=rounds),
        *(graph if subject.device == "cuda" else ()),
    )
