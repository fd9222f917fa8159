"""`python -m vllm_repro`."""

import sys

from vllm_repro.cli import main

sys.exit(main())
