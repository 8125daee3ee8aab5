"""`main`: parse the arguments, run one command, and turn expected errors into one line."""

import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from importlib import import_module

from hf_quant.cli._parser import build_parser


def main(arguments: list[str] | None = None) -> int:
    """Run a command; `arguments` default to `sys.argv[1:]`. Returns the exit status: 0, 2 on errors, 130 on Ctrl-C."""
    for name in ("stdout", "stderr"):  # None: the parent process has closed it (`>&-`)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
    args = build_parser().parse_args(arguments)
    args.typed = sys.argv[1:] if arguments is None else list(arguments)
    module, function = args.command
    try:
        # `doctor` has to work even if a host is missing or broken.
        quiet = contextlib.nullcontext() if module == "_doctor" else _quiet_hosts(verbose=args.debug)
        with _stoppable(), quiet:
            getattr(import_module(f"hf_quant.cli.{module}"), function)(args)
            sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        print("hf-quant: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `hf-quant plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except _expected_errors() as error:
        if args.debug:
            traceback.print_exc()
        message = " ".join(str(error).split())
        if not message or not isinstance(error, ValueError | OSError):  # the message alone says little
            message = f"{type(error).__name__}: {message}"
        print(f"hf-quant: error: {message}", file=sys.stderr)
        return 2


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Context manager: SIGTERM ends the command as Ctrl-C does, and unfinished output is removed. Exit status 143."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _expected_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that mistakes of the user and missing or broken files raise."""
    from safetensors import SafetensorError

    # RuntimeError: what torch and the hosts raise on a full device, or on tensors that do not fit a model.
    return ValueError, OSError, ImportError, RuntimeError, SafetensorError


@contextlib.contextmanager
def _quiet_hosts(*, verbose: bool) -> Iterator[None]:
    """Context manager: keep the hosts' warnings off stderr, and their progress bars unless it is a terminal."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

    if not verbose:  # diffusers, where a command imports it, gives its logger a handler of its own
        os.environ.setdefault("DIFFUSERS_VERBOSITY", "critical")
    bars, hub_bars = is_progress_bar_enabled(), not are_progress_bars_disabled()
    loggers = {name: logging.getLogger(name) for name in ("transformers", "diffusers", "huggingface_hub")}
    before = {name: (list(logger.handlers), logger.propagate, logger.level) for name, logger in loggers.items()}
    with warnings.catch_warnings():
        if not verbose:
            warnings.simplefilter("ignore")
            for logger in loggers.values():
                logger.handlers, logger.propagate = [logging.NullHandler()], False
        if not sys.stderr.isatty():
            disable_progress_bar()
            disable_progress_bars()
        try:
            yield
        finally:
            for name, logger in loggers.items():
                logger.handlers, logger.propagate, level = before[name]
                logger.setLevel(level)
            if bars:
                enable_progress_bar()
            if hub_bars:
                enable_progress_bars()
