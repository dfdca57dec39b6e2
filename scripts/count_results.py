#!/usr/bin/env python3
"""Prints "PASSED FAILED" of a JUnit result file; names what was skipped, with the reason, on stderr.

Skipped tests count as neither: a summary must not claim what did not run. A file that cannot be
read is one failure.
"""
import sys
import xml.etree.ElementTree as ElementTree


def count(path):
    """Returns (passed, failed, skipped), the last as a list of lines for people."""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as error:
        print(f"{path}: no results: {error}", file=sys.stderr)
        return 0, 1, []
    passed, failed, skipped = 0, 0, []
    for case in root.iter("testcase"):
        skip = case.find("skipped")
        # ctest marks a disabled test and one whose program is missing by the status alone.
        status = case.get("status", "run")
        if case.find("failure") is not None or case.find("error") is not None or status == "fail":
            failed += 1
        elif skip is not None or status in ("disabled", "notrun"):
            reason = skip.get("message", "") if skip is not None else status
            skipped.append(f"skipped: {case.get('name')} {reason}".rstrip())
        else:
            passed += 1
    return passed, failed, skipped


if __name__ == "__main__":
    num_passed, num_failed, skipped_lines = count(sys.argv[1])
    for line in skipped_lines:
        print(line, file=sys.stderr)
    print(num_passed, num_failed)
