#!/usr/bin/env python3
"""Runs the tests of the scripts: run_all.py [JUNIT_FILE]. Exits with 1 if one fails or none is found."""
import pathlib
import sys
import time
import unittest
import xml.etree.ElementTree as ElementTree


class RecordingResult(unittest.TextTestResult):
    """Keeps name and time of all tests, as a JUnit file wants them."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.names = []
        self.seconds = {}
        self.started = 0.0

    def startTest(self, test):
        super().startTest(test)
        self.names.append(test.id())
        self.started = time.monotonic()

    def stopTest(self, test):
        super().stopTest(test)
        self.seconds[test.id()] = time.monotonic() - self.started


def write_junit(result, path):
    failed = {test.id() for test, _ in result.failures + result.errors}
    skipped = {test.id(): reason for test, reason in result.skipped}
    suite = ElementTree.Element("testsuite", name="scripts")
    # An error outside of a test (an import, say) has a name that never started.
    for name in result.names + sorted(failed - set(result.names)):
        case = ElementTree.SubElement(suite, "testcase", name=name,
                                      time=f"{result.seconds.get(name, 0):.3f}")
        if name in failed:
            ElementTree.SubElement(case, "failure")
        elif name in skipped:
            ElementTree.SubElement(case, "skipped", message=skipped[name])
    ElementTree.ElementTree(suite).write(path)


def main(arguments):
    sys.dont_write_bytecode = True
    suite = unittest.defaultTestLoader.discover(str(pathlib.Path(__file__).resolve().parent))
    result = unittest.TextTestRunner(stream=sys.stdout, resultclass=RecordingResult).run(suite)
    if arguments:
        write_junit(result, arguments[0])
    return 0 if result.wasSuccessful() and result.testsRun > 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
