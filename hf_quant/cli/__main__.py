"""`python -m hf_quant.cli`: the command `hf-quant` where it is not on the PATH."""

import sys

from hf_quant.cli import main


sys.exit(main())
