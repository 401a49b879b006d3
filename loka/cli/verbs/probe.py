"""`loka probe`: statistics of each GEMM's operands in training, and the estimated error in FP8."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Annotated

import typer

from loka.cli.output import Json, PolicyPath, check_not_own, note, print_json, print_line
from loka.cli.verbs.train import SEEDS, Device
from loka.errors import InputError

if TYPE_CHECKING:
    from loka.cli.probe_run import Learned
    from loka.cli.profile_paths import Places
    from loka.plan.examine import Examined
    from loka.probe.profile.profile import Profile

NAME = "probe"
MOST_STEPS = 2**31 - 1
INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it

_FROM_HELP = "Make the profile of full profiles, merged, instead of training: loka probe POLICY --from A B."
_EXCLUDED = (  # two options that contradict each other, and the message
    ("--from", "--check", "--from makes a profile and --check compares with one; use one of the two"),
    ("--from", "--steps", "--from takes what was recorded, and trains no steps; leave out --steps and --every"),
    ("--from", "--ne-batches", "--from takes what was recorded, and evaluates nothing; leave out --ne-batches"),
    ("--check", "--ne-batches", "--check compares distributions, and evaluates nothing; leave out --ne-batches"),
    ("--from", "--device", "--from takes what was recorded, and trains nothing; leave out --device"),
    ("--check", "-o", "--check writes nothing; leave out -o (the profile that it compares with is the policy's)"),
    ("--check", "--draws", "--check estimates nothing; leave out --draws"),
)


def command(
    policy: PolicyPath,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="FILE", help="More profiles for --from.", show_default=False)
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_STEPS, help="Training steps. Default: the policy's, or 80, or one pass."),
    ] = None,
    every: Annotated[
        int | None, typer.Option(min=1, help="Sample one step in this many. Default: as gives 20 samples.")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("-o", "--out", help="The profile. Default: the policy's, or profiles/NAME.safetensors."),
    ] = None,
    merged: Annotated[list[str] | None, typer.Option("--from", metavar="FILE", help=_FROM_HELP)] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare a fresh sample with the profile; exit 1 where it has drifted.")
    ] = False,
    draws: Annotated[
        int | None, typer.Option(min=2, help="The most draws of operands to judge a GEMM by. Default: 16.")
    ] = None,
    ne_batches: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MOST_STEPS,
            help="Held-out batches to measure the change of NE on, at least 2. Default: 4; 0: none.",
        ),
    ] = None,
    synthetic: Annotated[
        bool,
        typer.Option("--synthetic", help="Train on the model's example inputs and random labels: weaker evidence."),
    ] = False,
    full: Annotated[
        float,
        typer.Option(
            min=0, help="The most MB of the full form, for --from, beside the profile; a larger one is left out."
        ),
    ] = 10,
    seed: Annotated[int, typer.Option(min=0, max=SEEDS, help="Of the weights, the batches and the estimates.")] = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Record statistics of each GEMM's operands in training, and estimate the error in FP8."""
    gc.enable()
    from loka.mods.policy_loader import load_policy
    from loka.plan.examine import examine

    files = [*(merged or ()), *(more or ())]
    if more and not merged:  # a shell's `--from *.x` leaves all files but one in `more`
        raise InputError(f"loka probe takes one policy, but was given {more[0]!r} too; merge profiles with --from")
    given = {
        "--from": bool(merged),
        "--check": check,
        "--steps": steps is not None or every is not None,
        "--ne-batches": ne_batches is not None,
        "--device": device != "auto",
        "-o": out is not None,
        "--draws": draws is not None,
    }
    for option, other, message in _EXCLUDED:
        if given[option] and given[other]:
            raise InputError(message)
    if steps is not None and every is not None and steps < every:
        raise InputError(f"--steps is {steps} and --every {every}: not one step would be sampled; lower --every")
    if synthetic and (files or check or ne_batches):
        raise InputError("--synthetic trains on drawn labels; leave out --from, --check and --ne-batches")
    if ne_batches == 1:
        raise InputError("--ne-batches is 1, and an interval takes two: write 2 or more, or 0 for none")
    loaded = load_policy(policy)
    from loka.cli.probe_run import NE_BATCHES, Interrupted, finish, record
    from loka.cli.profile_paths import Places, check_writable, merge_profiles
    from loka.probe.profile import profile_file

    try:
        if check:
            _check_drift(examine(loaded), steps, every, seed, device, as_json)
            return
        places = Places.of(loaded, out)
        check_not_own(str(places.summary), (*loaded.named, *filter(None, [loaded.measurements_file])))
        for each in (places.summary, places.full, places.interrupted):
            profile_file.check_replaceable_by_profile(each)
        check_writable(places.summary)
        check_writable(places.full)
        examined = examine(loaded)
        if files:
            learned = merge_profiles(examined, files)
        else:
            # Until the profile is written, samples are in `interrupted`; synthetic ones are soon made again.
            kept = None if synthetic else places.interrupted
            evaluated = 0 if synthetic else NE_BATCHES if ne_batches is None else ne_batches
            learned = record(examined, steps, every, seed, device, kept, evaluated, synthetic)
        learned = finish(examined, learned, draws, seed)
    except Interrupted as stopped:
        if stopped.recorded is None or files or check or synthetic:
            note(f"interrupted: nothing was {'compared' if check else 'written'}")
        else:
            note(
                f"interrupted: {stopped.recorded.profile.samples} samples are in {places.interrupted}; for a profile "
                f"of them: loka probe {loaded.path} --from {places.interrupted}"
            )
        raise typer.Exit(INTERRUPTED) from stopped
    largest = full * 1e6
    size = _save(learned, places, largest)
    if not files:
        places.interrupted.unlink(missing_ok=True)
    if as_json:
        from loka.cli.tables.probe_tables import result

        print_json(result(examined, learned, places, size <= largest))
    else:
        _show(examined, learned, places, size, largest)


