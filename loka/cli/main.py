"""Entry point: registers the verbs, and turns errors into messages and exit statuses."""

from __future__ import annotations

import atexit
import errno
import gc
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from loka.cli.output import note, results_alone
from loka.cli.verbs import (
    bench,
    compare,
    diff,
    doctor,
    explain,
    generate,
    init,
    plan,
    probe,
    report,
    schema,
    train,
    tune,
    validate,
)
from loka.errors import IgnoredWarning, InputError, LokaError
from loka.version import __version__

_JSON = "--json"
INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
_NOT_WRITTEN = (errno.ENOSPC, errno.EFBIG, errno.EIO, errno.EDQUOT)
BROKEN_PIPE = 141  # 128 + SIGPIPE


class Verbs(TyperGroup):
    """The group of verbs, which handles their errors.

    A LokaError becomes a message on stderr and its exit status, and so does any exception of the model's own code,
    including `sys.exit`. Any other exception is a fault in LoKA: a note says so and where, and it keeps its traceback.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            with results_alone() if _JSON in ctx.args else nullcontext(), _notes_shown():
                result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except LokaError as error:
            note(str(error))
            raise typer.Exit(error.exit_status) from error
        except KeyboardInterrupt as error:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from error
        except BrokenPipeError as error:
            # The reader is gone: flushing the rest of the buffer at exit would fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from error
        except (Exception, SystemExit) as error:
            if type(error).__module__.startswith(("typer.", "click.")):  # an option, or a way to leave
                raise
            message = _output_fault(error) or _authors_fault(error)
            if message is None:
                raise
            note(message)
            raise typer.Exit(InputError.exit_status) from error


def _authors_fault(error: BaseException) -> str | None:
    """Message for an exception of the model's own code; None, with a note, for one of LoKA's."""
    from loka.model.callables import authors_frame, describe_error, lokas_place

    frame = authors_frame(error)
    if frame is None:
        note(f"an error of LoKA's own, at {lokas_place(error)}: report it with the traceback that follows")
        return None
    return f"the model's code raised {describe_error(error)}, in {frame.name}; make it work without LoKA first"


def _output_fault(error: BaseException) -> str | None:
    """Message for an error of writing to stdout; None for another."""
    if isinstance(error, OSError) and error.filename is None and error.errno in _NOT_WRITTEN:
        return f"stdout: cannot be written ({error.strerror}); free space, or send it elsewhere"
    return None


@contextmanager
def _notes_shown() -> Iterator[None]:
    """Context that prints warnings of LoKA as notes, each message once in a run.

    Other warnings are shown as usual.
    """
    shown: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", IgnoredWarning)
        show = warnings.showwarning

        def showwarning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if not issubclass(category, IgnoredWarning):
                show(message, category, *place, **more)
            elif str(message) not in shown:
                shown.add(str(message))
                note(f"note: {message}")

        warnings.showwarning = showwarning
        yield


app = typer.Typer(
    cls=Verbs,
    name="loka",
    help="FP8 training and inference for large recommendation models: a policy becomes generated code.",
    epilog="Exit status: 0 fine; 1 a check failed; 2 bad input. Every verb takes --json.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    if requested:
        print(f"loka {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """FP8 training and inference for large recommendation models: a policy becomes generated code."""


for verb in (init, validate, probe, plan, explain, diff, tune, generate, train, compare, bench, report, schema, doctor):
    app.command(verb.NAME)(verb.command)


def run() -> None:
    """Entry point of `loka` and `python -m loka`."""
    # A large model is many small objects, none of them garbage: collecting costs a sixth of `loka plan`. Verbs that
    # train enable it again.
    gc.disable()
    if sys.stdout is None:  # the process was started without: its results are not wanted
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        app(prog_name="loka")
    except SystemExit as done:
        if done.code is not None and not isinstance(done.code, int):
            raise
        _leave(done.code or 0)


def _leave(status: int) -> None:
    """End the process without freeing a large model object by object, which can take a second."""
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        status = status or BROKEN_PIPE
    except OSError:  # full
        status = status or InputError.exit_status
    os._exit(status)
