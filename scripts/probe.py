"""Measures this machine once, for all later plans: bus, blocks, products of experts, updates on the host, memory.

    python scripts/probe.py
    python scripts/probe.py --device cpu --dry-run

Prints the measurements and stores them in ~/.cache/lightering, in one file for each device's name. There
`hardware=auto` and `hardware=measured` find them. Run it on an idle machine: other programs would slow it down.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training.runs import starting

if __name__ == "__main__":
    starting.refuse_foreign_python()
    starting.end_on_interrupt()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:N or cpu (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print the measurements and store nothing")
    options = parser.parse_args()
    # Imported after parsing, because torch takes seconds.
    from training.errors import UserError
    from training.planning.machine import keep, probe
    from training.profiling.hardware import resolve_device
    from training.visible_text import visible

    starting.interrupt_as_usual()
    try:
        device = resolve_device(options.device)
        figures = probe(device)
        for key, value in figures.items():
            print(f"{key:18} {value if isinstance(value, str) else format(value, 'g')}")
        if not options.dry_run:
            print(f"kept in {keep(device, figures)}")
    except UserError as error:
        print(f"error: {visible(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    with starting.interrupt_in_one_line():
        sys.exit(main())
