"""The training job of a policy, from the command line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from loka.errors import InputError, LokaError

if TYPE_CHECKING:
    from loka.bench.quality.training_job import TrainingJob
    from loka.policy.policy import Policy

_LOKA = str(Path(__file__).parents[1]) + os.sep

DEVICES = ("auto", "cpu", "cuda")


def make_job(policy: Policy, steps: int | None, device: str, tested: bool = True) -> TrainingJob:
    """The policy's job; `steps` and `device` as on the command line. Without `tested`, train.test may be missing.

    Raises InputError, with the place in the policy, if it has no train section or a callable cannot be found.
    """
    from loka.bench.quality.training_job import job_of

    return job_of(policy, steps, choose_device(device), tested)


@contextmanager
def training_of(policy: Policy) -> Iterator[None]:
    """Context of training with the user's batches, model and loss: their exceptions become InputErrors with a place.

    An exception from LoKA or a generated package, by the innermost frame outside torch, is raised unchanged.
    """
    from loka.bench.quality.training_calls import TrainingCallError
    from loka.sites.callables import describe_error, place_of

    try:
        yield
    except TrainingCallError as error:
        raise InputError(f"{policy.where(error.field)}: {error}") from error
    except LokaError:
        raise
    except (Exception, SystemExit) as error:
        place = place_of(error)
        if not place or place.startswith((_LOKA, os.path.abspath("generated") + os.sep)):
            raise
        where = policy.where("train")
        raise InputError(f"{where}: train: training raised {describe_error(error)}; correct it there") from error


def choose_device(wanted: str) -> str:
    """The device to train on; `auto` is a GPU if there is one. Raises InputError if the device is not available."""
    import torch

    if wanted not in DEVICES:
        raise InputError(f"--device is {wanted!r}, but must be one of {', '.join(DEVICES)}")
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise InputError("--device is cuda, but torch sees no GPU here; leave the option out, or see loka doctor")
    return "cuda" if available and wanted != "cpu" else "cpu"
