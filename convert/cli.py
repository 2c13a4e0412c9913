"""The command edgemoe-convert."""

import argparse
import json
import os
import sys

from .conversion import MAX_JOBS, convert
from .errors import ConvertError

EXAMPLES = """\
examples:
  edgemoe-convert qwen3-30b-a3b-Q4_K_M.gguf
      writes qwen3-30b-a3b-Q4_K_M.edgemoe beside it
  edgemoe-convert big-00001-of-00003.gguf /fast/big.edgemoe
      takes all three parts, whichever of them is named
  edgemoe-convert --verify model.gguf
      converts and then compares every byte; if the package exists, only compares
  edgemoe-convert --force model.gguf
      replaces a package that was made from another file

A run that was stopped (Ctrl-C, full disk, power) leaves OUT.partial; the same command goes on from there.
exit codes: 0 done, 1 bad input or a difference, 2 wrong usage, 130 stopped by Ctrl-C
"""


def main(argv=None):
    """Run the command; returns its exit code."""
    args = _parser().parse_args(argv)
    progress = not args.quiet and sys.stderr.isatty()
    try:
        report = convert(args.source, args.out, jobs=args.jobs, force=args.force, verify=args.verify, progress=progress)
        if args.json:
            print(json.dumps(report.as_dict()), flush=True)
        elif not args.quiet:
            print(_text(report), flush=True)
    except ConvertError as err:
        return _fail(str(err), 1)
    except OSError as err:
        where = f"{os.fsdecode(err.filename)}: " if err.filename else ""
        return _fail(f"{where}{err.strerror or err}; what is finished is kept, run again to go on", 1)
    except KeyboardInterrupt:
        return _fail("stopped; what is finished is kept, run again to go on", 130)
    return 0


def _parser():
    parser = argparse.ArgumentParser(
        prog="edgemoe-convert", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Split a Mixture-of-Experts GGUF into a package with one file per expert, "
                    "byte for byte the same weights.")
    parser.add_argument("source", metavar="SRC", help="GGUF file, or any part of a split one")
    parser.add_argument("out", metavar="OUT", nargs="?",
                        help="package folder (default: SRC's name with .edgemoe, beside it)")
    parser.add_argument("--jobs", type=_jobs, metavar="N",
                        help=f"threads, up to {MAX_JOBS} (default: processors available, at most 4)")
    parser.add_argument("--verify", action="store_true", help="compare every byte of the package with the source")
    parser.add_argument("--force", action="store_true", help="replace an existing package")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no report")
    return parser


def _jobs(text):
    if not text.isdecimal() or not 1 <= int(text) <= MAX_JOBS:
        raise argparse.ArgumentTypeError(f"found {text}, wanted 1 to {MAX_JOBS}")
    return int(text)


def _text(report):
    lines = [f"{report.architecture}, {report.layers} layers with routed experts, {report.experts} experts in all"]
    if report.status == "converted":
        kept = f", {report.resumed_blobs} experts kept from an earlier run" if report.resumed_blobs else ""
        lines.append(f"wrote {report.out}: {report.bytes_out / 1e9:.2f} GB in {report.seconds:.1f} s "
                     f"({report.bytes_per_second / 1e9:.2f} GB/s, peak memory {report.peak_rss_bytes / 1e6:.0f} MB)"
                     f"{kept}")
    elif report.status == "up to date":
        lines.append(f"{report.out}: up to date")
    if report.verified:
        lines.append(f"{report.out}: verified, every byte is as in the source")
    # A file name may hold bytes that are no text.
    return "\n".join(lines).encode("utf-8", "replace").decode("utf-8")


def _fail(message, code):
    # One line, whatever a file name in the message holds.
    print(f"edgemoe-convert: {'' if code == 130 else 'error: '}{' '.join(message.splitlines())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
