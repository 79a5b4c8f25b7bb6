#!/usr/bin/env python3
"""Tables of a build's coverage: lines, and outcomes of conditions.

gcov lists a call that may throw as a branch of two: those are left out wherever they stand, also where the call never
ran. So are branches of lines that hold no name of their own: a brace, or the last strings of a list, whose elements an
exception would destroy; and of static constants, which are guarded while they are made. What is left are the two
outcomes of each condition (operands of && and || by themselves, loops, ?:) and the cases of each switch, on this
project's own lines. A list in braces within an expression still counts twice what only an exception reaches.
"""
import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PARSERS = ["src/model/safetensors.cpp", "src/model/config.cpp", "src/model/config_keys.cpp", "src/model/json.cpp",
           "src/model/checkpoint.cpp", "src/serve/trace.cpp", "cli/batch_file.cpp"]


def host_file(name):
    """The file's path in the project, None when it is not of the host's code."""
    path = pathlib.Path(os.path.normpath(name))
    if not path.is_relative_to(ROOT):
        return None
    path = path.relative_to(ROOT).as_posix()
    return path if path.startswith(("src/", "cli/", "include/")) and not path.startswith("src/backend/cuda/") else None


def conditional(text):
    """Whether a line may hold a condition of its own."""
    code = re.sub(r'"(\\.|[^"\\])*"|//.*', "", text)
    return re.search("[A-Za-z_]", code) and "static const " not in code


def outcomes(branches):
    counts, at = [], 0
    while at < len(branches):
        pair = branches[at:at + 2]
        if any(b["throw"] for b in pair):
            at += 2
        else:
            counts.append(pair[0]["count"])
            at += 1
    return counts


def read(notes):
    """What gcov says of one object: its counts where it ran, zeros where it did not."""
    run = subprocess.run([os.environ.get("GCOV", "gcov"), "--json-format", "--stdout", "--branch-probabilities", notes],
                         check=True, capture_output=True, text=True)
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def measure(build):
    """file -> line -> (count, outcomes), summed over objects and instances of templates."""
    files = collections.defaultdict(dict)
    notes = sorted(str(p.resolve()) for p in pathlib.Path(build).rglob("*.gcno"))
    if not notes:
        sys.exit(f"{build}: no notes of g++ --coverage")
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for documents in pool.map(read, notes):
            for document in documents:
                for file in document["files"]:
                    path = host_file(os.path.join(document["current_working_directory"], file["file"]))
                    for line in file["lines"] if path else []:
                        count, before = files[path].get(line["line_number"], (0, []))
                        here = outcomes(line["branches"])
                        length = max(len(before), len(here))
                        before, here = (x + [0] * (length - len(x)) for x in (before, here))
                        files[path][line["line_number"]] = (count + line["count"],
                                                            [a + b for a, b in zip(before, here)])
    for path, lines in files.items():
        text = (ROOT / path).read_text().splitlines()
        for number, (count, _) in lines.items():
            if not conditional(text[number - 1]):
                lines[number] = (count, [])
    return files


def share(counts):
    reached = sum(1 for c in counts if c)
    return f"{100 * reached / max(1, len(counts)):5.1f}% of {len(counts)}"


def row(name, lines):
    print(f"| {name} | {share([c for c, _ in lines])} | {share([c for _, all in lines for c in all])} |")


def folder(path):
    parts = path.split("/")[:-1]
    return "/".join(parts[:3 if parts[:2] == ["src", "backend"] else 2])


def main():
    args = argparse.ArgumentParser()
    args.add_argument("build")
    args.add_argument("--least", type=float, default=0, help="percent of lines; failure below it")
    args.add_argument("--missing", action="append", default=[], help="lists what this file's tests did not reach")
    args = args.parse_args()
    files = measure(args.build)
    by_folder = collections.defaultdict(list)
    for path, lines in files.items():
        by_folder[folder(path)] += lines.values()
    everything = [line for lines in by_folder.values() for line in lines]
    print("| folder | lines | outcomes of conditions |\n|---|---|---|")
    for name in sorted(by_folder):
        row(f"`{name}`", by_folder[name])
    row("all", everything)
    print("\n| parser | lines | outcomes of conditions |\n|---|---|---|")
    for path in PARSERS:
        row(f"`{path}`", list(files[path].values()))
    for path in args.missing:
        text = (ROOT / path).read_text().splitlines()
        for number, (count, all) in sorted(files[path].items()):
            if count == 0 or 0 in all:
                print(f"{path}:{number}: {count} {all} {text[number - 1].strip()}")
    percent = 100 * sum(1 for c, _ in everything if c) / len(everything)
    if percent < args.least:
        sys.exit(f"lines: {percent:.2f}%, {args.least:g}% are needed")


if __name__ == "__main__":
    main()
