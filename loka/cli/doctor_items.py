"""What `loka doctor` looks at: this machine's versions, devices and libraries, and the inputs of plans."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import util

import torch

from loka.bench.machine import version_of
from loka.devices.targets import DEVICES, spec_of
from loka.errors import InputError
from loka.kernels.gemm.catalogue import GEMM_KERNELS, Kernel
from loka.kernels.gemm.library import has_fp8
from loka.kernels.measurements.lookup import Measurements
from loka.kernels.measurements.versions import Versions
from loka.mods.policy_loader import load_policy
from loka.plan.evidence import check_sites, open_measurements, open_profile
from loka.plan.examine import examine as examine_model
from loka.plan.planner import planned
from loka.plan.tuning.record import TunedFile
from loka.policy.policy import Policy
from loka.version import __version__

# Versions that the tests ran with, oldest supported first, and where.
TESTED = {
    "torch": {"2.11": "Hopper GPUs", "2.13": "CPU", "2.14": "CPU"},
    "triton": {"3.6": "Hopper GPUs", "3.8": "CPU", "3.9": "CPU"},
}


@dataclass(frozen=True, slots=True)
class Item:
    """A line of the report. `status` is ok, missing, stale or problem; only a problem keeps LoKA from working."""

    name: str
    status: str
    found: str
    note: str


LIBRARIES = {"torchao": "peer to compare with", "torchrec": "models of torchrec"}  # extras of LoKA, and their use


def examine() -> tuple[Item, ...]:
    """Examine the machine. Imports torch, and kernel libraries unless it is already clear that they cannot run."""
    fp8 = [has_fp8(index) for index in range(torch.cuda.device_count())]
    return (
        Item("loka", "ok", __version__, ""),
        _python(),
        _torch(),
        _triton(),
        *_devices(fp8),
        *(_library(*library) for library in LIBRARIES.items()),
        *(_kernel(kernel) for kernel in GEMM_KERNELS),
        _path(fp8),
    )


def _python() -> Item:
    found = platform.python_version()
    fine = tuple(map(int, platform.python_version_tuple()[:2])) >= (3, 11)
    return Item("python", "ok" if fine else "problem", found, "" if fine else "LoKA needs Python 3.11 or newer")


def _torch() -> Item:
    return _version_item("torch", str(torch.__version__), "pip install 'torch>=2.11'")


def _triton() -> Item:
    version = version_of("triton", "pytorch-triton")
    if version is None:
        return Item("triton", "missing", "", "not needed without a GPU; comes with torch on Linux")
    return _version_item("triton", version, "pip install 'triton>=3.6'")


def _version_item(name: str, version: str, install: str) -> Item:
    tested, release = TESTED[name], ".".join(version.split("+")[0].split(".")[:2])
    oldest = next(iter(tested))
    if _numbers(release) < _numbers(oldest):
        return Item(name, "problem", version, f"LoKA needs {name} {oldest} or newer: {install}")
    where = ", ".join(f"{each} ({device})" for each, device in tested.items())
    if release in tested:
        return Item(name, "ok", version, f"tested: {where}")
    return Item(name, "ok", version, f"LoKA was not tested with {name} {release}; tested: {where}")


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".") if part.isdigit())


def _devices(fp8: list[bool]) -> list[Item]:
    if not fp8:
        return [Item("device", "ok", "CPU", "no CUDA device is visible")]
    items = []
    for index, has in enumerate(fp8):
        major, minor = torch.cuda.get_device_capability(index)
        note = f"compute capability {major}.{minor}, {'has' if has else 'has no'} FP8 tensor cores"
        items.append(Item(f"device {index}", "ok", torch.cuda.get_device_name(index), note))
    return items


def _library(name: str, use: str) -> Item:
    version = version_of(name)
    if util.find_spec(name) is None:
        return Item(name, "missing", version or "", f"{use}: pip install 'loka[{name}]'")
    return Item(name, "ok", version or "installed", use)


def _kernel(kernel: Kernel) -> Item:
    """An item that says if a kernel can run here, or why not; plans for other machines may use it anyway."""
    version = kernel.library.version() if kernel.library is not None else None
    reason = kernel.unavailable_reason()
    note = "can run here" if reason is None else f"cannot run here: {reason}"
    return Item(f"kernel {kernel.name}", "ok" if reason is None else "missing", version or "", note)


def _path(fp8: list[bool]) -> Item:
    if any(fp8):
        return Item("FP8 path", "ok", "tensor cores", "GEMMs run on the kernels that a plan names")
    why = "no GPU" if not fp8 else "no GPU with FP8 tensor cores"
    return Item(
        "FP8 path", "ok", "reference", f"{why}: FP8 is computed by torch, right and slow, with the same rounding"
    )


RECORD = "loka bench kernels --record FILE"
_LISTED = 3  # most sites named in a note


def this_device() -> Versions | None:
    """The current CUDA device and its versions; None without one."""
    try:
        return Versions.here()
    except InputError:
        return None


def shipped_items(here: Versions | None) -> tuple[Item, ...]:
    """An item for the shipped measurements of each target that some were made for, also if there are none."""
    items = []
    for target in (spec.name for spec in DEVICES.values() if spec.measured_on):
        name = f"measurements {target}"
        try:
            found = Measurements.shipped(target)
        except InputError as error:
            items.append(Item(name, "problem", "", str(error)))
            continue
        if found is None:
            items.append(Item(name, "missing", "", f"none ship for {target}; a policy can name its own: {RECORD}"))
        elif here is not None and not here.is_of(target):
            note = f"measured on {found.machine}; for plans for {target}, this machine has {here.device}"
            items.append(Item(name, "ok", described(found), note))
        else:
            items.append(fitting(name, found, here))
    return tuple(items)


def policy_items(path: str, here: Versions | None) -> tuple[Item, ...]:
    """Items for the inputs of one policy's plan. Raises InputError if the policy itself cannot be read."""
    policy = load_policy(path)
    return (_target(policy, here), _measurements(policy, here), _profile(policy), *_tuned(policy, here))


