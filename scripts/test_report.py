#!/usr/bin/env python3
"""What became of the tests of one step of make test, and what each of them took.

test_report.py count STEP JUNIT [FOLDER]   prints "PASSED FAILED SKIPPED" and appends to build/test-results/times
test_report.py summary FILE                the slowest ten tests and the sum of every step

JUNIT is ctest's file, or that of tests/scripts/run_all.py. FOLDER holds a gtest file ENTRY.xml for each
ctest entry that is a gtest program: its tests are counted one by one. An entry that failed without a
failing test in its file (it crashed, hung, or a sanitizer ended it) is one failure. Skipped tests are
neither passed nor failed: a summary must not claim what did not run. A file that cannot be read is one
failure.
"""
import collections
import pathlib
import sys
import xml.etree.ElementTree as ElementTree

SHOWN_FROM_S = 0.1
NUM_SLOWEST = 10

Test = collections.namedtuple("Test", "name outcome seconds reason")


def read(path):
    """The tests of a JUnit file, of whichever dialect."""
    tests = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        suite = case.get("classname", "")
        name = case.get("name")
        skip = case.find("skipped")
        # ctest marks a disabled test and one whose program is missing by the status alone.
        status = case.get("status", "run")
        outcome, reason = "passed", ""
        if case.find("failure") is not None or case.find("error") is not None or status == "fail":
            outcome = "failed"
        elif skip is not None or status in ("disabled", "notrun"):
            outcome = "skipped"
            reason = (skip.get("message") or skip.text or "") if skip is not None else status
        tests.append(Test(name if suite in ("", name) else f"{suite}.{name}", outcome,
                          float(case.get("time", 0)), reason.strip().splitlines()[-1:]))
    return tests


def collect(junit, folder=None):
    """All tests of a step: the tests of gtest programs in place of the entries that ran them."""
    try:
        entries = read(junit)
    except (OSError, ElementTree.ParseError) as error:
        return [Test(f"{junit}: no results: {error}", "failed", 0.0, [])]
    tests = []
    for entry in entries:
        inner = pathlib.Path(folder or "", f"{entry.name}.xml")
        try:
            found = read(inner) if folder and inner.exists() else []
        except ElementTree.ParseError:
            found = []
        if entry.outcome == "failed" and all(test.outcome != "failed" for test in found):
            found.append(entry)
        tests += found or [entry]
    return tests


def show(tests, out):
    """A line per test from SHOWN_FROM_S on, the quick ones in one, and why tests were skipped."""
    by_time = sorted(tests, key=lambda test: -test.seconds)
    slow = [test for test in by_time if test.seconds >= SHOWN_FROM_S]
    for test in slow:
        print(f"{test.seconds:8.1f} s  {test.name}", file=out)
    quick = sum(test.seconds for test in by_time[len(slow):])
    print(f"{quick:8.1f} s  {len(tests) - len(slow)} tests of less than {SHOWN_FROM_S} s each", file=out)
    reasons = collections.Counter(" ".join(test.reason) for test in tests if test.outcome == "skipped")
    for reason, number in reasons.items():
        print(f"skipped: {number} tests: {reason or 'no reason given'}", file=out)
    for test in tests:
        if test.outcome == "failed":
            print(f"failed: {test.name}", file=out)


def summary(lines):
    """From lines "STEP<tab>SECONDS<tab>NAME": the slowest tests, and what each step took."""
    rows = [line.rstrip("\n").split("\t") for line in lines]
    text = [f"the slowest {NUM_SLOWEST} tests:"]
    for step, seconds, name in sorted(rows, key=lambda row: -float(row[1]))[:NUM_SLOWEST]:
        text.append(f"{float(seconds):8.1f} s  {step}: {name}")
    sums = collections.defaultdict(lambda: [0, 0.0])
    for step, seconds, _ in rows:
        sums[step][0] += 1
        sums[step][1] += float(seconds)
    for step, (number, seconds) in sums.items():
        text.append(f"{seconds:8.1f} s  in {number} tests of {step}, one after the other")
    return "\n".join(text)


def main(arguments):
    if arguments[:1] == ["summary"]:
        with open(arguments[1], encoding="utf-8") as file:
            print(summary(file))
        return
    _, step, junit, *folder = arguments
    tests = collect(junit, *folder)
    show(tests, sys.stderr)
    with open(pathlib.Path(junit).parent / "times", "a", encoding="utf-8") as file:
        for test in tests:
            file.write(f"{step}\t{test.seconds}\t{test.name}\n")
    outcomes = collections.Counter(test.outcome for test in tests)
    print(outcomes["passed"], outcomes["failed"], outcomes["skipped"])


if __name__ == "__main__":
    main(sys.argv[1:])
