"""``python -m mp_conformance``."""

from mp_conformance.cli import main

raise SystemExit(main())
