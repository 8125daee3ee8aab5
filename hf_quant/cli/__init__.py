"""The command line: `hf-quant quantize | plan | inspect | eval | bench | card | export | import | ...`.

A mistake of the user, or a file that is missing or broken, is one line on stderr and exit status 2; `--debug` shows
where it was found. `main` imports nothing heavy before it knows the command: `hf-quant --help` answers at once.
"""

from hf_quant.cli._main import main


__all__ = ["main"]