def _tuned(policy: Policy, here: Versions | None) -> tuple[Item, ...]:
    """An item for the record of `loka tune`; none where there is no such file."""
    name, again = "policy tuned", f"loka tune {policy.path}"
    if not policy.tuned_file.exists():
        return ()
    try:
        file = TunedFile.of(policy)
        found = planned(policy)
    except InputError as error:
        return (Item(name, "problem", policy.tuned_name, str(error)),)
    if found.ignored or file.record is None:
        return (Item(name, "stale", policy.tuned_name, found.ignored or "it has no records"),)
    record = file.record
    described_ = f"{record.winner}, {record.date[:10]}"
    measured = f"measured on {record.machine}"
    if here is None or not here.is_of(policy.target):
        return (Item(name, "ok", described_, measured),)
    stale = record.machine.differences(here)
    if not stale:
        return (Item(name, "ok", described_, f"{measured}; with what this machine has"),)
    return (Item(name, "stale", described_, "; ".join((measured, *stale, f"to decide by this one: {again}"))),)


def fitting(name: str, found: Measurements, here: Versions | None) -> Item:
    """Compare measurements with this machine, which is of their target or has no GPU."""
    if here is None:
        return Item(name, "ok", described(found), _noted(found, "no GPU here to compare with"))
    installed = {kernel.name: kernel.library.version() or "" for kernel in GEMM_KERNELS if kernel.library is not None}
    stale = found.stale(here, installed)
    if not stale:
        return Item(name, "ok", described(found), _noted(found, "with what this machine has"))
    advice = f"plans are the same as on any machine; to decide by this one: {RECORD}, and `measurements: FILE`"
    return Item(name, "stale", described(found), _noted(found, *stale, advice))


def described(found: Measurements) -> str:
    """`11780 parts, 2026-11-21`."""
    return f"{len(found)} parts, {found.date[:10]}"


def _noted(found: Measurements, *notes: str) -> str:
    return "; ".join([f"measured on {found.machine}", *notes, *found.others])


def _target(policy: Policy, here: Versions | None) -> Item:
    name, target = "policy target", policy.target
    if spec_of(target).is_reference:
        return Item(name, "ok", target, "runs anywhere, slowly")
    if here is None:
        return Item(name, "ok", target, "can be planned and generated here; runs in FP8 on that device")
    if here.is_of(target):
        return Item(name, "ok", target, f"this machine has {here.device}")
    return Item(
        name, "stale", target, f"this machine has {here.device}: generate for it (`target:`), or run where {target} is"
    )


def _measurements(policy: Policy, here: Versions | None) -> Item:
    name = "policy measurements"
    try:
        found = open_measurements(policy)
    except InputError as error:
        return Item(name, "problem", policy.measurements or "", str(error))
    if found is None and spec_of(policy.target).is_reference:
        return Item(name, "ok", "", "none are needed: there is nothing to choose from on the reference path")
    if found is None:
        note = f"none named and none ship for {policy.target}: time decides nothing; {RECORD} on that device"
        return Item(name, "missing", "", note)
    if policy.measurements is None:
        return Item(name, "ok", described(found), f"none named: the set that ships, {found.name}")
    if here is not None and not here.is_of(policy.target):
        return Item(name, "ok", described(found), f"{found.name}; measured on {found.machine}")
    item = fitting(name, found, here)
    return Item(item.name, item.status, item.found, f"{found.name}; {item.note}")


def _profile(policy: Policy) -> Item:
    name, probe = "policy profile", f"loka probe {policy.path}"
    try:
        known = open_profile(policy)
    except InputError as error:
        return Item(name, "problem", policy.profile_name or "", str(error))
    if known is None:
        none = f"none named, and none at {policy.default_profile}"
        return Item(name, "missing", "", f"{none}: `compute: auto` keeps every site as it is; {probe}")
    seen = known.profile
    found = f"{known.name}: {len(known.sites)} sites, {seen.samples} of {seen.steps} steps, {seen.created[:10]}"
    try:
        examined = examine_model(policy)
        sites = examined.sites
        check_sites(known, sites, examined.adapted.adaptations)
    except InputError as error:
        return Item(name, "problem", found, str(error))
    new = [site.name for site in sites if site.name not in known.sites and site.blocked is None]
    if not new:
        return Item(name, "ok", found, f"has every site of {policy.model.factory} that can be patched")
    listed = ", ".join(new[:_LISTED]) + (f" and {len(new) - _LISTED} more" if len(new) > _LISTED else "")
    return Item(name, "stale", found, f"lacks {listed} of {policy.model.factory}: {probe}")
