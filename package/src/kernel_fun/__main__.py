"""`python -m kernel_fun versions | prodtime | graphprobe`: what is installed here, how fast it is, how it compiles."""
import argparse
import sys


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernel_fun", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("versions", help="print the versions of everything that decides which kernels run")
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
    from . import probes

    run = probes.prodtime if options.command == "prodtime" else probes.graphprobe
    try:
        run(**{name: value for name, value in vars(options).items() if name != "command"})
    except (RuntimeError, ValueError) as error:
        print(f"kernel_fun {options.command}: {str(error).strip().partition(chr(10))[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
