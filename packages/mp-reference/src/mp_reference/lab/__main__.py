"""``python -m mp_reference.lab``."""

import sys

if __name__ == "__main__":
    try:
        from mp_reference.lab.cli import entry
    except ModuleNotFoundError as error:
        sys.exit(f"the laboratory's command line needs {error.name}; python -m pip install 'mp-reference[lab]'")
    entry()