def _save(learned: Learned, places: Places, largest: float) -> int:
    """Save the full form first, unless it has more than `largest` bytes; returns how many it has."""
    from loka.probe.profile import profile_file

    size = profile_file.save(places.full, learned.recorded, largest)
    if size <= largest:
        places.ignore_full()
    profile_file.save(places.summary, learned.recorded.profile)
    return size


def _show(examined: Examined, learned: Learned, places: Places, full: int, largest: float) -> None:
    from loka.cli.tables.probe_tables import show_findings, show_sites

    profile = learned.recorded.profile
    show_sites(examined, profile)
    print()
    modules = [name for name, _ in examined.built.module.named_modules()]
    show_findings(profile.findings, [site.name for site in examined.sites], modules)
    print_line(_summary_line(profile))
    print_line(f"{places.summary}: {places.summary.stat().st_size / 1000:.0f} kB, what loka plan reads")
    if full <= largest:
        print_line(f"{places.full}: {full / 1000:.0f} kB, all statistics, for --from")
    else:
        there = "; the one that is there is an earlier one" if places.full.exists() else ""
        print_line(
            f"{places.full}: {full / 1e6:.0f} MB, more than the {largest / 1e6:g} MB of --full: left out{there}. Only "
            "full forms can be merged, by --from"
        )
    times = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in learned.seconds.items())
    note(f"time: {times}")
    if places.advice:
        print_line(places.advice)
    else:
        note(f"next: loka plan {examined.policy.path}")


def _summary_line(profile: Profile) -> str:
    ran = sum(bool(site.operands) for site in profile.sites)
    by = " of drawn inputs and labels: weaker evidence than training" if profile.synthetic else ""
    return (
        f"{profile.name}: {profile.samples} samples{by} in {profile.steps} steps of {profile.batch_size}, "
        f"{ran} of {len(profile.sites)} watched sites ran, {len(profile.findings)} findings."
    )


def _check_drift(
    examined: Examined, steps: int | None, every: int | None, seed: int, device: str, as_json: bool
) -> None:
    """Compare a fresh sample with the policy's profile. Raises InputError if it is missing or of another model."""
    from loka.cli.probe_run import record
    from loka.cli.profile_paths import Places, check_fits
    from loka.cli.tables.probe_tables import drift_result, show_drift
    from loka.probe import drift
    from loka.probe.profile import profile_file

    path = Places.of(examined.policy, None).summary
    known = profile_file.load_profile(path)
    check_fits(examined, known, str(path), "--check")
    fresh = record(examined, steps or known.steps, every or (None if steps else known.every), seed, device)
    drifts = drift.compare(known, fresh.recorded.profile)
    beyond = drift.exceeded(drifts)
    if as_json:
        print_json(drift_result(known, drifts))
    else:
        print_line(f"{path}: {drift.age(known)}")
        show_drift(drifts)
    if beyond:
        note(
            f"{len(beyond)} of {len(drifts)} operands have drifted beyond their threshold: run loka probe again; until "
            f"then {drift.way_back(beyond)} sends their sites back to the model's own GEMMs in a running model"
        )
        raise typer.Exit(1)
