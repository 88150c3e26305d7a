"""Run the lighthouse as `python -m tft_lighthouse`, with the arguments of the command `tft-lighthouse`."""

import sys

from tft_lighthouse.cli import main

if __name__ == "__main__":
    sys.exit(main())
