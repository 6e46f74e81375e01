"""`python -m kernel_fun versions | kernels | prodtime | graphprobe`: what is installed here, how fast it is, how it
compiles. The exit status is 1 where something that was asked for could not be measured, with one line that says why.
"""
import argparse
import importlib
import os
import signal
import sys


def kernels() -> None:
    """Print every kernel of this copy: the stages it stands for, what it was promoted on, whether it can run here."""
    from ._common import promoted

    print("Each kernel when it was promoted, in the chain of that day; against fla (000), the chain without it (ship):")
    for family in ("kda", "cconv"):
        package = f"{__package__}.{family}"
        unusable = {name: why for name, module, why in promoted.modules(package) if module is None}
        for entry in importlib.import_module(f"{package}._provenance").SHIPPED:
            print(family, entry.module, *entry.spans)
            for line in entry.evidence:
                print("   ", line)
            if entry.module in unusable:
                print("    not usable here:", unusable[entry.module])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernel_fun", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("versions", help="print the versions of everything that decides which kernels run")
    commands.add_parser("kernels", help="print the kernels of this copy and what each was promoted on")
    timing = commands.add_parser("prodtime", help="time the installed copy at production shapes, next to fla")
    timing.add_argument("--family", choices=("kda", "cconv"), help="only this operator (default: both)")
    timing.add_argument("--batch", type=int, help="batch size in place of the production one, for a smaller GPU")
    timing.add_argument("--repeats", type=int, default=10, help="timed rounds after three warm ones (default: 10)")
    graphs = commands.add_parser("graphprobe", help="count graph breaks, recompiles and CUDA graph capture outcomes")
    graphs.add_argument("--family", choices=("kda", "cconv"), help="only this operator (default: both)")
    options = parser.parse_args(argv)
    if options.command == "versions":
        from . import versions

        for name, version in versions().items():
            print(name, version)
        return 0
    if options.command == "kernels":
        kernels()
        return 0
    from . import probes

    run = probes.prodtime if options.command == "prodtime" else probes.graphprobe
    try:
        run(**{name: value for name, value in vars(options).items() if name != "command"})
    except (RuntimeError, ValueError) as error:
        print(f"kernel_fun {options.command}: {str(error).strip().partition(chr(10))[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # of `... | head`, which has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    sys.exit(code)
