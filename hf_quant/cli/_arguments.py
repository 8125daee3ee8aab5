"""The parser of commands, whose errors are one line, and types of arguments."""

import argparse
import re
import sys
from difflib import get_close_matches
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """argparse's parser, with errors of one line. An empty argument is one: as a path it is the current directory."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if "" in (sys.argv[1:] if args is None else args):
            self.error("an argument is empty, as from a variable that is not set")
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:  # said by the command's own parser, whose help has its options
            options = get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1)
            self.error(f"unrecognized arguments: {' '.join(unknown)}" + "".join(f"; is it {o}?" for o in options))
        return known, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; `{self.prog} --help` shows what is allowed\n")


def positive(text: str) -> int:
    """Parse a count of at least 1 from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def size(text: str) -> str:
    """Check a number of bytes in the form that the hosts read."""
    if re.fullmatch(r"(?=.*[1-9])\d+(\.\d+)? ?[KMGT]B", text, re.IGNORECASE) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 5GB (units: KB, MB, GB, TB)")
    return text
